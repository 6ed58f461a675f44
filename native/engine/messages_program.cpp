// The part of messages that programs use (steps.cpp), and dropping what nobody wants.
#include <algorithm>
#include <utility>

#include "messages.hpp"

namespace unisono {

void Messages::begin(Op& op) {
  const Lock lock(lock_);
  if (op.is_send) return begin_send(op);
  // As begin_recv, without looking for what comes: a program posts several, and then waits.
  if (closed_) return finish(op, Code::closed);
  const auto arrival = matching_.find_arrival(op);
  if (arrival != matching_.arrivals().end()) return take_arrival(op, arrival);
  const Code down = is_failed(op.envelope.context) ? Code::aborted : down_for(op);
  if (down != Code::ok) return finish(op, down);
  matching_.post(&op);
}

Code Messages::wait(const Op& op, int64_t timeout_ns) {
  Lock lock(lock_);
  const Code reason = wait_for(&op, timeout_ns, lock);
  settle();
  return is_over(&op) ? Code::ok : reason;
}

void Messages::give_up(Op& op) {
  const Lock lock(lock_);
  if (!op.done) withdraw(op, Code::cancelled);
  settle();
}

void Messages::nudge() {
  const Lock lock(lock_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  progress();
  settle();
}

void Messages::rest() {
  const Lock lock(lock_);
  hand_over();
  settle();
}

bool Messages::is_unwanted(const Envelope& envelope) const {
  if (is_failed(envelope.context)) return true;
  if (envelope.tag >= 0 || forgotten_.empty()) return false;
  const auto found = forgotten_.find(envelope.context);
  return found != forgotten_.end() && envelope.tag >= found->second;
}

void Messages::forget_tags(uint64_t context, int64_t oldest) {
  const Lock lock(lock_);
  forgotten_[context] = oldest;
  drop_messages([&](const Envelope& each) { return is_unwanted(each); });
}

void Messages::fail_context(uint64_t context) {
  const Lock lock(lock_);
  failed_.push_back(context);
  drop_messages([&](const Envelope& each) { return each.context == context; });
  end_all([&](Op& op) { return op.envelope.context == context ? Code::aborted : Code::ok; });
}

// What was sent in it goes on: it may be the last words before leaving.
void Messages::forget_context(uint64_t context) {
  const Lock lock(lock_);
  failed_.erase(std::remove(failed_.begin(), failed_.end(), context), failed_.end());
  forgotten_.erase(context);
  drop_messages([&](const Envelope& each) { return each.context == context; });
  end_all([&](Op& op) {
    return !op.is_send && op.envelope.context == context ? Code::closed : Code::ok;
  });
}

// Drop what has come of the frame that is coming in, if it is kept.
void Messages::drop_kept(Peer& from) {
  auto& arrivals = matching_.arrivals();
  const Arrival* const kept = std::exchange(from.kept, nullptr);
  const auto is_it = [kept](const Arrival& each) { return &each == kept; };
  if (kept != nullptr) matching_.drop(std::find_if(arrivals.begin(), arrivals.end(), is_it));
}

void Messages::drop_messages(const std::function<bool(const Envelope&)>& unwanted) {
  auto& arrivals = matching_.arrivals();
  for (auto it = arrivals.begin(); it != arrivals.end();) {
    const auto each = it++;
    if (!unwanted(each->envelope)) continue;
    Peer& from = peer(each->source);
    if (from.kept == &*each) from.kept = nullptr;
    matching_.drop(each);
  }
}

}  // namespace unisono
