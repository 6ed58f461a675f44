// The loops of accumulations of 16-bit floats. Part of kernels_isa.cpp.

using Wide = Plain<float>;

template <class Into, class A, class B>
void add_loop(void* into, const void* left, const void* right, std::size_t count) {
  auto* out = static_cast<Stored<typename Into::Memory>*>(into);
  const auto* a = static_cast<const Stored<typename A::Memory>*>(left);
  const auto* b = static_cast<const Stored<typename B::Memory>*>(right);
  UNISONO_INDEPENDENT
  for (std::size_t i = 0; i < count; i++) {
    out[i].value = Into::store(A::load(a[i].value) + B::load(b[i].value));
  }
}

#if defined(__F16C__)
// As half_loop(). They return the number of elements done; add_loop() does the rest.
__m256 eight(const Stored<u16>* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

std::size_t begin_halves(float* sum, const void* left, const void* right, std::size_t count) {
  const auto* a = static_cast<const Stored<u16>*>(left);
  const auto* b = static_cast<const Stored<u16>*>(right);
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(sum + i, _mm256_add_ps(eight(a + i), eight(b + i)));
  }
  return i;
}

std::size_t add_halves(float* sum, const void* right, std::size_t count) {
  const auto* b = static_cast<const Stored<u16>*>(right);
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(sum + i, _mm256_add_ps(_mm256_loadu_ps(sum + i), eight(b + i)));
  }
  return i;
}

std::size_t end_halves(void* into, const float* sum, const void* right, std::size_t count) {
  auto* out = static_cast<Stored<u16>*>(into);
  const auto* b = static_cast<const Stored<u16>*>(right);
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 total = _mm256_add_ps(_mm256_loadu_ps(sum + i), eight(b + i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(total, _MM_FROUND_TO_NEAREST_INT));
  }
  return i;
}
#else
std::size_t begin_halves(float*, const void*, const void*, std::size_t) { return 0; }
std::size_t add_halves(float*, const void*, std::size_t) { return 0; }
std::size_t end_halves(void*, const float*, const void*, std::size_t) { return 0; }
#endif

// Elements that lie `done` elements of two bytes further on.
const void* after(const void* at, std::size_t done) { return static_cast<const u16*>(at) + done; }

template <class Element>
constexpr bool is_half = false;
template <>
constexpr bool is_half<Float16> = true;

template <class Element>
void begin_sum(float* sum, const void* left, const void* right, std::size_t count) {
  std::size_t at = 0;
  if constexpr (is_half<Element>) at = begin_halves(sum, left, right, count);
  add_loop<Wide, Element, Element>(sum + at, after(left, at), after(right, at), count - at);
}

template <class Element>
void add_to_sum(float* sum, const void* right, std::size_t count) {
  std::size_t at = 0;
  if constexpr (is_half<Element>) at = add_halves(sum, right, count);
  add_loop<Wide, Wide, Element>(sum + at, sum + at, after(right, at), count - at);
}

template <class Element>
void end_sum(void* into, const float* sum, const void* right, std::size_t count) {
  std::size_t at = 0;
  if constexpr (is_half<Element>) at = end_halves(into, sum, right, count);
  auto* rest = static_cast<u16*>(into) + at;
  add_loop<Element, Wide, Element>(rest, sum + at, after(right, at), count - at);
}

template <class Element>
WideSumFns wide_sum() {
  return {begin_sum<Element>, add_to_sum<Element>, end_sum<Element>};
}
