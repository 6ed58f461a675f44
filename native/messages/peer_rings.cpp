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
  words.joined.store(1, std::memory_order_release);  // pairs with find_sender()
  // release: pairs with Peers::look_for_senders, which then finds the words of those it counts
  outbox_->head().joined.fetch_add(1, std::memory_order_release);
}

bool PeerRings::write(const Lock& /*lock*/, Operation& op) {
  const Envelope& envelope = op.envelope;
  Ring& ring = outbox_->ring;
  if (!op.started) {
    if (ring.room() < kFrameAlign) return false;
    if (!has_joined_) join();
    op.started = true;
    ring.write({envelope.context, envelope.tag, envelope.nbytes, envelope.info, kWhole});
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
  // Either the sleeper sees the published bytes, or this thread sees the sleeper. Pairs with the
  // fences of Waiting::sleep_until_over, serve() and delegate(). So the loads may be relaxed.
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
  // release: pairs with has_left(), behind which the last bytes are seen
  if (has_joined_) outbox_->ring.words->left.store(1, std::memory_order_release);
}

// ---- in -----------------------------------------------------------------------------------

bool PeerRings::find_sender(const Lock& /*lock*/) {
  if (is_active_) return false;
  Ring ring = parts_.inbox.ring(peer_);
  if (ring.words->joined.load(std::memory_order_acquire) == 0) return false;  // pairs with join()
  ring.load_bytes();
  ring_ = ring;
  is_active_ = true;
  return true;
}

bool PeerRings::has_left(const Lock& /*lock*/) const {
  // acquire: pairs with leave()
  return is_active_ && ring_.words->left.load(std::memory_order_acquire) != 0;
}

bool PeerRings::pull_frames(const Lock& lock) {
  size_t pulled = 0;
  while (pulled < kPullBytes && ring_.available() != 0) {
    const size_t nbytes = incoming().is_open ? read_some(lock) : open_next(lock);
    if (nbytes == 0) break;
    pulled += nbytes;
  }
  if (pulled == 0) return false;
  // Either the sender sees the room, or this rank sees the sender's request for room. Pairs with the
  // fence that follows ask_for_room()'s store. So that store and this load may be relaxed.
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
  const FrameHead head = ring_.read_head();
  const Envelope envelope{head.context, head.tag, head.nbytes, head.info};
  // The rest of an incomplete frame never comes from a rank that is gone.
  const bool is_cut_off =
    parts_.ends.down(lock, peer_) != Code::ok && head.nbytes > ring_.available();
  if (is_cut_off || !parts_.delivery.open(lock, peer_, envelope)) {
    ring_.unread(sizeof(head));
    return 0;
  }
  return sizeof(head) + read_some(lock);
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

}  // namespace unisono
