// Ranks that wait for each other keep apart: on which cores the ranks of a group run.
//
// Two ranks on one core run by turns, at a switch of threads per message. Where other processes
// compute, too, the scheduler leaves both there: it balances how much runs on each core.
#include "core/cores.hpp"
#include "shared/group.hpp"

namespace unisono {

// Whether a peer cannot be running because this rank runs on the same core. This is a guess.
bool Group::is_on_this_core(int peer) {
  const uint32_t core = record_core(segment_->words(rank_).core);
  return core != 0 && segment_->words(peer).core.load(std::memory_order_relaxed) == core;
}

// Leave this core to a peer that needs it. False: this rank stays.
bool Group::step_aside() {
  if (is_crowded_) return false;
  cpu_set_t taken;
  CPU_ZERO(&taken);
  for (int rank = 0; rank < ranks_; ++rank) {
    const uint32_t core = segment_->words(rank).core.load(std::memory_order_relaxed);
    if (core != 0) CPU_SET(core - 1, &taken);
  }
  return leave_core(taken, segment_->words(rank_).core);
}

}  // namespace unisono
