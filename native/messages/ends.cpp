// How operations end from outside: by a cancel, a failed context, a lost rank, or close().
#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "core/clock.hpp"
#include "messages/messages.hpp"

namespace unisono {

namespace {

// How long messages of a rank may still arrive after Python knows that the rank is gone. From a
// rank that has left, all messages arrive unless the network loses them again and again. From a
// lost rank, no receiver needs all messages.
constexpr int64_t kLeftNs = 5'000'000'000;
constexpr int64_t kLostNs = 300'000'000;

// How often a ring and the wires of a rank are looked at when a context fails. A look takes up to
// 0.5 MiB from each.
constexpr int kMostLooks = 32;

}  // namespace

// ---- one operation ------------------------------------------------------------------------

// End an operation that is not done. Its memory is not used afterwards.
void Messages::cancel_with(Operation& op, Code code) {
  if (!op.is_send) {
    matching_.unpost(&op);
    for (Peer& from : peers_) {
      if (from.into == &op) from.into = nullptr;  // the rest of the message is discarded
    }
    return finish(op, code);
  }
  Peer& to = peer(op.peer);
  if (op.on_loan && !revoke_loan(op)) code = Code::ok;
  const auto place = std::find(to.sends.begin(), to.sends.end(), &op);
  if (op.started && to.down == Code::ok && continue_from_copy(op, &*place)) return finish(op, code);
  if (place != to.sends.end()) {  // else the send has not begun
    to.sends.erase(place);
    --queued_sends_;
  }
  finish(op, code);
}

// The receiver has the head of this send's frame: send it the rest from a copy, which replaces the
// send in the queue. False: there is no memory for the copy, and the frame was aborted.
bool Messages::continue_from_copy(const Operation& op, Operation** place) {
  try {
    leftovers_.push_back(copy_of(op));
    *place = leftovers_.back().get();
    return true;
  } catch (const std::bad_alloc&) {
    Peer& to = peer(op.peer);
    if (to.outbox != nullptr) {
      to.outbox->ring.abort_frame();
      ring_bell(*to.outbox, false);
    } else {
      // In a wire no frame can follow an incomplete frame.
      for (const auto& wire : to.wires) wire->abort();
    }
    return false;
  }
}

// Before a receive is cancelled: leave its half-received message to other receives, because the
// sender will not send it again. Without memory for that the message is lost.
void Messages::leave_message(Operation& op) {
  if (op.is_send || !op.started) return;
  Peer& from = peer(op.source);
  const Envelope message = from.frame;
  if (from.into != &op || !message.is_of_user()) return;
  Arrival* const kept = matching_.keep(op.source, message);
  if (kept == nullptr) return;
  if (op.memory != nullptr) {
    kept->data = std::move(op.memory);
  } else {
    copy_bytes(kept->data.get(), op.data, message.nbytes);
  }
  kept->filled = message.nbytes;  // several wires fill several places
  from.into = nullptr;
  from.kept = kept;
  if (Operation* const next = matching_.take_posted(op.source, message)) {
    take_arrival(*next, std::prev(matching_.arrivals().end()));
  } else {
    end_probes(op.source, message);
  }
}

// Return an operation that continues a send, with a copy of its memory.
std::unique_ptr<Operation> Messages::copy_of(const Operation& op) const {
  auto rest = std::make_unique<Operation>();
  rest->copy.reset(new char[op.envelope.nbytes]);
  rest->data = rest->copy.get();
  copy_bytes(rest->data, op.data, op.envelope.nbytes);
  rest->envelope = op.envelope;
  rest->moved = op.moved;
  rest->in_parts = op.in_parts;
  rest->is_send = rest->started = true;
  rest->peer = op.peer;
  return rest;
}

// ---- a context ----------------------------------------------------------------------------

bool Messages::is_unwanted(const Envelope& envelope) const {
  if (is_failed(envelope)) return true;
  if (envelope.tag >= 0 || forgotten_.empty()) return false;
  const auto found = forgotten_.find(envelope.context);
  return found != forgotten_.end() && envelope.tag >= found->second;
}

// Discard the messages of programs that no receive will take.
void Messages::discard_messages() {
  discard_messages([&](const Envelope& each) { return each.tag < 0 && is_unwanted(each); });
}

void Messages::forget_tags(uint64_t context, int64_t oldest) {
  const Lock lock(lock_);
  forgotten_[context] = oldest;
  discard_messages();
}

void Messages::fail_context(uint64_t context, int64_t after) {
  const Lock lock(lock_);
  receive_all();
  // Two threads may report two failures, in either order.
  int64_t& last = failed_.try_emplace(context, after).first->second;
  last = std::min(last, after);
  discard_messages();
  end_all([&](Operation& op) {
    return op.envelope.context == context && is_failed(op.envelope) ? Code::aborted : Code::ok;
  });
}

// Receive what is in the rings and wires now. The limit is for ranks that send all the time.
void Messages::receive_all() {
  const bool all = std::exchange(takes_all_, true), loans = std::exchange(takes_loans_, true);
  look_for_senders();
  for (int source = 0; source < ranks_; ++source) {
    for (int look = 0; look < kMostLooks; ++look) {
      const bool moved = peer(source).active && pull(source);
      if (!(pull_wires(source, true) || moved)) break;
    }
  }
  takes_all_ = all;
  takes_loans_ = loans;
}

// Sends of the context go on, because they may be a rank's last messages before it leaves.
void Messages::forget_context(uint64_t context) {
  const Lock lock(lock_);
  failed_.erase(context);
  forgotten_.erase(context);
  discard_messages([&](const Envelope& each) { return each.context == context; });
  end_all([&](Operation& op) {
    return !op.is_send && op.envelope.context == context ? Code::closed : Code::ok;
  });
}

// Discard the received part of the incoming frame, if the frame is kept.
void Messages::discard_partial(Peer& from) {
  auto& arrivals = matching_.arrivals();
  const Arrival* const kept = std::exchange(from.kept, nullptr);
  const auto is_it = [kept](const Arrival& each) { return &each == kept; };
  if (kept != nullptr) matching_.discard(std::find_if(arrivals.begin(), arrivals.end(), is_it));
}

void Messages::discard_messages(const std::function<bool(const Envelope&)>& unwanted) {
  auto& arrivals = matching_.arrivals();
  for (auto it = arrivals.begin(); it != arrivals.end();) {
    const auto each = it++;
    if (!unwanted(each->envelope)) continue;
    Peer& from = peer(each->source);
    if (from.kept == &*each) from.kept = nullptr;
    matching_.discard(each);
  }
}

// ---- a rank, and everything ---------------------------------------------------------------

// End every operation for which `code_of` returns another code than ok.
void Messages::end_all(const std::function<Code(Operation&)>& code_of) {
  std::vector<Operation*> candidates(matching_.posted());
  for (Peer& other : peers_) {
    candidates.insert(candidates.end(), other.sends.begin(), other.sends.end());
    if (other.into != nullptr) candidates.push_back(other.into);
  }
  for (Operation* op : candidates) {
    const Code code = op->is_leftover() ? Code::ok : code_of(*op);
    if (code != Code::ok) cancel_with(*op, code);
  }
  notify_ended();
}

// End the operations that wait for a rank from which no message can come any more.
void Messages::end_peer(int rank, Code code) {
  Peer& gone = peer(rank);
  discard_partial(gone);  // the rank will never send the rest
  // A wire with an incomplete outgoing frame stays writable, so poll() would return at once every
  // time.
  for (const auto& wire : gone.wires) wire->close_fd();
  gone.down = code;
  Operation* const half_received = gone.into;
  end_all([&](Operation& op) {
    if (op.is_send) {
      op.source = rank;
      return op.peer == rank ? code : Code::ok;
    }
    if (&op == half_received) return code;
    return op.started || !op.takes_from(rank) ? Code::ok : down_for(op);
  });
  // The rest of cancelled sends has no receiver any more.
  queued_sends_ -= static_cast<int>(gone.sends.size());
  leftovers_.remove_if([&](const auto& left) { return left->peer == rank; });
  gone.sends.clear();
}

bool Messages::peer_down(int rank, Code code) {
  const Lock lock(lock_);
  Peer& gone = peer(rank);
  look_for_senders();
  const Code known = std::exchange(gone.departure, code);
  // Receive the messages that the rank has sent.
  while (gone.active && pull(rank)) continue;
  while (pull_wires(rank, true)) continue;
  if (closed_ || is_drained(gone)) {
    if (known != Code::ok) --departing_;
    gone.departure = Code::ok;
    end_peer(rank, code);
    return false;
  }
  if (known == Code::ok) ++departing_;
  gone.departure_ends_ns = now_ns() + (code == Code::left ? kLeftNs : kLostNs);
  notify_ended();
  delegate_to_server();
  return true;
}

// Whether no message can come any more over a rank's wires. A blocked wire waits for a frame that
// the first wire opens, which cannot happen after the first wire has ended.
bool Messages::is_drained(const Peer& gone) const {
  const Wire* const first = gone.first_wire();
  const bool opens = first != nullptr && !first->has_ended();
  return std::all_of(gone.wires.begin(), gone.wires.end(), [&](const auto& wire) {
    return wire->has_ended() || (wire->is_blocked && !opens);
  });
}

// End the ranks whose wires have ended, or whose last messages took too long.
void Messages::end_departures() {
  for (int rank : wired_) {
    Peer& gone = peer(rank);
    if (gone.departure == Code::ok) continue;
    if (!is_drained(gone) && now_ns() < gone.departure_ends_ns) continue;
    const Code code = gone.departure;
    gone.departure = Code::ok;
    --departing_;
    end_peer(rank, code);
  }
}

std::vector<int> Messages::close(int64_t timeout_ns) {
  std::vector<int> fds;
  if (is_forked()) return fds;
  Lock lock(lock_);
  if (closed_) return fds;
  if (queued_sends_ != 0) wait_for(nullptr, timeout_ns, lock);
  closed_ = true;
  for (Peer& to : peers_) {
    if (to.joined) to.outbox->ring.words->left.store(1, std::memory_order_release);
    for (const auto& wire : to.wires) wire->hand_back(&fds);
  }
  end_all([](Operation&) { return Code::closed; });
  anything_ended_ = true;
  notify_ended();
  inbox_.close_fd();
  return fds;
}

}  // namespace unisono
