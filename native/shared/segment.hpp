// Shared memory of one group: made by one rank, attached by the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "shared/layout.hpp"

namespace unisono {

// A mapping of an anonymous memory file (memfd). Nothing has a name in any file system, so nothing
// is left behind whatever kills the processes, and the size of /dev/shm does not matter.
class Segment {
 public:
  Segment() = default;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  // Make the memory; returns 0 or an errno. `fd()` busy_rounds open until close_fd().
  int create(int ranks, size_t slot_bytes, const unsigned char* nonce);

  // Map the memory that process `pid` holds open as `fd`; returns 0 or an errno. EXDEV: it opened,
  // but it is not the memory with this nonce, so `pid` is not a process of this host's view.
  int attach(int pid, int fd, const unsigned char* nonce);

  void close_fd();
  int fd() const { return fd_; }
  int ranks() const { return static_cast<int>(header_->ranks); }
  size_t slot_bytes() const { return header_->slot_bytes; }
  size_t bytes() const { return bytes_; }

  RankWords& words(int rank) const { return words_[rank]; }
  char* slot(int rank, uint64_t epoch) const {
    return slots_ + (2 * static_cast<size_t>(rank) + (epoch & 1)) * slot_bytes_;
  }

 private:
  int map(int fd);
  void locate();

  int fd_ = -1;
  void* base_ = nullptr;
  size_t bytes_ = 0;
  Header* header_ = nullptr;
  RankWords* words_ = nullptr;
  char* slots_ = nullptr;
  size_t slot_bytes_ = 0;
};

}  // namespace unisono
