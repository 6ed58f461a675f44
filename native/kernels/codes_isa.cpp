// The loops over codes, compiled once per instruction set as those of kernels_isa.cpp are.
//
// Nothing but the last function is visible to others, for the reason given there.
#include "kernels/codes.hpp"

namespace unisono::UNISONO_ISA {
namespace {

#include "kernels/stored.inl"

#include "kernels/half.inl"

constexpr i32 kInfinity = 255 << 23;
constexpr u32 kNaN = 0x7FC00000;

i32 magnitude_of(float value) { return static_cast<i32>(as_bits(value) & 0x7FFFFFFF); }

u32 sign_of(float value) { return as_bits(value) & 0x80000000; }

// -126..126; 127 and -127 are the infinities, -128 is NaN.
struct Int8 {
  using Memory = i8;
  static constexpr float most = 126;

  static Memory encode(float quotient) {
    // The last bit of 1.5 * 2^23 has the weight 1: the addition does the rounding, to even.
    return static_cast<Memory>(as_bits(quotient + 12582912.0f));
  }

  static Memory encode_any(float quotient) {
    const i32 magnitude = magnitude_of(quotient);
    if (magnitude > kInfinity) return -128;
    if (magnitude == kInfinity) return quotient < 0 ? -127 : 127;
    return encode(quotient);
  }

  static float decode(Memory code) {
    const i32 whole = code;  // NOLINT(bugprone-signed-char-misuse): a number, no text
    const u32 infinite = static_cast<u32>(kInfinity) | (static_cast<u32>(whole) & 0x80000000);
    const u32 odd = whole == -128 ? kNaN : infinite;
    const u32 finite = as_bits(static_cast<float>(whole));
    return as_float((whole == 127) | (whole < -126) ? odd : finite);
  }
};

// Sign, 4 bits of exponent with bias 7, 3 of fraction. Without branches, as Float16.
struct Fp8 {
  using Memory = u8;
  static constexpr float most = 240;

