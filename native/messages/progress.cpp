// Moves bytes between rings, receives and arrivals. All functions here need the lock.
#include <algorithm>
#include <new>
#include <utility>

#include "core/futex.hpp"
#include "kernels/kernels.hpp"
#include "messages/messages.hpp"

namespace unisono {

namespace {

// Most bytes to take from a ring per call, because other threads of this rank may wait for the
// lock.
constexpr size_t kPullBytes = 4 * kRingBytes;

// How many bytes of a message are copied before the peer may see them.
size_t step_of(const Envelope& envelope) {
  const bool is_long = envelope.nbytes >= kLongBytes && envelope.nbytes < kStreamBytes;
  return is_long ? kLongStepBytes : kStepBytes;
}

}  // namespace

// Move all bytes that can be moved; return whether there were any. A look at a wire costs a system
// call: if `awaited` depends on one rank, the wires of other ranks are skipped.
bool Messages::progress(const Operation* awaited) {
  look_for_senders();
  bool moved = push_all();
  for (int source : active_) moved |= pull(source);
  if (!wired_.empty()) moved |= progress_wires(awaited);
  return moved;
}

// Continue the sends that go through rings.
bool Messages::push_all() {
  bool moved = false;
  if (queued_sends_ == 0) return moved;
  for (Peer& to : peers_) {
    if (!to.sends.empty() && to.outbox != nullptr) moved |= push(to);
  }
  return moved;
}

// Open a rank's inbox, once. False: it cannot be opened, or there is no memory for it now.
bool Messages::attach(int rank) {
  Peer& to = peer(rank);
  if (to.outbox != nullptr) return true;
  const Address& address = addresses_[static_cast<size_t>(rank)];
  if (to.unreachable || address.pid == 0) return false;
  std::unique_ptr<Outbox> outbox;
  try {
    outbox = std::make_unique<Outbox>();
  } catch (const std::bad_alloc&) {
    return false;  // not an exception: the caller may be in the middle of a frame
  }
  if (outbox->attach(address.pid, address.fd, address.nonce, rank_, ring_bytes_) != 0) {
    to.unreachable = true;
    return false;
  }
  to.outbox = std::move(outbox);
  return true;
}

void Messages::look_for_senders() {
  const uint32_t joined =
    inbox_.head().joined.load(std::memory_order_acquire);  // release: push_some
  if (joined == joined_seen_) return;
  joined_seen_ = joined;
  for (int source = 0; source < ranks_; ++source) {
    Peer& from = peer(source);
    if (from.active) continue;
    Ring ring = inbox_.ring(source);
    if (ring.words->joined.load(std::memory_order_acquire) == 0) continue;
    ring.load_bytes();
    from.ring = ring;
    from.active = true;
    active_.push_back(source);
  }
}

bool Messages::pull(int source) {
  Peer& from = peer(source);
  size_t pulled = 0;
  while (pulled < kPullBytes && from.ring.available() != 0) {
    const size_t nbytes = from.in_frame ? read_some(from) : open_next(from, source);
    if (nbytes == 0) break;
    pulled += nbytes;
  }
  if (pulled == 0) return false;
  // Either the sender sees the room, or this rank sees the sender's request for room.
  full_fence();
  std::atomic<uint32_t>& wants = from.ring.words->wants_room;
  if (wants.load(std::memory_order_relaxed) != 0 && attach(source)) {
    wants.store(0, std::memory_order_relaxed);
    ring_bell(*from.outbox, false);
  }
  return true;
}

// Open the next frame in the ring. 0: not possible now.
size_t Messages::open_next(Peer& from, int source) {
  FrameHead head;
  Loan loan{};
  from.ring.read(&head, sizeof(head));
  if (head.kind == kOnLoan) from.ring.read(&loan, sizeof(loan));
  // The rest of an incomplete frame never comes from a rank that is gone.
  const bool is_cut_off =
    from.down != Code::ok && (head.kind == kOnLoan || head.nbytes > from.ring.available());
  // A revoked loan is skipped.
  if (head.kind != kOnLoan || from.ring.is_lent(loan)) {
    if (is_cut_off || !open_frame(from, source, head)) {
      from.ring.unread(sizeof(head) + (head.kind == kOnLoan ? sizeof(loan) : 0));
      return 0;
    }
    if (head.kind != kOnLoan) return sizeof(head) + read_some(from);
    fetch_loan(from, source, loan);
  }
  from.ring.pad();
  from.ring.release();
  return sizeof(head) + static_cast<size_t>(head.nbytes);
}

// Take part of the frame's payload out of the ring; return how many bytes.
size_t Messages::read_some(Peer& from) {
  const size_t left = static_cast<size_t>(from.frame.nbytes) - from.filled;
  if (left != 0 && from.ring.before_abort(1) == 0) {
    abort_frame(from);
    from.ring.skip(1);
    from.ring.pad();
    from.ring.release();
    return kFrameAlign;
  }
  const size_t nbytes =
    from.ring.before_abort(std::min({from.ring.available(), left, step_of(from.frame)}));
  if (char* into = address_of(from, from.filled)) {
    from.ring.read(into, nbytes, from.frame.nbytes >= kStreamBytes);
  } else {
    from.ring.skip(nbytes);
  }
  Operation* const done = advance(from, from.filled, nbytes);
  if (!from.in_frame) from.ring.pad();
  from.ring.release();
  if (done != nullptr) finish(*done, Code::ok);
  return nbytes;
}

// The sender has aborted the incoming frame: there is no such message.
void Messages::abort_frame(Peer& from) {
  discard_partial(from);
  from.in_frame = false;
  Operation* const op = std::exchange(from.into, nullptr);
  if (op == nullptr) return;
  op->started = false;
  op->source = -1;
  post_recv(*op);
}

// Find the destination of the frame with this head. False: there is none now.
bool Messages::open_frame(Peer& from, int source, const FrameHead& head) {
  const Envelope envelope{head.context, head.tag, head.nbytes, head.info};
  Operation* op = matching_.take_posted(source, envelope);
  if (op != nullptr) {
    if (op->accept(source, envelope)) {
      from.into = op;
      op->started = true;
    } else {
      finish(*op, Code::mismatch);
    }
  } else if (!is_unwanted(envelope)) {
    end_probes(source, envelope);
    if (may_keep(from, head) || matching_.has_receive_from(source)) {
      from.kept = matching_.keep(source, envelope);
    }
    if (from.kept == nullptr) return false;
  }
  from.frame = envelope;
  from.filled = 0;
  from.in_frame = true;
  return true;
}

// End the probes that wait for a message that no receive takes.
void Messages::end_probes(int source, const Envelope& envelope) {
  while (Operation* const probe = matching_.take_posted(source, envelope, true)) {
    probe->accept(source, envelope);
    finish(*probe, Code::ok);
  }
}

// Whether to keep a message without a receive, so that the messages behind it can be received.
bool Messages::may_keep(const Peer& from, const FrameHead& head) const {
  if (!matching_.has_room(head.nbytes)) return false;
  if (takes_all_ || from.departure != Code::ok) return true;
  // A program posts the receive soon, and a second copy costs more than the wait of the sender.
  if (is_of_program(head.tag) && head.nbytes > kEagerBytes) return false;
  // The same holds for a loan that has just come, as long as this rank is awake.
  return head.kind != kOnLoan || takes_loans_ || waiters_ == 0;
}

// The destination of the frame's bytes from `at` on; nullptr: they are discarded.
char* Messages::address_of(const Peer& from, size_t at) const {
  if (from.into != nullptr) return from.into->data + at;
  return from.kept != nullptr ? from.kept->data.get() + at : nullptr;
}

// Record that `nbytes` more bytes of the frame have come. The last bytes end the frame; its receive
// is then returned, and the caller must finish it.
Operation* Messages::advance(Peer& from, size_t at, size_t nbytes) {
  from.filled += nbytes;
  if (from.kept != nullptr) from.kept->filled = std::max(from.kept->filled, at + nbytes);
  if (from.filled != from.frame.nbytes) return nullptr;
  Operation* const op = from.into;
  from.in_frame = false;
  from.into = nullptr;
  from.kept = nullptr;
  return op;
}

bool Messages::push(Peer& to) {
  bool moved = false;
  while (!to.sends.empty() && to.down == Code::ok) {
    Operation& op = *to.sends.front();
    const size_t before = op.moved;
    const bool was_started = op.started;
    const bool complete = to.outbox == nullptr ? push_wires(to, op, &moved) : push_some(to, op);
    moved |= complete || op.moved != before || op.started != was_started;
    if (!complete) break;
    to.sends.pop_front();
    --queued_sends_;
    if (op.is_leftover()) {
      leftovers_.remove_if([&](const auto& left) { return left.get() == &op; });
    } else {
      finish(op, Code::ok);
    }
  }
  if (moved && to.outbox != nullptr) ring_bell(*to.outbox, false);
  return moved;
}

// Write as much as the ring has room for; return whether the frame is complete.
bool Messages::push_some(Peer& to, Operation& op) {
  const Envelope& envelope = op.envelope;
  Ring& ring = to.outbox->ring;
  if (op.on_loan && !is_loan_answered(to, op)) return false;
  if (!op.started) {
    if (ring.room() < kFrameAlign) return false;
    if (!to.joined) {
      to.joined = true;
      const auto nonce_at = reinterpret_cast<uintptr_t>(inbox_.head().nonce);
      ring.words->nonce_at.store(nonce_at, std::memory_order_relaxed);  // with `joined`
      ring.words->joined.store(1, std::memory_order_release);
      to.outbox->head().joined.fetch_add(1, std::memory_order_release);
    }
    op.on_loan = should_lend(to, op);
    op.started = true;
    const FrameKind kind = op.on_loan ? kOnLoan : kWhole;
    const FrameHead head{envelope.context, envelope.tag, envelope.nbytes, envelope.info, kind};
    if (op.on_loan) {
      ring.lend(head, op.data);
      return false;
    }
    ring.write(&head, sizeof(head));
  }
  while (true) {
    const size_t left = static_cast<size_t>(op.envelope.nbytes) - op.moved;
    const size_t nbytes = std::min({ring.room(), left, step_of(envelope)});
    if (nbytes == 0 && left != 0) return false;
    ring.write(op.data + op.moved, nbytes);
    op.moved += nbytes;
    if (nbytes == left) ring.pad();
    ring.publish();
    if (nbytes == left) return true;
  }
}

// Wake the threads of the peer that sleep for the bytes just written or read. `ring_is_full`: wake
// also a server thread without open operations, so that it reads.
void Messages::ring_bell(Outbox& outbox, bool ring_is_full) {
  Bells& bells = outbox.head().bells;
  // Either the sleeper sees the published bytes, or this thread sees the sleeper.
  full_fence();
  if (bells.sleepers.load(std::memory_order_relaxed) != 0) change_and_wake(bells.waiters);
  const uint32_t wants = bells.server_wants.load(std::memory_order_relaxed);
  if (wants == kEverything || (ring_is_full && wants == kFullRings)) {
    bells.server_wants.store(kNothing, std::memory_order_relaxed);
    change_and_wake(bells.server);
  }
  outbox.ring_pipe();
}

// Request a bell when there is room again. The caller must push afterwards, or it could miss room
// that was made just before.
void Messages::ask_for_room() {
  if (queued_sends_ == 0) return;
  for (Peer& to : peers_) {
    if (to.sends.empty() || to.outbox == nullptr) continue;
    to.outbox->ring.words->wants_room.store(1, std::memory_order_relaxed);
    ring_bell(*to.outbox, true);  // contains the fence that the push needs
  }
}

// Accept a whole message that did not come through a ring or wire.
void Messages::accept_message(int source, const Envelope& envelope, const char* data) {
  Operation* op = matching_.take_posted(source, envelope);
  if (op != nullptr) {
    const bool fits = op->accept(source, envelope);
    if (fits) copy_bytes(op->data, data, envelope.nbytes);
    finish(*op, fits ? Code::ok : Code::mismatch);
  } else if (!is_unwanted(envelope) && !closed_) {
    Arrival* kept = matching_.keep(source, envelope);
    if (kept == nullptr) throw std::bad_alloc();
    copy_bytes(kept->data.get(), data, envelope.nbytes);
    kept->filled = envelope.nbytes;
    end_probes(source, envelope);
  }
}

}  // namespace unisono
