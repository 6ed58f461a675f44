// The clock, and how long a wait spins before it sleeps.
#pragma once

#include <cstdint>
#include <ctime>

namespace unisono {

// A wait first spins in rounds. After the busy rounds come rounds that each end with sched_yield().
//
// The counts are constants. Where cpu_pause() is shorter (x86 before Skylake), a wait spins for
// less time and its thread sleeps sooner. Counts that were calibrated at load time made small calls
// 5 to 8 % slower.
struct SpinPolicy {
  int spins;        // looks per round
  int busy_rounds;  // rounds before the first yield
  int yield_rounds;
};

// For more ranks than cores: the peer probably waits for the core of this thread. The rounds take
// some 300 us, because to sleep and wake costs more than most waits. More rounds: a blocked rank
// burns its core, about which users of MPI complain.
constexpr SpinPolicy kCrowded{10, 0, 64};

// For at least as many cores as ranks. If another process computes on this core, each yield costs a
// time slice of milliseconds. With many yields an all_reduce of 25 MiB takes 40 ms instead of 5. So
// a wait spins for 50 to 130 us, in which a running peer arrives, and then sleeps.
constexpr SpinPolicy kOwnCore{100, 20, 2};

// For a thread that serves a queue. The computation beside it loses the time that this thread
// spins.
constexpr SpinPolicy kServing{100, 5, 2};

// Whether this thread serves other threads, for example by running the calls of a queue.
inline thread_local bool is_server = false;

// How long a waiting thread sleeps before it checks whether its peer lives and the call is not
// aborted. Longer: a killed rank is detected later. Shorter: a blocked rank uses more of the CPU.
constexpr int64_t kSliceNs = 20'000'000;

inline int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // `yield` returns at once on this architecture
#endif
}

}  // namespace unisono
