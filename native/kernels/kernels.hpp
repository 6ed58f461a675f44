// Element-wise reductions, the same as unisono/engines/kernels.py to the bit, with two exceptions
// where NumPy's answer depends on the processor and this one must not: products of complex numbers
// are never fused, and MIN and MAX of +0 and -0 give what NumPy gives on x86-64.
//
// The loops (kernels_isa.cpp) are compiled once per instruction set and chosen at run time.
// Nothing here depends on alignment.
#pragma once

#include <cstddef>

namespace unisono {

enum class DType : int {
  bool8 = 0,
  i8 = 1,
  i16 = 2,
  i32 = 3,
  i64 = 4,
  u8 = 5,
  u16 = 6,
  u32 = 7,
  u64 = 8,
  f16 = 9,
  bf16 = 10,
  f32 = 11,
  f64 = 12,
  c64 = 13,
  c128 = 14,
};
constexpr int kDTypes = 15;

// Numbered as unisono.base.types.RedOpType, which is torch's numbering.
enum class RedOp : int {
  sum = 0,
  avg = 1,
  product = 2,
  min = 3,
  max = 4,
  band = 5,
  bor = 6,
  bxor = 7,
  premul_sum = 8,
};
constexpr int kRedOps = 9;

// into[i] = left[i] (op) right[i] for i < count elements. The three are apart, or begin at one place.
using ReduceFn = void (*)(void* into, const void* left, const void* right, std::size_t count);

// The loop for this pair in the chosen instruction set; nullptr if the pair has no meaning (MIN of
// complex numbers) or a code is out of range. AVG and PREMUL_SUM add; Python applies their factors.
ReduceFn reduce_fn(DType dtype, RedOp op);

std::size_t element_nbytes(DType dtype);

// Name of the chosen instruction set: "plain", "v3" or "v4" (x86-64 levels). The best one that
// this machine has, until set_isa.
const char* isa();

// Choose another; false, and no change, if it is unknown or the machine lacks it. Functions that
// reduce_fn returned earlier stay valid.
bool set_isa(const char* name);

// Name of the i-th instruction set that this machine can run, from slowest; nullptr past the end.
const char* available_isa(int i);

// memcpy in pieces. glibc's memcpy writes around the cache above some size, which is several
// times slower when another core reads the bytes next. From some KiB on it is `rep movsb`, which
// fills a slot up to three times as fast as loads and stores: it need not fetch lines that the
// reader has.
void copy_chunked(void* to, const void* from, std::size_t nbytes);

// memcpy without bringing the lines of `to` into the cache.
void copy_past_cache(void* to, const void* from, std::size_t nbytes);

// From this size on data are received past the cache: they do not fit there anyway, and an ordinary
// store of a line would first read the line from memory. Measured with messages of 16 to 64 MiB: a
// sixth faster; with 8 MiB, which the cache of the test machine holds: slower.
constexpr std::size_t kStreamBytes = 16 * 1024 * 1024;

}  // namespace unisono
