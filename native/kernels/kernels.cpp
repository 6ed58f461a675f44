// Chooses an instruction set at run time.
#include "kernels/kernels.hpp"

#include "kernels/codes.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(UNISONO_X86_LEVELS)
#include <cpuid.h>
#endif

namespace unisono {

namespace plain {
ReduceFn reduce_fn(DType dtype, RedOp op);
WideSumFns wide_sum_fns(DType dtype);
DivideFn divide_fn(DType dtype);
ScaleFn scale_fn(DType dtype);
CodecFns codec_fns(Codec codec);
}  // namespace plain
#if defined(UNISONO_X86_LEVELS)
namespace v3 {
ReduceFn reduce_fn(DType dtype, RedOp op);
WideSumFns wide_sum_fns(DType dtype);
CodecFns codec_fns(Codec codec);
}  // namespace v3
namespace v4 {
ReduceFn reduce_fn(DType dtype, RedOp op);
WideSumFns wide_sum_fns(DType dtype);
CodecFns codec_fns(Codec codec);
}  // namespace v4
#endif

namespace {

struct Isa {
  const char* name;
  ReduceFn (*reduce_fn)(DType dtype, RedOp op);
  WideSumFns (*wide_sum_fns)(DType dtype);
  CodecFns (*codec_fns)(Codec codec);
  bool (*is_available)();
};

bool always() { return true; }

#if defined(UNISONO_X86_LEVELS)
bool has_v3() {
  // Compilers of 2021 know neither __builtin_cpu_supports("x86-64-v3") nor "f16c".
  constexpr unsigned f16c = 1u << 29, movbe = 1u << 22, lzcnt = 1u << 5;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
  if ((ecx & (f16c | movbe)) != (f16c | movbe)) return false;
  if (!__get_cpuid(0x80000001u, &eax, &ebx, &ecx, &edx)) return false;
  if ((ecx & lzcnt) == 0) return false;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

bool has_v4() {
  return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#endif

constexpr Isa kIsas[] = {
  {"plain", plain::reduce_fn, plain::wide_sum_fns, plain::codec_fns, always},
#if defined(UNISONO_X86_LEVELS)
  {"v3", v3::reduce_fn, v3::wide_sum_fns, v3::codec_fns, has_v3},
  {"v4", v4::reduce_fn, v4::wide_sum_fns, v4::codec_fns, has_v4},
#endif
};

const Isa* best() {
  const Isa* found = &kIsas[0];
  for (const Isa& isa : kIsas) {
    if (isa.is_available()) found = &isa;
  }
  return found;
}

std::atomic<const Isa*>& chosen() {
  static std::atomic<const Isa*> isa{best()};
  return isa;
}

}  // namespace

ReduceFn reduce_fn(DType dtype, RedOp op) {
  return chosen().load(std::memory_order_relaxed)->reduce_fn(dtype, op);
}

ReduceFns reduce_fns(DType dtype, RedOp op) {
  const bool adds = op == RedOp::sum || op == RedOp::avg || op == RedOp::premul_sum;
  const Isa& isa = *chosen().load(std::memory_order_relaxed);
  return {isa.reduce_fn(dtype, op), adds ? isa.wide_sum_fns(dtype) : WideSumFns{}};
}

CodecFns codec_fns(Codec codec) {
  return chosen().load(std::memory_order_relaxed)->codec_fns(codec);
}

// In one instruction set: a division takes as long per element in all of them.
DivideFn divide_fn(DType dtype) { return plain::divide_fn(dtype); }
ScaleFn scale_fn(DType dtype) { return plain::scale_fn(dtype); }

std::size_t element_nbytes(DType dtype) {
  switch (dtype) {
    case DType::bool8:
    case DType::i8:
    case DType::u8: return 1;
    case DType::i16:
    case DType::u16:
    case DType::f16:
    case DType::bf16: return 2;
    case DType::i32:
    case DType::u32:
    case DType::f32: return 4;
    case DType::i64:
    case DType::u64:
    case DType::f64:
    case DType::c64: return 8;
    case DType::c128: return 16;
  }
  return 0;
}

const char* isa() { return chosen().load(std::memory_order_relaxed)->name; }

bool set_isa(const char* name) {
  for (const Isa& isa : kIsas) {
    if (std::strcmp(isa.name, name) == 0 && isa.is_available()) {
      chosen().store(&isa, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

const char* available_isa(int i) {
  for (const Isa& isa : kIsas) {
    if (isa.is_available() && i-- == 0) return isa.name;
  }
  return nullptr;
}

void copy_chunked(void* to, const void* from, std::size_t nbytes) {
  constexpr std::size_t piece = std::size_t{256} << 10;
  auto* out = static_cast<unsigned char*>(to);
  const auto* in = static_cast<const unsigned char*>(from);
  while (nbytes > piece) {
    std::memcpy(out, in, piece);
    out += piece;
    in += piece;
    nbytes -= piece;
  }
  if (nbytes > 0) std::memcpy(out, in, nbytes);
}

#if defined(__SSE2__)
void copy_past_cache(void* to, const void* from, std::size_t nbytes) {
  constexpr std::size_t line = 64;
  auto* into = static_cast<unsigned char*>(to);
  const auto* source = static_cast<const unsigned char*>(from);
  const std::size_t gap = (line - reinterpret_cast<std::uintptr_t>(into) % line) % line;
  std::size_t at = std::min(nbytes, gap);
  copy_chunked(into, source, at);
  for (; at + line <= nbytes; at += line) {
    auto* out = reinterpret_cast<__m128i*>(into + at);
    const auto* in = reinterpret_cast<const __m128i*>(source + at);
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  copy_chunked(into + at, source + at, nbytes - at);
  // Without the fence, streaming stores could become visible after the store that publishes the
  // data.
  _mm_sfence();
}
#else
void copy_past_cache(void* to, const void* from, std::size_t nbytes) {
  copy_chunked(to, from, nbytes);
}
#endif

}  // namespace unisono
