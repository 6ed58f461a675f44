// On which core a rank runs, and how a rank that waits for another leaves the core to it.
#pragma once

#include <atomic>
#include <cstdint>

#include <sched.h>

namespace unisono {

// Record on which core this thread runs, as its number plus 1. 0: unknown.
inline uint32_t record_core(std::atomic<uint32_t>& recorded) {
  const auto core = static_cast<uint32_t>(sched_getcpu() + 1);
  // Other ranks poll this cache line, and each store takes it from them.
  if (recorded.load(std::memory_order_relaxed) != core) {
    recorded.store(core, std::memory_order_relaxed);
  }
  return core;
}

// Move this thread to one of its cores that is not in `taken`; the mask of its cores stays as it
// was. `recorded`: where this rank records its core. False: there is no such core, the thread has
// moved a moment ago, or threads may not move.
//
// The kernel moves a thread only by a mask. So the mask now counts as chosen: from Linux 6.2 on the
// thread gets no cores that its cgroup gets later. And another process that binds the thread in the
// microsecond between two of the system calls here is overruled.
bool leave_core(const cpu_set_t& taken, std::atomic<uint32_t>& recorded);

// Whether leave_core() may move threads of this process.
void let_threads_move(bool is_allowed);

}  // namespace unisono
