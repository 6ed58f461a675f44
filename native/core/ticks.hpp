// A cheap clock for records: the processor's counter, if it runs at a constant rate.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>

#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

#include "core/clock.hpp"

namespace unisono {

#if defined(__x86_64__)
// Some virtual machines have no counter of constant rate. The clock then replaces it.
inline bool has_constant_counter() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0x80000007u, &a, &b, &c, &d) != 0 && (d & (1u << 8)) != 0;
}
inline const bool kHasCounter = has_constant_counter();
#endif

// A time in a unit of its own. Two pairs of (ticks, clock) convert it to nanoseconds.
inline uint64_t ticks() {
#if defined(__x86_64__)
  if (kHasCounter) return __rdtsc();
#elif defined(__aarch64__)
  uint64_t count;
  asm volatile("mrs %0, cntvct_el0" : "=r"(count));
  return count;
#endif
  return static_cast<uint64_t>(now_ns());
}

// Both clocks at one moment: the closest of some readings. Between two reads the thread may lose
// its core for milliseconds, which would move all times of a rank.
template <class Ticks, class Clock>
std::pair<uint64_t, int64_t> at_one_moment(Ticks read_ticks, Clock read_clock) {
  constexpr int kReadings = 3;
  std::pair<uint64_t, int64_t> closest;
  uint64_t least = std::numeric_limits<uint64_t>::max();
  uint64_t before = read_ticks();
  for (int i = 0; i < kReadings; ++i) {
    const int64_t now = read_clock();
    const uint64_t after = read_ticks();
    if (after - before < least) {
      least = after - before;
      closest = {before + least / 2, now};
    }
    before = after;
  }
  return closest;
}

}  // namespace unisono
