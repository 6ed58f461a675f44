#include "core/strided.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

#include "core/team.hpp"

namespace unisono {

namespace {

// Copy `nbytes` bytes between an array and its packed copy.
template <bool kPacks>
void copy(char* at, char* packed, size_t nbytes) {
  std::memcpy(kPacks ? packed : at, kPacks ? at : packed, nbytes);
}

// Copy elements of kBytes bytes (0: of `itemsize`). Returns the end in the packed copy.
template <size_t kBytes, bool kPacks>
char* move(const int64_t* counts, const int64_t* strides, int dims, size_t itemsize, char* at,
           char* packed) {
  const int64_t count = *counts, stride = *strides;
  if (dims > 1) {
    for (int64_t i = 0; i < count; ++i, at += stride) {
      packed = move<kBytes, kPacks>(counts + 1, strides + 1, dims - 1, itemsize, at, packed);
    }
    return packed;
  }
  // A constant size makes one instruction of each copy.
  const size_t nbytes = kBytes == 0 ? itemsize : kBytes;
  if (stride == static_cast<int64_t>(nbytes)) {
    copy<kPacks>(at, packed, static_cast<size_t>(count) * nbytes);
    return packed + static_cast<size_t>(count) * nbytes;
  }
  for (int64_t i = 0; i < count; ++i, at += stride, packed += nbytes) {
    copy<kPacks>(at, packed, nbytes);
  }
  return packed;
}

}  // namespace

bool Strided::add(int64_t count, int64_t stride) {
  is_empty_ |= count == 0;
  if (count == 1) return true;
  if (dims_ > 0) {
    const auto last = static_cast<size_t>(dims_ - 1);
    if (strides_[last] == count * stride) {
      counts_[last] *= count;
      strides_[last] = stride;
      return true;
    }
  }
  if (dims_ == kMaxDims) return false;
  counts_[static_cast<size_t>(dims_)] = count;
  strides_[static_cast<size_t>(dims_++)] = stride;
  return true;
}

char* Strided::begin() const {
  char* first = first_;
  for (size_t i = 0; i < static_cast<size_t>(dims_); ++i) {
    first += std::min<int64_t>(strides_[i], 0) * (counts_[i] - 1);
  }
  return is_empty_ ? first_ : first;
}

char* Strided::end() const {
  char* last = first_;
  for (size_t i = 0; i < static_cast<size_t>(dims_); ++i) {
    last += std::max<int64_t>(strides_[i], 0) * (counts_[i] - 1);
  }
  return is_empty_ ? first_ : last + itemsize_;
}

bool Strided::overlaps_itself() const {
  std::array<std::pair<int64_t, int64_t>, kMaxDims> dims{};
  for (size_t i = 0; i < static_cast<size_t>(dims_); ++i) {
    // In order of the strides. (gcc 12 warns of std::sort on an array of 8.)
    auto* const end = dims.begin() + static_cast<int>(i);
    *end = {std::abs(strides_[i]), counts_[i]};
    std::rotate(std::upper_bound(dims.begin(), end, *end), end, end + 1);
  }
  // Not if each stride is at least the extent of all dimensions with smaller strides.
  int64_t extent = itemsize_;
  for (size_t i = 0; i < static_cast<size_t>(dims_); ++i) {
    if (dims[i].first < extent) return !is_empty_;
    extent += dims[i].first * (dims[i].second - 1);
  }
  return false;
}

template <bool kPacks>
void Strided::copy_all(char* packed, ThreadTeam* team) const {
  if (is_empty_) return;
  if (dims_ == 0) return copy_rows<kPacks>(packed, 0, 1);
  const int64_t row_bytes = std::accumulate(counts_.begin() + 1, counts_.begin() + dims_, itemsize_,
                                            std::multiplies<int64_t>());
  const auto copy_part = [&](size_t begin, size_t end) {
    const auto first = static_cast<int64_t>(begin);
    copy_rows<kPacks>(packed + first * row_bytes, first, static_cast<int64_t>(end) - first);
  };
  share(team, static_cast<size_t>(counts_[0]), static_cast<size_t>(row_bytes), copy_part);
}

// Copy `rows` rows of the outer dimension, from row `begin` on.
template <bool kPacks>
void Strided::copy_rows(char* packed, int64_t begin, int64_t rows) const {
  std::array<int64_t, kMaxDims> all = counts_;
  all[0] = rows;
  const int64_t* counts = all.data();
  const int64_t* strides = dims_ == 0 ? &itemsize_ : strides_.data();
  const int dims = std::max(dims_, 1);
  const auto itemsize = static_cast<size_t>(itemsize_);
  char* const at = first_ + begin * strides[0];
  switch (itemsize) {
    case 1: move<1, kPacks>(counts, strides, dims, itemsize, at, packed); break;
    case 2: move<2, kPacks>(counts, strides, dims, itemsize, at, packed); break;
    case 4: move<4, kPacks>(counts, strides, dims, itemsize, at, packed); break;
    case 8: move<8, kPacks>(counts, strides, dims, itemsize, at, packed); break;
    case 16: move<16, kPacks>(counts, strides, dims, itemsize, at, packed); break;
    default: move<0, kPacks>(counts, strides, dims, itemsize, at, packed);
  }
}

void Strided::pack(char* to, ThreadTeam* team) const { copy_all<true>(to, team); }

void Strided::unpack(char* from, ThreadTeam* team) const { copy_all<false>(from, team); }

}  // namespace unisono
