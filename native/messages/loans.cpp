// Loans: the receiver reads a large payload in huge pages from the sender's memory. One copy
// instead of two.
//
// The sender writes an address into the ring, and no further frame until the receiver has answered.
// The receiver has read the payload, or it cannot: the payload then follows in the ring. A send
// that is cancelled revokes its loan. Sender and receiver race by compare-and-swap on one word. If
// the sender revokes first, the receiver discards what it read.
#include "messages/messages.hpp"

namespace unisono {

namespace {

// Up to this size of a payload the arrays of both ends are in their caches. Above it two cores that
// copy through the ring are faster than one core.
constexpr uint64_t kMostBytes = 4 * 1024 * 1024;

}  // namespace

// Whether to lend the payload of a send. A payload that fits into the ring is not lent, because its
// sender then need not wait. The kernel's copy is faster only out of huge pages.
bool Messages::should_lend(const Peer& to, const Operation& op) {
  const uint64_t nbytes = op.envelope.nbytes;
  if (to.refuses_loans || frame_bytes(nbytes) <= ring_bytes_ || nbytes > kMostBytes) return false;
  return ignores_pages_ || huge_pages_.covers(op.data, nbytes);
}

// Whether the receiver has answered a loan. Part of the payload may then be left to send.
bool Messages::is_loan_answered(Peer& to, Operation& op) const {
  const LoanState state = to.outbox->ring.loan_state();
  if (state == LoanState::lent) return false;
  op.on_loan = false;
  if (state == LoanState::read) op.moved = op.envelope.nbytes;
  if (state == LoanState::refused) to.refuses_loans = true;
  return true;
}

// Revoke a loan: the receiver does not use the memory of this send any more. False: the receiver
// has read it.
bool Messages::revoke_loan(Operation& op) {
  const LoanState state = peer(op.peer).outbox->ring.revoke();
  op.on_loan = false;
  // A receiver that has refused waits for the payload. Otherwise there is no frame to complete.
  op.started = state == LoanState::refused;
  return state != LoanState::read;
}

// Read the payload of the frame that was just opened.
void Messages::fetch_loan(Peer& from, int source, const Loan& loan) {
  const auto nbytes = static_cast<size_t>(from.frame.nbytes);
  char* const into = address_of(from, 0);
  const bool is_read = into == nullptr || read_loan(from, source, loan, into);
  const auto state = is_read ? LoanState::read : LoanState::refused;
  if (!from.ring.answer(loan, state)) {
    abort_frame(from);  // the sender has revoked the loan
  } else if (is_read) {
    if (Operation* const done = advance(from, 0, nbytes)) finish(*done, Code::ok);
  }
  // A payload that cannot be read follows in the ring. If its sender is gone, peer_down() reports
  // that.
}

bool Messages::read_loan(Peer& from, int source, const Loan& loan, char* into) const {
  const Address& address = addresses_[static_cast<size_t>(source)];
  const ProcessProof proof{address.nonce,
                           from.ring.words->nonce_at.load(std::memory_order_relaxed)};
  // Prove the process first, before any of its bytes go into the caller's memory.
  from.is_proved = from.is_proved || read_process(address.pid, &proof, nullptr, 0, 0);
  return from.is_proved && read_process(address.pid, &proof, into, loan.address,
                                        static_cast<size_t>(from.frame.nbytes));
}

}  // namespace unisono
