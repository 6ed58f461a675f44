// One rank's part of a window: elements and signals in memory that other ranks map.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/kernels.hpp"

namespace unisono {

// What one rank has signalled to the owner of the part. A cache line of its own, because the ranks
// signal at the same time.
struct alignas(64) SignalLine {
  std::atomic<uint64_t> signals;
  std::atomic<uint32_t> sleepers;
  // Of the first line only: whether the owner has closed the part.
  std::atomic<uint32_t> closed;
};
static_assert(sizeof(SignalLine) == 64, "as in unisono/beyond/windows/part.py");

class WindowPart {
 public:
  // `dtype` is -1 if the elements only move.
  WindowPart(void* lines, void* data, size_t count, size_t itemsize, int dtype)
      : lines_(static_cast<SignalLine*>(lines)),
        data_(static_cast<char*>(data)),
        count_(count),
        itemsize_(itemsize),
        dtype_(static_cast<DType>(dtype)) {}

  // Count one signal of rank `from`. What this thread has written before is visible to whoever
  // sees the signal.
  void signal(int from);

  // Wait until rank `from` has signalled more than `taken` times, at most until the time-out;
  // return how often it has signalled.
  uint64_t wait_signal(int from, uint64_t taken, int64_t timeout_ns, bool is_crowded);

  uint64_t signals(int from) const {
    return lines_[from].signals.load(std::memory_order_acquire);  // pairs with signal()
  }
  // release: pairs with is_closed(). Whoever sees that a rank has closed its part sees the last
  // signals of the rank.
  void close() { lines_->closed.store(1, std::memory_order_release); }
  bool is_closed() const { return lines_->closed.load(std::memory_order_acquire) != 0; }

  // Whether elements [offset, offset + count) exist.
  bool has(int64_t offset, size_t count) const {
    return offset >= 0 && static_cast<uint64_t>(offset) <= count_ && count <= count_ - offset;
  }

  // Copy elements in, or out. One element of 4 or 8 bytes moves at once, so that no rank sees a
  // half of it.
  void put(size_t offset, const void* from, size_t count);
  void get(size_t offset, void* to, size_t count) const;
  // Set each element to element (op) source, atomically; `old`, if any, gets the elements before.
  // Return false if the op is not defined on the dtype, or an element is too large.
  bool apply(size_t offset, const void* source, void* old, size_t count, RedOp op);
  // Set an element to `desired` if it is `expected`, atomically; `expected` becomes what it was.
  bool compare_and_swap(size_t offset, void* expected, const void* desired);

 private:
  SignalLine* lines_;
  char* data_;
  size_t count_, itemsize_;
  DType dtype_;
};

}  // namespace unisono
