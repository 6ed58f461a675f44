// Time and patience of waits.
#pragma once

#include <cstdint>
#include <ctime>

namespace unisono {

// How often a wait yields the core, looking `spin` times before each, until it sleeps: some 300 us
// in all. Less: sleeping and waking costs more than the wait. More: a blocked rank burns its core,
// which is what users of MPI complain about. Yielding in between costs a rank with a core of its
// own half a microsecond, and saves one whose peer waits for this very core a time slice.
constexpr int kYields = 64;

// How long a sleeper waits before it looks whether its peer is alive and the call not aborted.
// Longer: a killed rank is noticed later. Shorter: a blocked rank uses the CPU.
constexpr int64_t kSliceNs = 20'000'000;

inline int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace unisono
