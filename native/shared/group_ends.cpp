// How a rank leaves or aborts a group, and how other ranks detect it.
#include "shared/group.hpp"

#include "core/futex.hpp"

namespace unisono {

void Group::leave() {
  if (fork_guard_.is_forked()) return;
  RankWords& mine = segment_->words(rank_);
  uint32_t member = kMember;
  // release: pairs with exit_of()
  mine.membership.compare_exchange_strong(member, kLeft, std::memory_order_release);
  for (EpochLine& line : mine.lines) futex_wake_all(line.flag);
}

void Group::abort() {
  broken_by_.store(rank_, std::memory_order_relaxed);
  has_stopped_.store(true, std::memory_order_relaxed);
  if (fork_guard_.is_forked()) return;
  RankWords& mine = segment_->words(rank_);
  uint64_t none = 0;
  mine.ended_in.compare_exchange_strong(none, epoch());
  // release: pairs with exit_of() and has_ended()
  mine.membership.store(kAborted, std::memory_order_release);
}

void Group::fail(int by) {
  int known = broken_by_.load(std::memory_order_relaxed);
  while (known != rank_ && !broken_by_.compare_exchange_weak(known, by)) continue;
}

// Whether the rank that has broken the group has not finished this epoch.
bool Group::is_broken() const {
  const int by = broken_by_.load(std::memory_order_relaxed);
  return by >= 0 && (by == rank_ || !has_reached(by, epoch() * kStages) || has_ended(by));
}

// How a peer has ended; Code::ok if it has not.
Code Group::exit_of(int peer) const {
  // acquire: pairs with leave() and abort()
  const uint32_t membership = segment_->words(peer).membership.load(std::memory_order_acquire);
  if (membership != kMember) return membership == kLeft ? Code::left : Code::aborted;
  return processes_[static_cast<size_t>(peer)]->has_ended() ? Code::lost : Code::ok;
}

}  // namespace unisono
