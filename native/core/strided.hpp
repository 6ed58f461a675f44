// Arrays in any layout, and their copies in C order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace unisono {

class ThreadTeam;

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
  // Copy all elements to `to`, in C order. A team shares the rows of the outer dimension.
  void pack(char* to, ThreadTeam* team = nullptr) const;
  // Copy elements in C order from `from` into the array.
  void unpack(char* from, ThreadTeam* team = nullptr) const;

 private:
  template <bool kPacks>
  void copy_all(char* packed, ThreadTeam* team) const;
  template <bool kPacks>
  void copy_rows(char* packed, int64_t begin, int64_t rows) const;

  char* first_;
  int64_t itemsize_;
  int dims_ = 0;
  bool is_empty_ = false;
  std::array<int64_t, kMaxDims> counts_{}, strides_{};
};

}  // namespace unisono
