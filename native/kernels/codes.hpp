// Codes of one or two bytes for float32, bit by bit the same as in
// unisono/core/engines/block_codes.py, which defines them.
//
// The loops (codes_isa.cpp) are compiled and chosen as those of kernels.hpp are. Nothing here
// depends on alignment.
#pragma once

#include <cstddef>

namespace unisono {

// The numbers are places in block_codes.COMPRESSIONS.
enum class Codec : int { int8 = 0, fp8 = 1, bf16 = 2 };

// Elements that share a scale. bf16 has no scales.
constexpr std::size_t kBlock = 128;

// Set the scales [ceil(count / 128)] and codes [count] of float32 values.
using EncodeFn = void (*)(const void* values, void* scales, void* codes, std::size_t count);

// Set float32 values to those of codes, or add those to them.
using DecodeFn = void (*)(const void* scales, const void* codes, void* values, std::size_t count);

struct CodecFns {
  EncodeFn encode;
  DecodeFn decode;
  DecodeFn add;
};

// Return the loops in the chosen instruction set; all nullptr if the number is out of range.
CodecFns codec_fns(Codec codec);

}  // namespace unisono
