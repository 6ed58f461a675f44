// The loops, compiled once per instruction set; UNISONO_ISA names the namespace.
//
// Without the standard library: the linker could keep an inline function of it that was compiled
// for AVX-512, and use it for all callers. For the same reason everything but the last three
// functions is local.
#include "kernels/kernels.hpp"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace unisono::UNISONO_ISA {
namespace {

#include "kernels/stored.inl"

// --- element types: what is stored, what is computed with ------------------------------------

template <class T>
struct Plain {
  using Memory = T;
  using Value = T;
  static Value load(Memory stored) { return stored; }
  static Memory store(Value value) { return value; }
};

struct Bool {
  using Memory = u8;
  using Value = u8;
  static Value load(Memory stored) { return stored != 0; }
  static Memory store(Value value) { return value; }
};

#include "kernels/half.inl"

template <class T>
struct Complex {
  T re;
  T im;
};

// --- operations ------------------------------------------------------------------------------

// An unsigned type in which T wraps around instead of overflowing. Not narrower than int, because
// u16 * u16 would be promoted to int and overflow there.
template <class T, bool wide = (sizeof(T) > 4)>
struct Wrapping {
  using type = u32;
};
template <class T>
struct Wrapping<T, true> {
  using type = u64;
};

template <class T>
struct IsFloat {
  static constexpr bool value = T(0.5) != T(0);
};

template <class T>
T add(T a, T b) {
  if constexpr (IsFloat<T>::value) {
    return a + b;
  } else {
    using W = typename Wrapping<T>::type;
    return static_cast<T>(static_cast<W>(a) + static_cast<W>(b));
  }
}

template <class T>
T multiply(T a, T b) {
  if constexpr (IsFloat<T>::value) {
    return a * b;
  } else {
    using W = typename Wrapping<T>::type;
    return static_cast<T>(static_cast<W>(a) * static_cast<W>(b));
  }
}

template <class T>
Complex<T> add(Complex<T> a, Complex<T> b) {
  return {a.re + b.re, a.im + b.im};
}

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    return add(a, b);
  }
};

struct Product {
  template <class T>
  static T apply(T a, T b) {
    return multiply(a, b);
  }
};

// `a != a` keeps a NaN in a. A NaN in b is kept because it compares false. Of +0 and -0 the second
// is the result, as in NumPy on x86-64.
struct Min {
  template <class T>
  static T apply(T a, T b) {
    return (a < b) | (a != a) ? a : b;
  }
};

struct Max {
  template <class T>
  static T apply(T a, T b) {
    return (a > b) | (a != a) ? a : b;
  }
};

// For float16 NumPy returns the first of two zeros.
struct MinFirst {
  template <class T>
  static T apply(T a, T b) {
    return (a <= b) | (a != a) ? a : b;
  }
};

struct MaxFirst {
  template <class T>
  static T apply(T a, T b) {
    return (a >= b) | (a != a) ? a : b;
  }
};

struct And {
  template <class T>
  static T apply(T a, T b) {
    return a & b;
  }
};

struct Or {
  template <class T>
  static T apply(T a, T b) {
    return a | b;
  }
};

struct Xor {
  template <class T>
  static T apply(T a, T b) {
    return a ^ b;
  }
};

// --- loops -----------------------------------------------------------------------------------

template <class Element, class Op>
void loop(void* into, const void* left, const void* right, std::size_t count) {
  using Memory = Stored<typename Element::Memory>;
  auto* out = static_cast<Memory*>(into);
  const auto* a = static_cast<const Memory*>(left);
  const auto* b = static_cast<const Memory*>(right);
  UNISONO_INDEPENDENT
  for (std::size_t i = 0; i < count; i++) {
    out[i].value = Element::store(Op::apply(Element::load(a[i].value), Element::load(b[i].value)));
  }
}

