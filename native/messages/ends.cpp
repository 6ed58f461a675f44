// The part of messages that programs use (steps.cpp), giving up, and dropping what nobody wants.
#include <algorithm>
#include <new>
#include <utility>

#include "messages/messages.hpp"

namespace unisono {

void Messages::begin(Op& op) {
  const Lock lock(lock_);
  op.is_send ? begin_send(op) : enlist(op);
}

// As begin_recv, without looking for what comes: a program posts several, and then waits.
void Messages::enlist(Op& op) {
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

// ---- giving up and dropping ---------------------------------------------------------------

// End an operation that is not done; its memory is not touched any more.
void Messages::withdraw(Op& op, Code code) {
  if (!op.is_send) {
    matching_.unpost(&op);
    for (Peer& from : peers_) {
      if (from.into == &op) from.into = nullptr;  // the rest of the message is dropped
    }
    return finish(op, code);
  }
  Peer& to = peer(op.peer);
  if (op.on_loan && !take_back(op)) code = Code::ok;
  const auto place = std::find(to.sends.begin(), to.sends.end(), &op);
  if (op.started && to.down == Code::ok && bequeath(op, &*place)) return finish(op, code);
  if (place != to.sends.end()) {  // else it has not begun
    to.sends.erase(place);
    --queued_sends_;
  }
  finish(op, code);
}

// The receiver has the head of this send's frame: give it the rest from a copy, in place of the send; false:
// there is no memory for that.
bool Messages::bequeath(const Op& op, Op** place) {
  try {
    leftovers_.push_back(copy_of(op));
    *place = leftovers_.back().get();
    return true;
  } catch (const std::bad_alloc&) {
    Peer& to = peer(op.peer);
    if (to.outbox != nullptr) {
      to.outbox->ring.cut();
      ring_bell(*to.outbox, false);
    } else {
      // In a wire nothing can come behind what there is of the frame.
      for (const auto& wire : to.wires) wire->cut();
    }
    return false;
  }
}

// An operation that goes on in place of this one, with a copy of its memory.
std::unique_ptr<Op> Messages::copy_of(const Op& op) const {
  auto copy = std::make_unique<Op>();
  copy->rest.reset(new char[op.envelope.nbytes]);
  copy->data = copy->rest.get();
  copy_bytes(copy->data, op.data, op.envelope.nbytes);
  copy->envelope = op.envelope;
  copy->moved = op.moved;
  copy->in_parts = op.in_parts;
  copy->is_send = copy->started = true;
  copy->peer = op.peer;
  return copy;
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
