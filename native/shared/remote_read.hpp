// Reads memory of other processes of the host without their help.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "shared/segment.hpp"

namespace unisono {

// Finds out which memory of this process lies in huge pages. The kernel copies out of huge pages 2
// to 4 times as fast as out of pages of 4 KiB. It must find each page.
class HugePages {
 public:
  // Whether at least 3/4 of this range are in huge pages. Always false with a kernel that cannot
  // report it. The answer may be some calls old.
  bool covers(const void* data, size_t nbytes);

 private:
  struct Entry {
    const void* data = nullptr;
    size_t nbytes = 0;
    bool is_huge = false;
    int uses = 0;
  };
  // How often an answer is used again. Pages can become huge or small at any time.
  static constexpr int kUses = 256;
  Entry entries_[8];
  size_t next_ = 0;
};

// A random number in the memory of a process. A reader compares it to make sure that it reads the
// intended process.
struct ProcessProof {
  const unsigned char* bytes;
  uint64_t at;  // its address in that process
};

// Copy memory of another process. False: the memory cannot be read, or `proof` is given and the
// process does not have it. `into` may have been written to in both cases.
//
// With a proof a read of 128 KiB takes a twentieth longer. The function also makes a system call if
// the process is the caller's own: the call then detects memory that was unmapped.
bool read_process(int pid, const ProcessProof* proof, void* into, uint64_t from, size_t nbytes);

class RemoteReader {
 public:
  // Write this rank's random number into its words, so that other ranks can check which process
  // they read.
  RemoteReader(Segment& segment, int rank, std::vector<int> pids);
  RemoteReader(const RemoteReader&) = delete;
  RemoteReader& operator=(const RemoteReader&) = delete;

  // Whether this rank can read the memory of all other ranks, which must have entered an epoch. A
  // rank may be in another container, where a process id means another process. The kernel may also
  // forbid the read.
  bool can_read_all();
  // Never try again.
  void disable() { can_read_all_ = kNo; }
  bool is_disabled() const { return can_read_all_ == kNo; }

  // As read_process(), without a proof: if a rank has ended, the call fails anyway.
  bool read(int peer, void* into, uint64_t from, size_t nbytes) const {
    return read_process(pids_[static_cast<size_t>(peer)], nullptr, into, from, nbytes);
  }

 private:
  Segment& segment_;
  const int rank_;
  const std::vector<int> pids_;
  enum { kUnknown, kYes, kNo } can_read_all_ = kUnknown;
  unsigned char nonce_[kNonceBytes] = {};
};

}  // namespace unisono
