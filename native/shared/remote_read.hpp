// Reading the memory of the other processes of a host where it lies, without their doing anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "shared/segment.hpp"

namespace unisono {

// Where memory of this process lies in huge pages, out of which the kernel copies at twice to four times
// the speed at which it does out of pages of 4 KiB, each of which it has to find.
class HugePages {
 public:
  // Whether this range is in huge pages, but for an eighth; never with a kernel that cannot tell. The
  // answer may be some calls old.
  bool covers(const void* data, size_t nbytes);

 private:
  struct Entry {
    const void* data = nullptr;
    size_t nbytes = 0;
    bool is_huge = false;
    int uses = 0;
  };
  // Pages become huge, or cease to be, behind our back.
  static constexpr int kUses = 256;
  Entry entries_[8];
  size_t next_ = 0;
};

// A random number in a process by which others can tell that it is the one they mean.
struct ProcessProof {
  const unsigned char* bytes;
  uint64_t at;  // where that process has these
};

// Copy what a process has at an address; false: it cannot be read, or has not that token, unless this is
// nullptr. `into` may have been written to then. With a token 128 KiB take a twentieth longer. A system call
// also where the process is this one: of memory that has been given back it says so.
bool read_process(int pid, const ProcessProof* proof, void* into, uint64_t from, size_t nbytes);

class RemoteReader {
 public:
  // Tells the other ranks by its line how they can tell that they read this process.
  RemoteReader(Segment& segment, int rank, std::vector<int> pids);
  RemoteReader(const RemoteReader&) = delete;
  RemoteReader& operator=(const RemoteReader&) = delete;

  // Whether this rank can read the memory of all others, which have entered an epoch. They
  // may be in other containers, where a process id means somebody else, or the kernel may forbid it.
  bool can_read_all();
  // Do not try again.
  void disable() { can_read_all_ = kNo; }
  bool is_disabled() const { return can_read_all_ == kNo; }

  // As read_process. Without a token: a call in which a rank has gone does not end well.
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
