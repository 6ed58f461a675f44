#include "shared/numa.hpp"

#include <cstdint>

#include "shared/layout.hpp"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace unisono {

void prefer_node([[maybe_unused]] void* at, [[maybe_unused]] size_t nbytes,
                 [[maybe_unused]] int node) {
#if defined(__linux__) && defined(SYS_mbind)
  constexpr int kPreferred = 1;  // MPOL_PREFERRED
  constexpr int kBits = 8 * sizeof(unsigned long);
  constexpr int kMostNodes = 1024;
  if (node < 0 || node >= kMostNodes) return;
  const auto begin = (reinterpret_cast<uintptr_t>(at) + kPageBytes - 1) / kPageBytes * kPageBytes;
  const auto end = (reinterpret_cast<uintptr_t>(at) + nbytes) / kPageBytes * kPageBytes;
  if (begin >= end) return;
  unsigned long nodes[kMostNodes / kBits] = {};
  nodes[node / kBits] = 1UL << (node % kBits);
  // Advice: where it fails, memory is slower and nothing is wrong. The kernel reads one bit less.
  syscall(SYS_mbind, begin, end - begin, kPreferred, nodes, kMostNodes + 1UL, 0UL);
#endif
}

}  // namespace unisono
