#include "messages/messages.hpp"

#include <algorithm>
#include <memory>
#include <utility>

#include "core/finally.hpp"

namespace unisono {

namespace {

void set_send(Operation& op, int to, const Envelope& envelope, const char* data) {
  op.envelope = envelope;
  op.peer = to;
  op.data = const_cast<char*>(data);  // only read
  op.is_send = true;
}

void set_recv(Operation& op, int from, const Envelope& envelope, char* data, Ranks among) {
  op.envelope = envelope;
  op.peer = from;
  op.data = data;
  op.among = std::move(among);
}

}  // namespace

Messages::Messages(int rank, int ranks)
    : parts_(rank, ranks),
      peers_(ranks, parts_),
      waiting_(lock_, parts_, peers_),
      programs_(lock_, parts_, peers_, waiting_) {}

int Messages::create(const unsigned char* nonce, int node) {
  const int error = parts_.inbox.create(static_cast<int>(parts_.addresses.size()), nonce, node);
  return error != 0 ? -error : parts_.inbox.fd();
}

void Messages::introduce(std::vector<Address> addresses, bool is_crowded, bool are_far) {
  const Lock lock(lock_);
  addresses.resize(parts_.addresses.size());
  parts_.addresses = std::move(addresses);
  const auto near = std::count_if(parts_.addresses.begin(), parts_.addresses.end(),
                                  [](const Address& each) { return each.pid != 0; });
  parts_.ring_bytes = near <= kFewRanks ? kWideRingBytes : kRingBytes;
  const size_t share = kFarKeptBytes / parts_.addresses.size();
  parts_.delivery.eager_bytes =
    are_far ? std::clamp(share, kEagerBytes, kFarEagerBytes) : kEagerBytes;
  waiting_.set_crowded(lock, is_crowded);
}

bool Messages::has_left(int rank) {
  const Lock lock(lock_);
  peers_.look_for_senders(lock);
  return peers_[rank].rings.has_left(lock);
}

// ---- synchronous calls -------------------------------------------------------------------

// Not if ranks share cores: a woken thread could get the core that this rank needs.
void Messages::wake_waiters(int to) {
  const Lock lock(lock_, std::try_to_lock);
  if (lock.owns_lock() && !waiting_.is_crowded(lock)) peers_[to].rings.wake_waiters(lock);
}

bool Messages::try_send(int to, const Envelope& envelope, const char* data) {
  const Lock lock(lock_, std::try_to_lock);
  if (!lock.owns_lock() || parts_.ends.is_closed(lock) || parts_.ends.have_failed(lock)) {
    return false;
  }
  return to != rank() && peers_[to].try_send(lock, envelope, data);
}

Outcome Messages::send(int to, const Envelope& envelope, const char* data, int64_t timeout_ns) {
  Operation op;
  set_send(op, to, envelope, data);
  return run(op, timeout_ns);
}

Outcome Messages::recv(int from, const Envelope& envelope, char* data, Ranks among,
                       int64_t timeout_ns) {
  Operation op;
  set_recv(op, from, envelope, data, std::move(among));
  return run(op, timeout_ns);
}

// Run an operation in the caller's memory to its end.
Outcome Messages::run(Operation& op, int64_t timeout_ns) {
  Lock lock(lock_);
  const Finally ended([&] { cancel_unfinished(lock, op); });
  begin(lock, op);
  if (!op.done) {
    const Code reason = waiting_.wait_for(&op, timeout_ns, lock);
    if (!op.done) {
      parts_.delivery.leave_message(lock, op);
      peers_.cancel(lock, op, reason);
    }
    // The message may have come at that moment, but the caller must see the signal.
    if (reason == Code::interrupted) op.code = reason;
    waiting_.delegate(lock);
  }
  waiting_.notify(lock);
  return outcome_of(op);
}

bool Messages::has_receive(int from, uint64_t context, int64_t tag) {
  const Lock lock(lock_);
  return parts_.delivery.has_receive(lock, from, context, tag);
}

// ---- started operations ------------------------------------------------------------------

Outcome Messages::start_send(int to, const Envelope& envelope, const char* data) {
  Lock lock(lock_);
  Operation& op = parts_.operations.open(lock);
  set_send(op, to, envelope, data);
  Outcome outcome = start(lock, op);
  waiting_.report_wires(lock);
  return outcome;
}

Outcome Messages::start_recv(int from, const Envelope& envelope, char* data, Ranks among,
                             Take takes) {
  const Lock lock(lock_);
  Operation& op = parts_.operations.open(lock);
  set_recv(op, from, envelope, data, std::move(among));
  op.given = data;
  op.quiet = true;
  op.takes = takes;
  return start(lock, op);
}

Outcome Messages::start(const Lock& lock, Operation& op) {
  Outcome outcome;
  try {
    begin(lock, op);
    outcome = outcome_of(op);
  } catch (...) {
    cancel_unfinished(lock, op);
    parts_.operations.drop(lock);
    throw;
  }
  if (op.done) {
    parts_.operations.drop(lock);
  } else {
    outcome.number = parts_.operations.assign_number(lock, op);
    waiting_.delegate(lock);
  }
  waiting_.notify(lock);
  return outcome;
}

// Remove every reference to an operation whose caller gets an exception.
void Messages::cancel_unfinished(const Lock& lock, Operation& op) {
  if (!op.done) peers_.cancel(lock, op, Code::no_memory);
}

uint64_t Messages::number_of(const char* data, uint64_t after) {
  const Lock lock(lock_);
  return parts_.operations.number_of(lock, data, after);
}

void Messages::watch(uint64_t number) {
  if (is_forked()) return;
  const Lock lock(lock_);
  Operation* const op = parts_.operations.find(lock, number);
  if (op == nullptr || !op->quiet) return;
  parts_.operations.watch(lock, *op);
  waiting_.delegate(lock);
}

Outcome Messages::wait(uint64_t number, int64_t timeout_ns) {
  // Otherwise the child of a fork would take its parent's messages out of the rings.
  if (is_forked()) return {number, Code::unknown};
  Lock lock(lock_);
  Operation* const op = parts_.operations.find(lock, number);
  if (op == nullptr || op->awaited) return {number, Code::unknown};
  Code reason = Code::ok;
  {
    op->awaited = true;
    const Finally ended([&] { op->awaited = false; });
    if (!op->done) reason = waiting_.wait_for(op, timeout_ns, lock);
  }
  // A signal ends the wait, not the message, even if the message came at that moment.
  const bool is_taken = op->done && reason != Code::interrupted;
  if (op->done && !is_taken) {
    parts_.operations.note_end(lock, *op);
    parts_.operations.note_change(lock);
  }
  Outcome outcome = is_taken ? parts_.operations.take(lock, number) : Outcome{number, reason};
  waiting_.delegate(lock);
  return outcome;
}

Outcome Messages::cancel(uint64_t number) {
  if (is_forked()) return {number, Code::unknown};
  const Lock lock(lock_);
  Operation* const op = parts_.operations.find(lock, number);
  if (op == nullptr) return {number, Code::unknown};
  if (!op->done) {
    parts_.delivery.leave_message(lock, *op);
    peers_.cancel(lock, *op, Code::cancelled);
  }
  waiting_.notify(lock);
  // A thread that waits for the operation takes the outcome itself.
  return op->awaited ? Outcome{number, Code::unknown} : parts_.operations.take(lock, number);
}

std::vector<Outcome> Messages::serve() {
  // As in wait().
  if (is_forked()) return {};
  Lock lock(lock_);
  return waiting_.serve(lock);
}

// ---- beginning ----------------------------------------------------------------------------

void Messages::begin(const Lock& lock, Operation& op) {
  if (op.is_send) return peers_.begin_send(lock, op);
  if (!parts_.delivery.post(lock, op)) return;
  peers_.progress(lock, &op);
  parts_.delivery.end_if_down(lock, op);
}

// ---- wires, and ends from outside ---------------------------------------------------------

void Messages::add_wire(int rank, int channel, int fd, std::shared_ptr<TlsSession> tls) {
  const Lock lock(lock_);
  auto wire = std::make_unique<Wire>(fd, channel, std::move(tls));
  if (!waiting_.prepare_for_wires(lock) || !peers_.add_wire(lock, rank, std::move(wire))) return;
  parts_.operations.note_change(lock);  // a polling thread must poll this wire, too
  waiting_.delegate(lock);
}

void Messages::attend() {
  const Lock lock(lock_);
  waiting_.attend(lock);
}

bool Messages::peer_down(int rank, Code code) {
  const Lock lock(lock_);
  const bool is_parting = peers_.peer_down(lock, rank, code);
  if (is_parting) waiting_.delegate(lock);
  waiting_.notify(lock);
  return is_parting;
}

void Messages::fail_context(uint64_t context, int64_t after) {
  const Lock lock(lock_);
  peers_.receive_all(lock);
  parts_.ends.fail(lock, context, after);
  parts_.delivery.discard_unwanted(lock);
  peers_.end_all(lock, [&](Operation& op) {
    const bool is_its = op.envelope.context == context;
    return is_its && parts_.ends.is_failed(lock, op.envelope) ? Code::aborted : Code::ok;
  });
  waiting_.notify(lock);
}

// Sends of the context go on, because they may be a rank's last messages before it leaves.
void Messages::forget_context(uint64_t context) {
  const Lock lock(lock_);
  parts_.ends.forget(lock, context);
  parts_.delivery.discard(lock, [&](const Envelope& each) { return each.context == context; });
  peers_.end_all(lock, [&](Operation& op) {
    return !op.is_send && op.envelope.context == context ? Code::closed : Code::ok;
  });
  waiting_.notify(lock);
}

std::vector<int> Messages::close(int64_t timeout_ns) {
  if (is_forked()) return {};
  Lock lock(lock_);
  if (parts_.ends.is_closed(lock)) return {};
  if (parts_.queued_sends != 0) waiting_.wait_for(nullptr, timeout_ns, lock);
  std::vector<int> fds = peers_.close(lock);
  parts_.operations.note_change(lock);
  waiting_.notify(lock);
  parts_.inbox.close_fd();
  return fds;
}

void Messages::close_in_child() {
  peers_.close_wires_in_child();
  waiting_.close_in_child();
}

}  // namespace unisono
