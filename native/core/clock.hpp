// Time and patience of waits.
#pragma once

#include <cstdint>
#include <ctime>

namespace unisono {

// What a wait does before it sleeps: rounds of spins, from some round on with an offer of the core to
// others after each. Where cpu_pause() is shorter (x86 before Skylake), so are the waits, and threads sleep
// sooner; but a count that was measured when this was loaded made small calls 5 to 8 % slower.
struct SpinPolicy {
  int spins;        // of a round
  int busy_rounds;  // rounds before the first offer
  int yield_rounds;
};

// More ranks than cores: the peer probably waits for this very core. Some 300 us: to sleep and be
// woken costs more than most waits. More: a blocked rank burns its core, which is what users of MPI
// complain about.
constexpr SpinPolicy kCrowded{10, 0, 64};

// As many cores as ranks. Where another process computes on this one, each offer costs a time slice of
// milliseconds, and an all_reduce of 25 MiB has waits enough to take 40 ms that way instead of 5. So a
// wait busy_rounds for some 50 to 130 us, in which a peer that runs will come, and then sleeps.
constexpr SpinPolicy kOwnCore{100, 20, 2};

// A thread that serves a queue. What it burns is missed by the computation beside it.
constexpr SpinPolicy kServing{100, 5, 2};

// This thread serves others: it runs the calls of a queue, say.
inline thread_local bool is_server = false;

// How long a sleeper waits before it spins whether its peer is alive and the call not aborted.
// Longer: a killed rank is noticed later. Shorter: a blocked rank uses the CPU.
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
  asm volatile("isb");  // `yield` takes no time there
#endif
}

}  // namespace unisono
