// Copies of data that another core reads next, whatever the distance between the two cores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace unisono {

// Two ranks' cores share a cache, or lie in different sockets. There an ordinary store first
// fetches its line from the reader's cache, and a store past the cache takes a fifth of the time.
// Between cores that share a cache it takes twice the time.
class CopyOut {
 public:
  // memcpy that allows null pointers for 0 bytes.
  void copy(void* to, const void* from, std::size_t nbytes) {
    if (nbytes >= kLargeBytes) {
      copy_large(to, from, nbytes);
    } else if (nbytes != 0) {
      std::memcpy(to, from, nbytes);
    }
  }
  // Whether the next large copy is measured, in one piece, by copy(). Otherwise several threads may
  // copy its parts by copy_part().
  bool is_measured_next() {
    if (left_ == 0) return true;
    --left_;
    return false;
  }
  void copy_part(void* to, const void* from, std::size_t nbytes) const;
  // Learn from the duration of a copy by ordinary stores.
  void note(std::size_t nbytes, int64_t elapsed_ns);
  bool is_far() const { return is_far_; }

 private:
  // Below, all of it stays in the fastest cache.
  static constexpr std::size_t kLargeBytes = 8192;

  void copy_large(void* to, const void* from, std::size_t nbytes);

  int left_ = 0;  // copies until the next measurement
  int slow_ = 0;  // slow measurements in a row
  bool is_far_ = false;
};

}  // namespace unisono
