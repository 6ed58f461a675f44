// A cheap clock for records: the processor's counter, if it runs at a constant rate.
#pragma once

#include <cstdint>

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

}  // namespace unisono
