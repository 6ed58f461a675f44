#include "messages/peer_rings.hpp"

#include <algorithm>
#include <new>
#include <utility>

#include "core/futex.hpp"
#include "kernels/kernels.hpp"

namespace unisono {

namespace {

// Most bytes to take from a ring per call, because other threads of this rank may wait for the
// lock.
constexpr size_t kPullBytes = 4 * kRingBytes;

// Up to this size of a payload the arrays of both ends are in their caches. Above it two cores that
// copy through the ring are faster than one core.
constexpr uint64_t kMostLoanBytes = 4 * 1024 * 1024;

// How many bytes of a message are copied before the peer may see them.
size_t step_of(const Envelope& envelope) {
  const bool is_long = envelope.nbytes >= kLongBytes && envelope.nbytes < kStreamBytes;
  return is_long ? kLongStepBytes : kStepBytes;
}

}  // namespace

// ---- out ----------------------------------------------------------------------------------

bool PeerRings::attach(const Lock& /*lock*/) {
  if (outbox_ != nullptr) return true;
  const Address& address = parts_.address(peer_);
  if (is_unreachable_ || address.pid == 0) return false;
  std::unique_ptr<Outbox> outbox;
  try {
    outbox = std::make_unique<Outbox>();
  } catch (const std::bad_alloc&) {
    return false;  // not an exception: the caller may be in the middle of a frame
  }
  if (outbox->attach(address.pid, address.fd, address.nonce, parts_.rank, parts_.ring_bytes) != 0) {
    is_unreachable_ = true;
    return false;
  }
  outbox_ = std::move(outbox);
  return true;
}

void PeerRings::join() {
  RingWords& words = *outbox_->ring.words;
  has_joined_ = true;
  const auto nonce_at = reinterpret_cast<uintptr_t>(parts_.inbox.head().nonce);
  words.nonce_at.store(nonce_at, std::memory_order_relaxed);  // with `joined`
  words.joined.store(1, std::memory_order_release);
  outbox_->head().joined.fetch_add(1, std::memory_order_release);
}

bool PeerRings::write(const Lock& /*lock*/, Operation& op) {
  const Envelope& envelope = op.envelope;
  Ring& ring = outbox_->ring;
  if (op.on_loan && !is_loan_answered(op)) return false;
  if (!op.started) {
    if (ring.room() < kFrameAlign) return false;
    if (!has_joined_) join();
    op.on_loan = should_lend(op);
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
    const size_t left = static_cast<size_t>(envelope.nbytes) - op.moved;
    const size_t nbytes = std::min({ring.room(), left, step_of(envelope)});
    if (nbytes == 0 && left != 0) return false;
    ring.write(op.data + op.moved, nbytes);
    op.moved += nbytes;
    if (nbytes == left) ring.pad();
    ring.publish();
    if (nbytes == left) return true;
  }
}

void PeerRings::abort_frame(const Lock& lock) {
  outbox_->ring.abort_frame();
  ring_bell(lock);
}

void PeerRings::ring_bell(const Lock& /*lock*/, bool is_full) {
  Bells& bells = outbox_->head().bells;
  // Either the sleeper sees the published bytes, or this thread sees the sleeper.
  full_fence();
  if (bells.sleepers.load(std::memory_order_relaxed) != 0) change_and_wake(bells.waiters);
  const uint32_t wants = bells.server_wants.load(std::memory_order_relaxed);
  if (wants == kEverything || (is_full && wants == kFullRings)) {
    bells.server_wants.store(kNothing, std::memory_order_relaxed);
    change_and_wake(bells.server);
  }
  outbox_->ring_pipe();
}

void PeerRings::wake_waiters(const Lock& /*lock*/) const {
  if (outbox_ == nullptr) return;
  Bells& bells = outbox_->head().bells;
  if (bells.sleepers.load(std::memory_order_relaxed) != 0) futex_wake_all(bells.waiters);
}

void PeerRings::ask_for_room(const Lock& lock) {
  outbox_->ring.words->wants_room.store(1, std::memory_order_relaxed);
  ring_bell(lock, true);  // contains the fence that the push needs
}

void PeerRings::leave(const Lock& /*lock*/) const {
  if (has_joined_) outbox_->ring.words->left.store(1, std::memory_order_release);
}

// ---- in -----------------------------------------------------------------------------------

bool PeerRings::find_sender(const Lock& /*lock*/) {
  if (is_active_) return false;
  Ring ring = parts_.inbox.ring(peer_);
  if (ring.words->joined.load(std::memory_order_acquire) == 0) return false;
  ring.load_bytes();
  ring_ = ring;
  is_active_ = true;
  return true;
}

bool PeerRings::has_left(const Lock& /*lock*/) const {
  return is_active_ && ring_.words->left.load(std::memory_order_acquire) != 0;
}

bool PeerRings::pull(const Lock& lock) {
  if (!is_active_) return false;
  size_t pulled = 0;
  while (pulled < kPullBytes && ring_.available() != 0) {
    const size_t nbytes = incoming().is_open ? read_some(lock) : open_next(lock);
    if (nbytes == 0) break;
    pulled += nbytes;
  }
  if (pulled == 0) return false;
  // Either the sender sees the room, or this rank sees the sender's request for room.
  full_fence();
  std::atomic<uint32_t>& wants = ring_.words->wants_room;
  if (wants.load(std::memory_order_relaxed) != 0 && attach(lock)) {
    wants.store(0, std::memory_order_relaxed);
    ring_bell(lock);
  }
  return true;
}

// Open the next frame in the ring. 0: not possible now.
size_t PeerRings::open_next(const Lock& lock) {
  FrameHead head;
  Loan loan{};
  ring_.read(&head, sizeof(head));
  const bool is_on_loan = head.kind == kOnLoan;
  if (is_on_loan) ring_.read(&loan, sizeof(loan));
  // The rest of an incomplete frame never comes from a rank that is gone.
  const bool is_cut_off =
    parts_.ends.down(lock, peer_) != Code::ok && (is_on_loan || head.nbytes > ring_.available());
  // A revoked loan is skipped.
  if (!is_on_loan || ring_.is_lent(loan)) {
    const Envelope envelope{head.context, head.tag, head.nbytes, head.info};
    if (is_cut_off || !parts_.delivery.open(lock, peer_, envelope, is_on_loan)) {
      ring_.unread(sizeof(head) + (is_on_loan ? sizeof(loan) : 0));
      return 0;
    }
    if (!is_on_loan) return sizeof(head) + read_some(lock);
    fetch_loan(lock, loan);
  }
  ring_.pad();
  ring_.release();
  return sizeof(head) + static_cast<size_t>(head.nbytes);
}

// Take part of the frame's payload out of the ring; return how many bytes.
size_t PeerRings::read_some(const Lock& lock) {
  const Incoming& in = incoming();
  if (in.left() != 0 && ring_.before_abort(1) == 0) {
    parts_.delivery.abort(lock, peer_);
    ring_.skip(1);
    ring_.pad();
    ring_.release();
    return kFrameAlign;
  }
  const size_t nbytes =
    ring_.before_abort(std::min({ring_.available(), in.left(), step_of(in.frame)}));
  if (char* into = in.address_of(in.filled)) {
    ring_.read(into, nbytes, in.frame.nbytes >= kStreamBytes);
  } else {
    ring_.skip(nbytes);
  }
  if (nbytes == in.left()) ring_.pad();
  ring_.release();
  parts_.delivery.advance(lock, peer_, in.filled, nbytes);
  return nbytes;
}

// ---- loans --------------------------------------------------------------------------------

// Whether to lend the payload of a send. A payload that fits into the ring is not lent, because its
// sender then need not wait. The kernel's copy is faster only out of huge pages.
bool PeerRings::should_lend(const Operation& op) const {
  const uint64_t nbytes = op.envelope.nbytes;
  if (refuses_loans_ || frame_bytes(nbytes) <= parts_.ring_bytes || nbytes > kMostLoanBytes) {
    return false;
  }
  return parts_.ignores_pages || parts_.huge_pages.covers(op.data, nbytes);
}

// Whether the receiver has answered a loan. Part of the payload may then be left to send.
bool PeerRings::is_loan_answered(Operation& op) {
  const LoanState state = outbox_->ring.loan_state();
  if (state == LoanState::lent) return false;
  op.on_loan = false;
  if (state == LoanState::read) op.moved = op.envelope.nbytes;
  if (state == LoanState::refused) refuses_loans_ = true;
  return true;
}

bool PeerRings::revoke_loan(const Lock& /*lock*/, Operation& op) {
  const LoanState state = outbox_->ring.revoke();
  op.on_loan = false;
  // A receiver that has refused waits for the payload. Otherwise there is no frame to complete.
  op.started = state == LoanState::refused;
  return state != LoanState::read;
}

// Read the payload of the frame that was just opened.
void PeerRings::fetch_loan(const Lock& lock, const Loan& loan) {
  const auto nbytes = static_cast<size_t>(incoming().frame.nbytes);
  char* const into = incoming().address_of(0);
  const bool is_read = into == nullptr || read_loan(loan, into);
  const auto state = is_read ? LoanState::read : LoanState::refused;
  if (!ring_.answer(loan, state)) {
    parts_.delivery.abort(lock, peer_);  // the sender has revoked the loan
  } else if (is_read) {
    parts_.delivery.advance(lock, peer_, 0, nbytes);
  }
  // A payload that cannot be read follows in the ring. If its sender is gone, peer_down() reports
  // that.
}

bool PeerRings::read_loan(const Loan& loan, char* into) {
  const Address& address = parts_.address(peer_);
  const ProcessProof proof{address.nonce, ring_.words->nonce_at.load(std::memory_order_relaxed)};
  // Prove the process first, before any of its bytes go into the caller's memory.
  is_proved_ = is_proved_ || read_process(address.pid, &proof, nullptr, 0, 0);
  return is_proved_ && read_process(address.pid, &proof, into, loan.address,
                                    static_cast<size_t>(incoming().frame.nbytes));
}

}  // namespace unisono
