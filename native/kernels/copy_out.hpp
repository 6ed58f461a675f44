// Copies of data that another core reads next, over any distance between the two cores.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unisono {

// The cores that a virtual machine or the scheduler gives two ranks share a cache, or lie in
// different sockets. There an ordinary store first fetches its line from the reader's cache, and a
// store past the cache takes a fifth of the time. Cores that share a cache lose half by it.
class CopyOut {
 public:
  void copy(void* to, const void* from, std::size_t nbytes) {
    if (nbytes >= kBytes) return copy_large(to, from, nbytes);
    copy_small(to, from, nbytes);
  }

 private:
  // Smallest copy that can bypass the cache.
  static constexpr std::size_t kBytes = 8192;

  static void copy_small(void* to, const void* from, std::size_t nbytes);
  void copy_large(void* to, const void* from, std::size_t nbytes);

  int left_ = 0;  // copies until the next measurement
  int slow_ = 0;  // measurements in a row that were slow
  bool is_far_ = false;
};

}  // namespace unisono
