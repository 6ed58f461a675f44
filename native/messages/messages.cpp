// The beginning of a send or a receive. waiting.cpp has the waits, ends.cpp the ends from outside.
#include "messages/messages.hpp"

#include <algorithm>
#include <utility>

#include "core/clock.hpp"
#include "core/finally.hpp"
#include "core/futex.hpp"

namespace unisono {

namespace {

// Also for an operation that goes on, and then still needs its memory.
Outcome outcome_of(Operation& op) {
  auto memory = op.done ? std::move(op.memory) : nullptr;
  return {op.number, op.code, op.source, op.got_nbytes, op.got_info, op.got_tag, std::move(memory)};
}

}  // namespace

Messages::Messages(int rank, int ranks)
    : rank_(rank),
      ranks_(ranks),
      addresses_(static_cast<size_t>(ranks)),
      peers_(static_cast<size_t>(ranks)),
      matching_(static_cast<size_t>(ranks)) {
  active_.reserve(peers_.size());
}

void Messages::introduce(std::vector<Address> addresses, bool is_crowded) {
  const Lock lock(lock_);
  addresses_ = std::move(addresses);
  addresses_.resize(static_cast<size_t>(ranks_));
  const auto near = std::count_if(addresses_.begin(), addresses_.end(),
                                  [](const Address& each) { return each.pid != 0; });
  ring_bytes_ = near <= kFewRanks ? kWideRingBytes : kRingBytes;
  is_crowded_ = is_crowded;
}

bool Messages::reaches(int peer) {
  const Lock lock(lock_);
  return peer == rank_ || find_route(peer);
}

bool Messages::has_left(int rank) {
  const Lock lock(lock_);
  look_for_senders();
  const Peer& from = peer(rank);
  return from.active && from.ring.words->left.load(std::memory_order_acquire) != 0;
}

// ---- synchronous calls -------------------------------------------------------------------

// Not if ranks share cores: a woken thread could get the core that this rank needs.
void Messages::wake_waiters(int to) {
  const Lock lock(lock_, std::try_to_lock);
  if (!lock.owns_lock() || is_crowded_ || peer(to).outbox == nullptr) return;
  Bells& bells = peer(to).outbox->head().bells;
  if (bells.sleepers.load(std::memory_order_relaxed) != 0) futex_wake_all(bells.waiters);
}

bool Messages::try_send(int to, const Envelope& envelope, const char* data) {
  const Lock lock(lock_, std::try_to_lock);
  if (!lock.owns_lock() || closed_ || !failed_.empty() || to == rank_) return false;
  Peer& there = peer(to);
  if (there.outbox == nullptr || there.down != Code::ok || !there.sends.empty() ||
      there.outbox->ring.room() < frame_bytes(envelope.nbytes)) {
    return false;
  }
  Operation op;
  op.envelope = envelope;
  op.data = const_cast<char*>(data);  // only read
  push_some(there, op);
  ring_bell(*there.outbox, false);
  return true;
}

Outcome Messages::send(int to, const Envelope& envelope, const char* data, int64_t timeout_ns) {
  Operation op;
  op.envelope = envelope;
  op.peer = to;
  op.data = const_cast<char*>(data);  // only read
  op.is_send = true;
  Lock lock(lock_);
  const Finally ended([&] { cancel_unfinished(op); });
  begin_send(op);
  if (!op.done) wait_to_end(op, timeout_ns, lock);
  notify_ended();
  return outcome_of(op);
}

Outcome Messages::recv(int from, const Envelope& envelope, char* data, Ranks among,
                       int64_t timeout_ns) {
  Operation op;
  op.envelope = envelope;
  op.peer = from;
  op.data = data;
  op.among = std::move(among);
  Lock lock(lock_);
  const Finally ended([&] { cancel_unfinished(op); });
  begin_recv(op);
  if (!op.done) wait_to_end(op, timeout_ns, lock);
  notify_ended();
  return outcome_of(op);
}

bool Messages::has_receive(int from, uint64_t context, int64_t tag) {
  const Lock lock(lock_);
  return matching_.has_receive_for(from, context, tag);
}

// ---- started operations ------------------------------------------------------------------

Outcome Messages::start_send(int to, const Envelope& envelope, const char* data) {
  Lock lock(lock_);
  Operation& op = open_operation(std::make_unique<Operation>());
  op.envelope = envelope;
  op.peer = to;
  op.data = const_cast<char*>(data);  // only read
  op.is_send = true;
  Outcome outcome = start(op);
  report_wires(lock);
  return outcome;
}

Outcome Messages::start_recv(int from, const Envelope& envelope, char* data, Ranks among,
                             Take takes) {
  const Lock lock(lock_);
  Operation& op = open_operation(std::make_unique<Operation>());
  op.envelope = envelope;
  op.peer = from;
  op.data = data;
  op.given = data;
  op.quiet = true;
  op.takes = takes;
  op.among = std::move(among);
  return start(op);
}

// Store an operation that is about to begin, because after its start there must be memory for that.
Operation& Messages::open_operation(std::unique_ptr<Operation> op) {
  ended_.reserve(open_.size() + 1);
  return *(open_[last_number() + 1] = std::move(op));
}

Outcome Messages::start(Operation& op) {
  const uint64_t number = last_number() + 1;
  Outcome outcome;
  try {
    op.is_send ? begin_send(op) : begin_recv(op);
    outcome = outcome_of(op);
  } catch (...) {
    cancel_unfinished(op);
    open_.erase(number);
    throw;
  }
  if (op.done) {
    open_.erase(number);
  } else {
    last_number_.store(number, std::memory_order_relaxed);
    outcome.number = op.number = number;
    if (!op.quiet) ++watched_;
    delegate_to_server();
  }
  notify_ended();
  return outcome;
}

// Remove every reference to an operation whose caller gets an exception.
void Messages::cancel_unfinished(Operation& op) {
  if (!op.done) cancel_with(op, Code::no_memory);
}

uint64_t Messages::number_of(const char* data, uint64_t after) {
  const Lock lock(lock_);
  uint64_t found = 0;
  for (const auto& [number, op] : open_) {
    if (!op->is_send && op->given == data && number > after) found = std::max(found, number);
  }
  return found;
}

void Messages::watch(uint64_t number) {
  const Lock lock(lock_);
  const auto found = open_.find(number);
  if (found == open_.end() || !found->second->quiet) return;
  watch(*found->second);
  delegate_to_server();
  notify_ended();
}

void Messages::watch(Operation& op) {
  op.quiet = false;
  ++watched_;
  if (op.done && !op.awaited) anything_ended_ = server_is_due_ = true;
}

// Return the outcome of an operation that has ended, and forget the operation.
Outcome Messages::take_outcome(uint64_t number) {
  const auto found = open_.find(number);
  Outcome outcome = outcome_of(*found->second);
  if (!found->second->quiet) --watched_;
  open_.erase(found);
  ended_.erase(std::remove(ended_.begin(), ended_.end(), number), ended_.end());
  return outcome;
}

Outcome Messages::cancel(uint64_t number) {
  if (is_forked()) return {number, Code::unknown};
  const Lock lock(lock_);
  const auto found = open_.find(number);
  if (found == open_.end()) return {number, Code::unknown};
  Operation& op = *found->second;
  if (!op.done) {
    leave_message(op);
    cancel_with(op, Code::cancelled);
  }
  notify_ended();
  // A thread that waits for the operation takes the outcome itself.
  return op.awaited ? Outcome{number, Code::unknown} : take_outcome(number);
}

// ---- programs, and messages from Python's links -------------------------------------------

void Messages::begin(Operation& op) {
  const Lock lock(lock_);
  op.is_send ? begin_send(op) : post_recv(op);
}

// As begin_recv(), without progress: a program posts several receives before it waits.
void Messages::post_recv(Operation& op) {
  if (closed_) return finish(op, Code::closed);
  const auto arrival = matching_.find_arrival(op);
  if (arrival != matching_.arrivals().end()) return take_arrival(op, arrival);
  const Code down = is_failed(op.envelope) ? Code::aborted : down_for(op);
  if (down != Code::ok) return finish(op, down);
  matching_.post(&op);
}

Code Messages::wait(const Operation& op, int64_t timeout_ns) {
  Lock lock(lock_);
  const Code reason = wait_for(&op, timeout_ns, lock);
  notify_ended();
  return is_over(&op) ? Code::ok : reason;
}

void Messages::cancel(Operation& op) {
  const Lock lock(lock_);
  if (!op.done) cancel_with(op, Code::cancelled);
  notify_ended();
}

void Messages::try_progress() {
  const Lock lock(lock_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  progress();
  notify_ended();
}

void Messages::end_waits() {
  const Lock lock(lock_);
  delegate_to_server();
  notify_ended();
}

void Messages::deliver(int source, const Envelope& envelope, const char* data) {
  const Lock lock(lock_);
  accept_message(source, envelope, data);
  notify_ended();
}

// ---- beginning and ending -----------------------------------------------------------------

void Messages::begin_send(Operation& op) {
  if (closed_) return finish(op, Code::closed);
  if (is_failed(op.envelope)) return finish(op, Code::aborted);
  if (op.peer == rank_) {
    accept_message(rank_, op.envelope, op.data);
    return finish(op, Code::ok);
  }
  Peer& to = peer(op.peer);
  if (to.down != Code::ok) {
    op.source = op.peer;
    return finish(op, to.down);
  }
  if (!find_route(op.peer, op.envelope.nbytes)) return finish(op, Code::unreachable);
  to.sends.push_back(&op);
  ++queued_sends_;
  if (to.sends.size() == 1) push(to);
}

void Messages::begin_recv(Operation& op) {
  if (closed_) return finish(op, Code::closed);
  auto arrival = matching_.find_arrival(op);
  if (arrival != matching_.arrivals().end()) return take_arrival(op, arrival);
  if (is_failed(op.envelope)) return finish(op, Code::aborted);
  matching_.post(&op);
  progress(&op);
  const Code down = op.done || op.started ? Code::ok : down_for(op);
  if (down != Code::ok && matching_.unpost(&op)) finish(op, down);
}

void Messages::take_arrival(Operation& op, std::list<Arrival>::iterator arrival) {
  const char* const bytes = arrival->data.get();
  Peer& from = peer(arrival->source);
  if (op.order == 0) matching_.assign_order(&op);
  const bool fits = op.accept(arrival->source, arrival->envelope, &arrival->data);
  if (op.takes == Take::nothing) return finish(op, Code::ok);
  if (fits && op.data != bytes) copy_bytes(op.data, bytes, arrival->filled);
  if (from.kept == &*arrival) {  // the rest of the message has not come
    from.kept = nullptr;
    from.into = fits ? &op : nullptr;
    op.started = fits;
  }
  if (!op.started) finish(op, fits ? Code::ok : Code::mismatch);
  matching_.discard(arrival);
}

void Messages::finish(Operation& op, Code code) {
  op.code = code;
  anything_ended_ = true;
  if (op.number != 0 && !op.awaited) note_end(op);
  op.done.store(true, std::memory_order_release);  // acquire: wait_for
}

// Record that an operation has ended for which no thread waits.
void Messages::note_end(const Operation& op) {
  ended_.push_back(op.number);
  server_is_due_ |= !op.quiet;
}

// Whether a message is lost with its context. The rank that has broken the context has finished
// the runs before, so all their messages come.
bool Messages::is_failed(const Envelope& envelope) const {
  if (failed_.empty()) return false;
  const auto found = failed_.find(envelope.context);
  return found != failed_.end() && run_of(envelope.tag) > found->second;
}

// The code with which a receive must end because its sender is gone. `source` becomes the rank to
// blame.
Code Messages::down_for(Operation& op) {
  if (op.peer >= 0) {
    op.source = op.peer;
    return peer(op.peer).down;
  }
  Code left = Code::left;
  for (int rank : *op.among) {
    if (rank == rank_) continue;
    const Code down = peer(rank).down;
    if (down != Code::ok) op.source = rank;
    if (down == Code::lost) return down;
    if (down == Code::ok) left = Code::ok;
  }
  return left;
}

}  // namespace unisono
