#include "messages/delivery.hpp"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "messages/ring.hpp"

namespace unisono {

char* Incoming::address_of(size_t at) const {
  if (into != nullptr) return into->data + at;
  return kept != nullptr ? kept->data.get() + at : nullptr;
}

Delivery::Delivery(int ranks, Operations& operations, Ends& ends)
    : matching_(static_cast<size_t>(ranks)),
      operations_(operations),
      ends_(ends),
      incoming_(static_cast<size_t>(ranks)) {}

// ---- receives -----------------------------------------------------------------------------

bool Delivery::post(const Lock& lock, Operation& op) {
  const auto arrival = matching_.find_arrival(op);
  if (ends_.is_closed(lock)) {
    operations_.finish(lock, op, Code::closed);
  } else if (arrival != matching_.arrivals().end()) {
    take_arrival(lock, op, arrival);
  } else if (ends_.is_failed(lock, op.envelope)) {
    operations_.finish(lock, op, Code::aborted);
  } else {
    matching_.post(&op);
    return true;
  }
  return false;
}

void Delivery::end_waiting_if_down(const Lock& lock, Operation& op) {
  const Code down = ends_.down_for(lock, op);
  if (down != Code::ok && matching_.unpost(&op)) operations_.finish(lock, op, down);
}

void Delivery::cancel(const Lock& lock, Operation& op, Code code) {
  matching_.unpost(&op);
  // The rest of the message is discarded.
  if (op.started && incoming(op.source).into == &op) incoming(op.source).into = nullptr;
  operations_.finish(lock, op, code);
}

void Delivery::leave_message(const Lock& lock, Operation& op) {
  if (op.is_send || !op.started) return;
  Incoming& from = incoming(op.source);
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
    take_arrival(lock, *next, std::prev(matching_.arrivals().end()));
  } else {
    end_probes(lock, op.source, message);
  }
}

std::vector<Operation*> Delivery::receives(const Lock& /*lock*/) const {
  std::vector<Operation*> all(matching_.posted());
  for (const Incoming& each : incoming_) {
    if (each.into != nullptr) all.push_back(each.into);
  }
  return all;
}

void Delivery::take_arrival(const Lock& lock, Operation& op, std::list<Arrival>::iterator arrival) {
  const char* const bytes = arrival->data.get();
  Incoming& from = incoming(arrival->source);
  if (op.order == 0) matching_.assign_order(&op);
  const bool fits = op.accept(arrival->source, arrival->envelope, &arrival->data);
  if (op.takes == Take::nothing) return operations_.finish(lock, op, Code::ok);
  if (fits && op.data != bytes) copy_bytes(op.data, bytes, arrival->filled);
  if (from.kept == &*arrival) {  // the rest of the message has not come
    from.kept = nullptr;
    from.into = fits ? &op : nullptr;
    op.started = fits;
  }
  if (!op.started) operations_.finish(lock, op, fits ? Code::ok : Code::mismatch);
  matching_.discard(arrival);
}

// ---- messages -----------------------------------------------------------------------------

void Delivery::accept(const Lock& lock, int source, const Envelope& envelope, const char* data) {
  Operation* op = matching_.take_posted(source, envelope);
  if (op != nullptr) {
    const bool fits = op->accept(source, envelope);
    if (fits) copy_bytes(op->data, data, envelope.nbytes);
    operations_.finish(lock, *op, fits ? Code::ok : Code::mismatch);
  } else if (!ends_.is_unwanted(lock, envelope) && !ends_.is_closed(lock)) {
    Arrival* kept = matching_.keep(source, envelope);
    if (kept == nullptr) throw std::bad_alloc();
    copy_bytes(kept->data.get(), data, envelope.nbytes);
    kept->filled = envelope.nbytes;
    end_probes(lock, source, envelope);
  }
}

bool Delivery::open(const Lock& lock, int source, const Envelope& envelope) {
  Incoming& from = incoming(source);
  const bool is_end = envelope.tag == kAnyTag;
  Operation* op = is_end ? nullptr : matching_.take_posted(source, envelope);
  if (is_end) {
    close_context(lock, source, envelope.context);
  } else if (op != nullptr) {
    if (op->accept(source, envelope)) {
      from.into = op;
      op->started = true;
    } else {
      operations_.finish(lock, *op, Code::mismatch);
    }
  } else if (!ends_.is_unwanted(lock, envelope)) {
    end_probes(lock, source, envelope);
    if (may_keep(lock, source, envelope) || matching_.has_receive_from(source)) {
      from.kept = matching_.keep(source, envelope);
    }
    if (from.kept == nullptr) return false;
  }
  from.frame = envelope;
  from.filled = 0;
  from.is_open = true;
  return true;
}

// A message of any tag is the last one of a rank that has closed its group. All messages before it
// have come, so no receive that waits for the rank gets one.
void Delivery::close_context(const Lock& lock, int source, uint64_t context) {
  std::vector<Operation*> waiting(matching_.posted());
  const auto is_other = [&](Operation* op) { return op->envelope.context != context; };
  waiting.erase(std::remove_if(waiting.begin(), waiting.end(), is_other), waiting.end());
  // Without a receive the context may be forgotten. A later receive asks again.
  if (waiting.empty()) return;
  ends_.close_context(lock, source, context);
  for (Operation* const op : waiting) end_if_down(lock, *op);
}

// Whether to keep a message without a receive, so that the messages behind it can be received.
bool Delivery::may_keep(const Lock& lock, int source, const Envelope& envelope) const {
  if (!matching_.has_room(envelope.nbytes)) return false;
  if (keeps_all || ends_.parting(lock, source) != Code::ok) return true;
  // A program posts the receive soon, and a second copy costs more than the wait of the sender.
  return !is_of_program(envelope.tag) || envelope.nbytes <= eager_bytes;
}

// End the probes that wait for a message that no receive takes.
void Delivery::end_probes(const Lock& lock, int source, const Envelope& envelope) {
  while (Operation* const probe = matching_.take_posted(source, envelope, true)) {
    probe->accept(source, envelope);
    operations_.finish(lock, *probe, Code::ok);
  }
}

void Delivery::abort(const Lock& lock, int source) {
  Incoming& from = incoming(source);
  discard_partial(lock, source);
  from.is_open = false;
  Operation* const op = std::exchange(from.into, nullptr);
  if (op == nullptr) return;
  op->started = false;
  op->source = -1;
  if (post(lock, *op)) end_if_down(lock, *op);
}

void Delivery::discard(const Lock& /*lock*/, const std::function<bool(const Envelope&)>& unwanted) {
  auto& arrivals = matching_.arrivals();
  for (auto it = arrivals.begin(); it != arrivals.end();) {
    const auto each = it++;
    if (!unwanted(each->envelope)) continue;
    Incoming& from = incoming(each->source);
    if (from.kept == &*each) from.kept = nullptr;
    matching_.discard(each);
  }
}

// Only messages of programs: a user's receive may still take a message of a failed context.
void Delivery::discard_unwanted(const Lock& lock) {
  discard(lock,
          [&](const Envelope& each) { return each.tag < 0 && ends_.is_unwanted(lock, each); });
}

void Delivery::discard_partial(const Lock& /*lock*/, int source) {
  auto& arrivals = matching_.arrivals();
  const Arrival* const kept = std::exchange(incoming(source).kept, nullptr);
  const auto is_it = [kept](const Arrival& each) { return &each == kept; };
  if (kept != nullptr) matching_.discard(std::find_if(arrivals.begin(), arrivals.end(), is_it));
}

}  // namespace unisono
