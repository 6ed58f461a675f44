// Element-wise reductions, bit by bit the same as in unisono/core/engines/kernels.py, with two
// exceptions. NumPy's result depends on the processor in these, and the result here must not:
// products of complex numbers are never fused. MIN and MAX of +0 and -0 give what NumPy gives on
// x86-64.
//
// The loops (kernels_isa.cpp) are compiled once per instruction set and chosen at run time. Nothing
// here depends on alignment.
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

// The numbers of unisono.core.base.types.RedOpType, which are torch's.
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

// into[i] = left[i] (op) right[i] for i < count. The three ranges do not overlap, or begin at the
// same address.
using ReduceFn = void (*)(void* into, const void* left, const void* right, std::size_t count);

// Return the loop for this pair in the chosen instruction set. The result is nullptr if the pair
// has no meaning (MIN of complex numbers) or a code is out of range. AVG and PREMUL_SUM add:
// divide_fn() and scale_fn() apply their factors.
ReduceFn reduce_fn(DType dtype, RedOp op);

// The loops of an accumulation of 16-bit floats, which is in float32 until its end. `left`, `right`
// and `into` are 16-bit floats.
struct WideSumFns {
  // sum[i] = left[i] + right[i] for i < count
  void (*begin)(float* sum, const void* left, const void* right, std::size_t count) = nullptr;
  // sum[i] += right[i]
  void (*add)(float* sum, const void* right, std::size_t count) = nullptr;
  // into[i] = sum[i] + right[i], rounded
  void (*end)(void* into, const float* sum, const void* right, std::size_t count) = nullptr;
};

// What a program needs of a dtype and an op. `wide` is empty, or accumulations use it.
struct ReduceFns {
  ReduceFn step = nullptr;
  WideSumFns wide{};

  ReduceFns(ReduceFn step_fn = nullptr, WideSumFns wide_fns = {}) : step(step_fn), wide(wide_fns) {}
  bool is_wide() const { return wide.begin != nullptr; }
};
ReduceFns reduce_fns(DType dtype, RedOp op);

// values[i] /= divisor for i < count; integers are rounded toward zero.
using DivideFn = void (*)(void* values, std::size_t count, int divisor);

// Return the loop for AVG of a dtype; nullptr if there is none.
DivideFn divide_fn(DType dtype);

// values[i] *= factor for i < count, of floating or complex values.
using ScaleFn = void (*)(void* values, std::size_t count, double factor);

// Return the loop for PREMUL_SUM of a dtype; nullptr if there is none.
ScaleFn scale_fn(DType dtype);

std::size_t element_nbytes(DType dtype);

// Return the name of the chosen instruction set: "plain", "v3" or "v4" (x86-64 levels). Until
// set_isa() it is the best of this machine.
const char* isa();

// Choose an instruction set. False, and no change: it is unknown, or the machine lacks it.
// Functions from earlier calls of reduce_fn() stay valid.
bool set_isa(const char* name);

// Return the name of the i-th instruction set of this machine, from the slowest; nullptr past the
// end.
const char* available_isa(int i);

// memcpy in pieces of 256 KiB. Above some size glibc's memcpy bypasses the cache, which is several
// times slower if another core reads the bytes next. From some KiB on memcpy is `rep movsb`, which
// fills a slot up to three times as fast as loads and stores. It need not fetch the cache lines
// that the reader holds.
void copy_chunked(void* to, const void* from, std::size_t nbytes);

// memcpy that does not bring the cache lines of `to` into the cache.
void copy_past_cache(void* to, const void* from, std::size_t nbytes);

// From this size on, received data bypass the cache. They do not fit into it anyway, and an
// ordinary store would first read each line from memory. Measured with messages of 16 to 64 MiB: a
// sixth faster. With 8 MiB, which fit into the cache of the test machine: slower.
constexpr std::size_t kStreamBytes = 16 * 1024 * 1024;

}  // namespace unisono
