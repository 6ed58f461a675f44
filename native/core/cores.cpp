#include "core/cores.hpp"

#include "core/clock.hpp"

namespace unisono {

namespace {

// A move takes some 10 us, and longer if the other core is busy.
constexpr int64_t kMoveEveryNs = 1'000'000;

}  // namespace

bool leave_core(const cpu_set_t& taken, std::atomic<uint32_t>& recorded) {
  thread_local int64_t next_move_ns = 0;
  const int64_t now = now_ns();
  if (now < next_move_ns) return false;
  next_move_ns = now + kMoveEveryNs;
  cpu_set_t allowed, free;
  // Fails on a machine with more cores than the set has bits.
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return false;
  CPU_AND(&free, &allowed, &taken);
  CPU_XOR(&free, &free, &allowed);
  if (CPU_COUNT(&free) == 0) return false;
  // Otherwise a rank that now gets this core would leave it, too.
  recorded.store(0, std::memory_order_relaxed);
  if (sched_setaffinity(0, sizeof(free), &free) != 0) return false;
  record_core(recorded);
  sched_setaffinity(0, sizeof(allowed), &allowed);
  return true;
}

}  // namespace unisono
