// The two 16-bit floating types as elements of a loop. Part of kernels_isa.cpp.

float as_float(u32 bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

u32 as_bits(float value) {
  u32 bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

struct BFloat16 {
  using Memory = u16;
  using Value = float;
  static Value load(Memory stored) { return as_float(u32{stored} << 16); }

  static Memory store(Value value) {
    u32 bits = as_bits(value);
    // Half the weight of the last kept bit, less 1 unless that bit is odd: this rounds to even.
    u32 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    u32 quiet_nan = (bits >> 16) | 0x40;
    return static_cast<u16>(value != value ? quiet_nan : rounded);
  }
};

// Without branches, so that the compiler vectorises the loop. Denormals appear only as integers
// here, so the result is right even if the caller's thread flushes denormals to zero.
struct Float16 {
  using Memory = u16;
  using Value = float;

  static Value load(Memory stored) {
    i32 magnitude = (stored & 0x7FFF) << 13;
    i32 normal = magnitude + ((127 - 15) << 23);
    i32 infinite_or_nan = magnitude + ((255 - 31) << 23);
    // 2^-14 + x * 2^-24 is exact, and so is the subtraction of 2^-14.
    i32 denormal = as_bits(as_float(magnitude + (113 << 23)) - as_float(113 << 23));
    i32 finite = magnitude < (1 << 23) ? denormal : normal;
    i32 bits = magnitude < (31 << 23) ? finite : infinite_or_nan;
    return as_float(static_cast<u32>(bits) | (u32{stored} & 0x8000) << 16);
  }

  static Memory store(Value value) {
    u32 bits = as_bits(value);
    i32 magnitude = bits & 0x7FFFFFFF;
    // Rounds to even as above. A carry out of the mantissa raises the exponent, up to infinity.
    i32 normal = (magnitude - ((127 - 15) << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    // The last bit of 0.5f has the weight 2^-24, as half's last denormal bit: the addition does the
    // rounding.
    i32 denormal = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
    i32 infinite_or_nan = magnitude > (255 << 23) ? 0x7E00 : 0x7C00;
    i32 finite = magnitude < (113 << 23) ? denormal : normal;
    i32 half = magnitude < (143 << 23) ? finite : infinite_or_nan;
    return static_cast<u16>(static_cast<u32>(half) | (bits & 0x80000000u) >> 16);
  }
};
