// The shared memory of one group: one rank creates it, the other ranks attach to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "shared/layout.hpp"

namespace unisono {

// A mapping of an anonymous memory file (memfd). The file has no name, so nothing is left behind if
// the processes are killed, and the size of /dev/shm does not matter.
class Segment {
 public:
  Segment() = default;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  // Create the memory; return 0 or an errno. `fd()` stays open until close_fd().
  int create(int ranks, size_t slot_bytes, const unsigned char* nonce);

  // Map the memory that process `pid` holds open as `fd`; return 0 or an errno. EXDEV: the file was
  // opened but does not have this nonce, so `pid` names another process on this host.
  int attach(int pid, int fd, const unsigned char* nonce);

  // Ask for the pages of a rank's slots from a NUMA node; see prefer_node().
  void place_slots(int rank, int node) const;

  void close_fd();
  int fd() const { return fd_; }
  int ranks() const { return static_cast<int>(header_->ranks); }
  size_t slot_bytes() const { return header_->slot_bytes; }
  size_t bytes() const { return bytes_; }

  RankWords& words(int rank) const { return words_[rank]; }
  // A rank's slot in an epoch begins `at` bytes into its room for the epochs of that parity. The
  // rank publishes `at` with its words.
  char* slot(int rank, uint64_t epoch, uint32_t at) const {
    return slots_ + (2 * static_cast<size_t>(rank) + (epoch & 1)) * room_bytes_ + at;
  }
  // The largest `at`.
  uint32_t turn_bytes() const { return static_cast<uint32_t>(room_bytes_ - slot_bytes_); }

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
  size_t room_bytes_ = 0;
};

}  // namespace unisono
