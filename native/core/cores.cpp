#include "core/cores.hpp"

#include "core/clock.hpp"

namespace unisono {

namespace {

// A move takes some 10 us, and longer if the other core is busy.
constexpr int64_t kMoveEveryNs = 1'000'000;

std::atomic<bool> may_move{true};

bool get_mask(cpu_set_t* mask) { return sched_getaffinity(0, sizeof(*mask), mask) == 0; }

}  // namespace

void let_threads_move(bool is_allowed) { may_move.store(is_allowed, std::memory_order_relaxed); }

bool leave_core(const cpu_set_t& taken, std::atomic<uint32_t>& recorded) {
  if (!may_move.load(std::memory_order_relaxed)) return false;
  thread_local int64_t next_move_ns = 0;
  const int64_t now = now_ns();
  if (now < next_move_ns) return false;
  next_move_ns = now + kMoveEveryNs;
  cpu_set_t allowed, free, found;
  // Fails on a machine with more cores than the set has bits.
  if (!get_mask(&allowed)) return false;
  CPU_AND(&free, &allowed, &taken);
  CPU_XOR(&free, &free, &allowed);
  if (CPU_COUNT(&free) == 0) return false;
  // Otherwise a rank that now gets this core would leave it, too.
  recorded.store(0, std::memory_order_relaxed);
  if (sched_setaffinity(0, sizeof(free), &free) != 0) return false;
  record_core(recorded);
  // Whoever has bound this thread meanwhile has the last word.
  if (get_mask(&found) && CPU_EQUAL(&found, &free)) {
    sched_setaffinity(0, sizeof(allowed), &allowed);
  }
  return true;
}

}  // namespace unisono