  static Memory encode(float quotient) {
    const i32 magnitude = magnitude_of(quotient);
    const i32 normal = (magnitude - ((127 - 7) << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20;
    // The last bit of 2^14 has the weight 2^-9, as that of the codes below 2^-6.
    const i32 denormal =
      static_cast<i32>(as_bits(as_float(magnitude) + 16384.0f) - as_bits(16384.0f));
    const i32 code = magnitude < (121 << 23) ? denormal : normal;
    return static_cast<Memory>((code < 119 ? code : 119) | sign_of(quotient) >> 24);
  }

  static Memory encode_any(float quotient) {
    const i32 magnitude = magnitude_of(quotient);
    if (magnitude < kInfinity) return encode(quotient);
    return static_cast<Memory>((magnitude == kInfinity ? 120 : 124) | sign_of(quotient) >> 24);
  }

  static float decode(Memory code) {
    const i32 magnitude = (code & 0x7F) << 20;
    const i32 normal = magnitude + ((127 - 7) << 23);
    // 2^-6 * (1 + f / 8) - 2^-6 is exact.
    const i32 denormal = as_bits(as_float(magnitude + (121 << 23)) - as_float(121 << 23));
    const i32 finite = magnitude < (1 << 23) ? denormal : normal;
    const i32 odd = magnitude == 120 << 20 ? kInfinity : static_cast<i32>(kNaN);
    const i32 bits = magnitude < 120 << 20 ? finite : odd;
    return as_float(static_cast<u32>(bits) | (u32{code} & 0x80) << 24);
  }
};

// Return the scale of a block by its largest finite magnitude.
float scale_of(float largest, float most) {
  constexpr float least = 0x1p-126f;
  // One unit in the last place less, because `most` scales would be infinite.
  const float limit = as_float(as_bits(0x1.fffffep127f / most) - 1);
  const float scale = largest / most;
  return scale < least ? least : scale > limit ? limit : scale;
}

// Return the bits of the largest magnitude.
template <bool only_finite>
[[gnu::always_inline]] inline i32 largest_of(const Stored<float>* values, std::size_t count) {
  i32 largest = 0;
  for (std::size_t i = 0; i < count; i++) {
    const i32 magnitude = magnitude_of(values[i].value);
    const i32 counted = only_finite && magnitude >= kInfinity ? 0 : magnitude;
    largest = counted > largest ? counted : largest;
  }
  return largest;
}

// Inlined, so that the loops over a whole block have a constant count.
template <class Format>
[[gnu::always_inline]] inline void encode_block(const Stored<float>* values, Stored<float>* scale,
                                                Stored<typename Format::Memory>* codes,
                                                std::size_t count) {
  i32 largest = largest_of<false>(values, count);
  const bool are_finite = largest < kInfinity;
  if (!are_finite) largest = largest_of<true>(values, count);
  const float its_scale = scale_of(as_float(static_cast<u32>(largest)), Format::most);
  scale->value = its_scale;
  if (are_finite) {
    UNISONO_INDEPENDENT
    for (std::size_t i = 0; i < count; i++) {
      codes[i].value = Format::encode(values[i].value / its_scale);
    }
  } else {
    for (std::size_t i = 0; i < count; i++) {
      codes[i].value = Format::encode_any(values[i].value / its_scale);
    }
  }
}

template <class Format, bool adds>
[[gnu::always_inline]] inline void decode_block(float scale,
                                                const Stored<typename Format::Memory>* codes,
                                                Stored<float>* values, std::size_t count) {
  UNISONO_INDEPENDENT
  for (std::size_t i = 0; i < count; i++) {
    const float value = Format::decode(codes[i].value) * scale;
    values[i].value = adds ? values[i].value + value : value;
  }
}

template <class Format>
void encode(const void* values, void* scales, void* codes, std::size_t count) {
  const auto* in = static_cast<const Stored<float>*>(values);
  auto* its_scales = static_cast<Stored<float>*>(scales);
  auto* out = static_cast<Stored<typename Format::Memory>*>(codes);
  for (; count >= kBlock; count -= kBlock, in += kBlock, out += kBlock) {
    encode_block<Format>(in, its_scales++, out, kBlock);
  }
  if (count > 0) encode_block<Format>(in, its_scales, out, count);
}

template <class Format, bool adds>
void decode(const void* scales, const void* codes, void* values, std::size_t count) {
  const auto* its_scales = static_cast<const Stored<float>*>(scales);
  const auto* in = static_cast<const Stored<typename Format::Memory>*>(codes);
  auto* out = static_cast<Stored<float>*>(values);
  for (; count >= kBlock; count -= kBlock, in += kBlock, out += kBlock) {
    decode_block<Format, adds>((its_scales++)->value, in, out, kBlock);
  }
  if (count > 0) decode_block<Format, adds>(its_scales->value, in, out, count);
}

void encode_bf16(const void* values, void* /*scales*/, void* codes, std::size_t count) {
  const auto* in = static_cast<const Stored<float>*>(values);
  auto* out = static_cast<Stored<u16>*>(codes);
  UNISONO_INDEPENDENT
  for (std::size_t i = 0; i < count; i++) out[i].value = BFloat16::store(in[i].value);
}

template <bool adds>
void decode_bf16(const void* /*scales*/, const void* codes, void* values, std::size_t count) {
  const auto* in = static_cast<const Stored<u16>*>(codes);
  auto* out = static_cast<Stored<float>*>(values);
  UNISONO_INDEPENDENT
  for (std::size_t i = 0; i < count; i++) {
    const float value = BFloat16::load(in[i].value);
    out[i].value = adds ? out[i].value + value : value;
  }
}

}  // namespace

CodecFns codec_fns(Codec codec) {
  switch (codec) {
    case Codec::int8: return {encode<Int8>, decode<Int8, false>, decode<Int8, true>};
    case Codec::fp8: return {encode<Fp8>, decode<Fp8, false>, decode<Fp8, true>};
    case Codec::bf16: return {encode_bf16, decode_bf16<false>, decode_bf16<true>};
  }
  return {};
}

}  // namespace unisono::UNISONO_ISA