// The textbook formula, as in NumPy: infinities that became NaN are not repaired. Real and
// imaginary parts are kept apart until the end of a block. If they alternate, GCC 12 makes fused
// multiply-adds in spite of -ffp-contract=off, and the result depends on the machine.
template <class T>
void complex_product(void* into, const void* left, const void* right, std::size_t count) {
  constexpr std::size_t block = 64;
  auto* out = static_cast<Stored<Complex<T>>*>(into);
  const auto* a = static_cast<const Stored<Complex<T>>*>(left);
  const auto* b = static_cast<const Stored<Complex<T>>*>(right);
  T re[block];
  T im[block];
  while (count > 0) {
    const std::size_t n = count < block ? count : block;
    for (std::size_t k = 0; k < n; k++) {
      re[k] = a[k].value.re * b[k].value.re - a[k].value.im * b[k].value.im;
      im[k] = a[k].value.re * b[k].value.im + a[k].value.im * b[k].value.re;
    }
    for (std::size_t k = 0; k < n; k++) out[k].value = {re[k], im[k]};
    out += n;
    a += n;
    b += n;
    count -= n;
  }
}

#if defined(__F16C__)
// Compilers do not turn Float16::load and ::store into these instructions.
template <class Op>
void half_loop(void* into, const void* left, const void* right, std::size_t count) {
  constexpr std::size_t lanes = 8;
  auto* out = static_cast<Stored<u16>*>(into);
  const auto* a = static_cast<const Stored<u16>*>(left);
  const auto* b = static_cast<const Stored<u16>*>(right);
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    float x[lanes];
    float y[lanes];
    _mm256_storeu_ps(x, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a + i))));
    _mm256_storeu_ps(y, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b + i))));
    for (std::size_t k = 0; k < lanes; k++) x[k] = Op::apply(x[k], y[k]);
    __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(x), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), halves);
  }
  loop<Float16, Op>(out + i, a + i, b + i, count - i);
}
#else
template <class Op>
void half_loop(void* into, const void* left, const void* right, std::size_t count) {
  loop<Float16, Op>(into, left, right, count);
}
#endif

#include "kernels/sums.inl"

template <class T>
T quotient(T value, int divisor) {
  if constexpr (!IsFloat<T>::value && sizeof(T) <= 4) {
    // Vectorised, unlike a division of integers. The conversion rounds toward zero. A quotient of 32
    // bits by a smaller number is never so close to an integer that a double would reach it.
    return static_cast<T>(static_cast<double>(value) / divisor);
  } else {
    return value / static_cast<T>(divisor);
  }
}

// NumPy's formula for complex numbers, whose infinities become NaN.
template <class T>
Complex<T> quotient(Complex<T> value, int divisor) {
  const T scale = T(1) / static_cast<T>(divisor);
  return {(value.re + value.im * T(0)) * scale, (value.im - value.re * T(0)) * scale};
}

template <class Element>
void divide_loop(void* values, std::size_t count, int divisor) {
  auto* out = static_cast<Stored<typename Element::Memory>*>(values);
  for (std::size_t i = 0; i < count; i++) {
    out[i].value = Element::store(quotient(Element::load(out[i].value), divisor));
  }
}

float product(float value, double factor) { return value * static_cast<float>(factor); }
double product(double value, double factor) { return value * factor; }

template <class T>
Complex<T> product(Complex<T> value, double factor) {
  const T scale = static_cast<T>(factor);
  return {value.re * scale - value.im * T(0), value.re * T(0) + value.im * scale};
}

template <class Element>
void scale_loop(void* values, std::size_t count, double factor) {
  auto* out = static_cast<Stored<typename Element::Memory>*>(values);
  for (std::size_t i = 0; i < count; i++) {
    out[i].value = Element::store(product(Element::load(out[i].value), factor));
  }
}

// --- tables ----------------------------------------------------------------------------------

template <class Element>
ReduceFn real(RedOp op) {
  switch (op) {
    case RedOp::min: return loop<Element, Min>;
    case RedOp::max: return loop<Element, Max>;
    case RedOp::sum:
    case RedOp::avg:
    case RedOp::premul_sum: return loop<Element, Sum>;
    case RedOp::product: return loop<Element, Product>;
    default: return nullptr;
  }
}

