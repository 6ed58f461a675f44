#include "messages/wire_poll.hpp"

#include <algorithm>

#include "core/futex.hpp"

namespace unisono {

bool WirePoll::prepare(const Lock& /*lock*/) {
  if (bell_.make() != 0) return false;
  parts_.bells().pipe.store(bell_.fd(), std::memory_order_relaxed);
  return true;
}

bool WirePoll::begin(const Lock& lock) {
  if (is_active_ || peers_.wired(lock).empty()) return false;
  is_active_ = true;
  return true;
}

void WirePoll::end(const Lock& /*lock*/) {
  is_active_ = false;
  Bells& bells = parts_.bells();
  bells.polls.store(0, std::memory_order_relaxed);
  bell_.drain();
  // One of the sleeping threads takes over. The lock orders this load, as in wake_waiters().
  if (bells.sleepers.load(std::memory_order_relaxed) != 0) change_and_wake(bells.waiters);
}

void WirePoll::watch(const Lock& lock) {
  events_.clear();
  events_.push_back({bell_.fd(), POLLIN, 0});
  has_unread_ = false;
  for (int rank : peers_.wired(lock)) {
    for (const auto& wire : peers_[rank].wires.all()) {
      wire->watched = wire->wanted_events();
      wire->wake_for(std::max<size_t>(wire->in.left(), 1));
      if (wire->watched != 0) events_.push_back({wire->fd(), wire->watched, 0});
      has_unread_ |= wire->has_unread();
    }
  }
}

void WirePoll::sleep(int64_t limit_ns) {
  if (has_unread_) limit_ns = 0;
  const timespec limit{limit_ns / 1'000'000'000, limit_ns % 1'000'000'000};
  ppoll(events_.data(), events_.size(), &limit, nullptr);
  if (events_[0].revents != 0) bell_.drain();
}

void WirePoll::refresh(const Lock& lock) const {
  if (!is_active_) return;
  for (int rank : peers_.wired(lock)) {
    for (const auto& wire : peers_[rank].wires.all()) {
      const bool wants = (wire->wanted_events() & ~wire->watched) != 0;
      if (wants || wire->has_unread()) return bell_.ring();
    }
  }
}

}  // namespace unisono
