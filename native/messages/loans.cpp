// Large payloads in huge pages: their receivers read them where they lie, one copy instead of two.
//
// The sender writes an address into the ring, and nothing behind it until the receiver has answered: it
// has read the payload, or it cannot, and the payload follows in the ring. A send that is given up
// takes its loan back. Of those two words the first one counts, so whoever has read what was changed
// meanwhile finds that it was taken back.
#include "messages/messages.hpp"

namespace unisono {

namespace {

// Up to this size of a payload both ends' arrays are in their caches. Beyond, two cores that copy by way of
// the ring are faster than one.
constexpr uint64_t kMostBytes = 4 * 1024 * 1024;

}  // namespace

// Whether to lend what this operation sends. What fits into the ring is not: then its sender need not
// wait. The kernel's copy is the faster one out of huge pages only.
bool Messages::should_lend(const Peer& to, const Operation& op) {
  const uint64_t nbytes = op.envelope.nbytes;
  if (to.refuses_loans || frame_bytes(nbytes) <= ring_bytes_ || nbytes > kMostBytes) return false;
  return ignores_pages_ || huge_pages_.covers(op.data, nbytes);
}

// Whether a loan was answered; then there may be something left to send.
bool Messages::is_loan_answered(Peer& to, Operation& op) const {
  const LoanState state = to.outbox->ring.loan_state();
  if (state == LoanState::lent) return false;
  op.on_loan = false;
  if (state == LoanState::read) op.moved = op.envelope.nbytes;
  if (state == LoanState::refused) to.refuses_loans = true;
  return true;
}

// From now on nobody takes what the memory of this operation holds for its payload; false: somebody has.
bool Messages::revoke_loan(Operation& op) {
  const LoanState state = peer(op.peer).outbox->ring.revoke();
  op.on_loan = false;
  // A receiver that has refused waits for the payload; otherwise nothing is left to be sent.
  op.started = state == LoanState::refused;
  return state != LoanState::read;
}

// Read the payload of the frame that was opened just now.
void Messages::fetch_loan(Peer& from, int source, const Loan& loan) {
  const auto nbytes = static_cast<size_t>(from.frame.nbytes);
  char* const into = address_of(from, 0);
  const bool is_read = into == nullptr || read_loan(from, source, loan, into);
  const auto state = is_read ? LoanState::read : LoanState::refused;
  if (!from.ring.answer(loan, state)) {
    abort_frame(from);  // it was taken back
  } else if (is_read) {
    if (Operation* const done = advance(from, 0, nbytes)) finish(*done, Code::ok);
  }
  // What cannot be read follows; that its sender is gone, if it is, is found out as ever.
}

bool Messages::read_loan(Peer& from, int source, const Loan& loan, char* into) const {
  const Address& address = addresses_[static_cast<size_t>(source)];
  const ProcessProof proof{address.nonce,
                           from.ring.words->nonce_at.load(std::memory_order_relaxed)};
  // Not into the caller's memory before it is known whose this is.
  from.is_proved = from.is_proved || read_process(address.pid, &proof, nullptr, 0, 0);
  return from.is_proved && read_process(address.pid, &proof, into, loan.address,
                                        static_cast<size_t>(from.frame.nbytes));
}

}  // namespace unisono