template <class T>
ReduceFn integer(RedOp op) {
  switch (op) {
    case RedOp::band: return loop<Plain<T>, And>;
    case RedOp::bor: return loop<Plain<T>, Or>;
    case RedOp::bxor: return loop<Plain<T>, Xor>;
    case RedOp::premul_sum: return nullptr;
    default: return real<Plain<T>>(op);
  }
}

ReduceFn half(RedOp op) {
  switch (op) {
    case RedOp::sum:
    case RedOp::avg:
    case RedOp::premul_sum: return half_loop<Sum>;
    case RedOp::product: return half_loop<Product>;
    case RedOp::min: return half_loop<MinFirst>;
    case RedOp::max: return half_loop<MaxFirst>;
    default: return nullptr;
  }
}

template <class T>
ReduceFn complex(RedOp op) {
  switch (op) {
    case RedOp::sum:
    case RedOp::avg:
    case RedOp::premul_sum: return loop<Plain<Complex<T>>, Sum>;
    case RedOp::product: return complex_product<T>;
    default: return nullptr;
  }
}

ReduceFn boolean(RedOp op) {
  switch (op) {
    case RedOp::sum:
    case RedOp::max:
    case RedOp::bor: return loop<Bool, Or>;
    case RedOp::product:
    case RedOp::min:
    case RedOp::band: return loop<Bool, And>;
    case RedOp::bxor: return loop<Bool, Xor>;
    default: return nullptr;
  }
}

}  // namespace

ReduceFn reduce_fn(DType dtype, RedOp op) {
  switch (dtype) {
    case DType::bool8: return boolean(op);
    case DType::i8: return integer<i8>(op);
    case DType::i16: return integer<i16>(op);
    case DType::i32: return integer<i32>(op);
    case DType::i64: return integer<i64>(op);
    case DType::u8: return integer<u8>(op);
    case DType::u16: return integer<u16>(op);
    case DType::u32: return integer<u32>(op);
    case DType::u64: return integer<u64>(op);
    case DType::f16: return half(op);
    case DType::bf16: return real<BFloat16>(op);
    case DType::f32: return real<Plain<float>>(op);
    case DType::f64: return real<Plain<double>>(op);
    case DType::c64: return complex<float>(op);
    case DType::c128: return complex<double>(op);
  }
  return nullptr;
}

WideSumFns wide_sum_fns(DType dtype) {
  switch (dtype) {
    case DType::f16: return wide_sum<Float16>();
    case DType::bf16: return wide_sum<BFloat16>();
    default: return {};
  }
}

DivideFn divide_fn(DType dtype) {
  switch (dtype) {
    case DType::bool8: return nullptr;
    case DType::i8: return divide_loop<Plain<i8>>;
    case DType::i16: return divide_loop<Plain<i16>>;
    case DType::i32: return divide_loop<Plain<i32>>;
    case DType::i64: return divide_loop<Plain<i64>>;
    case DType::u8: return divide_loop<Plain<u8>>;
    case DType::u16: return divide_loop<Plain<u16>>;
    case DType::u32: return divide_loop<Plain<u32>>;
    case DType::u64: return divide_loop<Plain<u64>>;
    case DType::f16: return divide_loop<Float16>;
    case DType::bf16: return divide_loop<BFloat16>;
    case DType::f32: return divide_loop<Plain<float>>;
    case DType::f64: return divide_loop<Plain<double>>;
    case DType::c64: return divide_loop<Plain<Complex<float>>>;
    case DType::c128: return divide_loop<Plain<Complex<double>>>;
  }
  return nullptr;
}

ScaleFn scale_fn(DType dtype) {
  switch (dtype) {
    case DType::f16: return scale_loop<Float16>;
    case DType::bf16: return scale_loop<BFloat16>;
    case DType::f32: return scale_loop<Plain<float>>;
    case DType::f64: return scale_loop<Plain<double>>;
    case DType::c64: return scale_loop<Plain<Complex<float>>>;
    case DType::c128: return scale_loop<Plain<Complex<double>>>;
    default: return nullptr;
  }
}

}  // namespace unisono::UNISONO_ISA
