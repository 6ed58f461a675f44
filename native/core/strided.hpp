// Arrays in any layout, and their copies in C order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace unisono {

// An array of any strides. Dimensions that lie behind one another count as one.
class Strided {
 public:
  static constexpr int kMaxDims = 8;

  Strided(char* first, int64_t itemsize) : first_(first), itemsize_(itemsize) {}
  // Add a dimension inside the earlier dimensions. `stride` is in bytes. False: too many.
  bool add(int64_t count, int64_t stride);

  // The addresses between which the elements lie.
  char* begin() const;
  char* end() const;
  // Whether two elements may share memory.
  bool overlaps_itself() const;
  // Copy all elements to `to`, in C order.
  void pack(char* to) const;
  // Copy elements in C order from `from` into the array.
  void unpack(char* from) const;

 private:
  template <bool kPacks>
  void copy_all(char* packed) const;

  char* first_;
  int64_t itemsize_;
  int dims_ = 0;
  bool is_empty_ = false;
  std::array<int64_t, kMaxDims> counts_{}, strides_{};
};

}  // namespace unisono
