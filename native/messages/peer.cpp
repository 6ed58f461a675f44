#include "messages/peer.hpp"

#include <algorithm>
#include <new>

namespace unisono {

namespace {

// Return an operation that continues a send, with a copy of its memory.
std::unique_ptr<Operation> copy_of(const Operation& op) {
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

}  // namespace

bool Peer::find_route(const Lock& lock, uint64_t nbytes) {
  if (wires.are_requested(lock, nbytes) || rings.attach(lock)) return true;
  if (parts_.address(peer_).pid != 0 && !rings.is_unreachable(lock)) throw std::bad_alloc();
  return wires.request(lock, nbytes);
}

void Peer::send(const Lock& lock, Operation& op) {
  sends_.push_back(&op);
  ++parts_.queued_sends;
  if (sends_.size() == 1) push(lock);
}

bool Peer::try_send(const Lock& lock, const Envelope& envelope, const char* data) {
  if (!rings.is_attached(lock) || parts_.ends.down(lock, peer_) != Code::ok || has_sends(lock) ||
      !rings.has_room_for(lock, envelope)) {
    return false;
  }
  Operation op;
  op.envelope = envelope;
  op.data = const_cast<char*>(data);  // only read
  rings.write(lock, op);
  rings.ring_bell(lock);
  return true;
}

bool Peer::push(const Lock& lock) {
  bool moved = false;
  const bool has_rings = rings.is_attached(lock);
  while (!sends_.empty() && parts_.ends.down(lock, peer_) == Code::ok) {
    Operation& op = *sends_.front();
    const size_t before = op.moved;
    const bool was_started = op.started;
    const bool complete = has_rings ? rings.write(lock, op) : wires.write(lock, op, &moved);
    moved |= complete || op.moved != before || op.started != was_started;
    if (!complete) break;
    sends_.pop_front();
    --parts_.queued_sends;
    if (op.is_leftover()) {
      leftovers_.remove_if([&](const auto& left) { return left.get() == &op; });
    } else {
      parts_.operations.finish(lock, op, Code::ok);
    }
  }
  if (moved && has_rings) rings.ring_bell(lock);
  return moved;
}

void Peer::cancel(const Lock& lock, Operation& op, Code code) {
  const auto place = std::find(sends_.begin(), sends_.end(), &op);
  const bool must_go_on = op.started && parts_.ends.down(lock, peer_) == Code::ok;
  // A send that has not begun is not in the queue.
  if (!(must_go_on && continue_from_copy(lock, op, &*place)) && place != sends_.end()) {
    sends_.erase(place);
    --parts_.queued_sends;
  }
  parts_.operations.finish(lock, op, code);
}

// The receiver has the head of this send's frame: send it the rest from a copy, which replaces the
// send in the queue. False: there is no memory for the copy, and the frame was aborted.
bool Peer::continue_from_copy(const Lock& lock, const Operation& op, Operation** place) {
  try {
    leftovers_.push_back(copy_of(op));
    *place = leftovers_.back().get();
    return true;
  } catch (const std::bad_alloc&) {
    if (rings.is_attached(lock)) {
      rings.abort_frame(lock);
    } else {
      // In a wire no frame can follow an incomplete frame.
      for (const auto& wire : wires.all()) wire->abort();
    }
    return false;
  }
}

void Peer::discard_sends(const Lock& /*lock*/) {
  parts_.queued_sends -= static_cast<int>(sends_.size());
  sends_.clear();
  leftovers_.clear();
}

}  // namespace unisono
