#include "messages/peer_wires.hpp"

#include <algorithm>
#include <utility>

namespace unisono {

namespace {

// Most bytes to take from a wire per call, because other threads of this rank may wait for the
// lock.
constexpr size_t kPullBytes = 1024 * 1024;

// From this size on a message goes over all wires to its rank. Each wire takes an equal part, but
// at most kPartBytes, and then the next part. So a slow wire gets fewer parts.
constexpr uint64_t kMultipartBytes = 512 * 1024;
constexpr size_t kPartBytes = 512 * 1024;

}  // namespace

int PeerWires::channels_for(uint64_t nbytes) const {
  return nbytes < kMultipartBytes ? 1 : std::max(parts_.address(peer_).channels, 1);
}

bool PeerWires::are_requested(const Lock& /*lock*/, uint64_t nbytes) const {
  return requested_ >= channels_for(nbytes);
}

bool PeerWires::request(const Lock& /*lock*/, uint64_t nbytes) {
  if (parts_.address(peer_).channels == 0) return false;
  for (; requested_ < channels_for(nbytes); ++requested_) {
    parts_.wire_events.push_back({peer_, requested_, 0});
  }
  return true;
}

bool PeerWires::has_channel(const Lock& /*lock*/, int channel) const {
  return std::any_of(wires_.begin(), wires_.end(),
                     [&](const auto& each) { return each->channel == channel; });
}

void PeerWires::add(const Lock& /*lock*/, std::unique_ptr<Wire> wire) {
  if (wire->channel == requested_) ++requested_;  // no request is needed
  wires_.insert(wire->channel == 0 ? wires_.begin() : wires_.end(), std::move(wire));
}

bool PeerWires::write(const Lock& /*lock*/, Operation& op, bool* moved) {
  if (first() == nullptr) return false;
  const Envelope& envelope = op.envelope;
  const auto nbytes = static_cast<size_t>(envelope.nbytes);
  const auto channels = static_cast<size_t>(channels_for(nbytes));
  if (!op.started) {
    op.started = true;
    op.in_parts = channels > 1;
    if (op.in_parts) ++multipart_out_;
    op.moved = op.in_parts ? 0 : nbytes;
    const FrameKind kind = op.in_parts ? kInParts : kWhole;
    first()->begin({envelope.context, envelope.tag, envelope.nbytes, envelope.info, kind},
                   {0, op.moved});
  }
  const size_t share = std::min((nbytes + channels - 1) / channels, kPartBytes);
  bool are_idle = true;
  for (bool more = true; more;) {
    more = false;
    are_idle = true;
    for (const auto& wire : wires_) {
      if (wire->is_idle() && op.moved != nbytes) {
        const size_t end = std::min(op.moved + share, nbytes);
        wire->begin({multipart_out_, static_cast<int64_t>(op.moved), end - op.moved, 0, kPart},
                    {op.moved, end});
        op.moved = end;
      }
      const bool is_idle = wire->write(op.data, op.more, moved);
      are_idle &= is_idle;
      more |= is_idle && op.moved != nbytes;
    }
  }
  return are_idle && op.moved == nbytes;
}

bool PeerWires::pull(const Lock& lock, bool all) {
  // The rest of the frames of a rank that is down never comes.
  if (parts_.ends.down(lock, peer_) != Code::ok) return false;
  bool moved = false;
  bool again = true;
  for (bool is_first = true; again; is_first = false) {
    again = false;
    for (const auto& wire : wires_) {
      const bool may_have =
        all || wire->channel == 0 || (comes_in_parts_ && parts_.delivery.incoming(peer_).is_open);
      // Data of one wire may be what another wire was blocked for.
      if (is_first ? may_have : wire->is_blocked) again |= pull_wire(lock, *wire);
    }
    moved |= again;
  }
  return moved;
}

bool PeerWires::pull_wire(const Lock& lock, Wire& wire) {
  const bool had_ended = wire.has_ended();
  size_t pulled = 0;
  bool more = true;
  while (more && pulled < kPullBytes) {
    if (wire.in.left() == 0) {
      const FrameHead* head = wire.next_head();
      wire.is_blocked = head != nullptr && !open_part(lock, wire, *head);
      if (head == nullptr || wire.is_blocked) break;
      wire.take_head();
      pulled += sizeof(FrameHead);
    }
    const size_t at = wire.in.at;
    const size_t nbytes = wire.read(parts_.delivery.incoming(peer_).address_of(at), wire.in.left());
    pulled += nbytes;
    wire.in.at += nbytes;
    parts_.delivery.advance(lock, peer_, at, nbytes);
    // Another system call would most likely find no data.
    more = wire.in.left() != 0 ? nbytes != 0 : wire.has_buffered();
  }
  if (wire.has_ended() && !had_ended) {
    parts_.wire_events.push_back({peer_, wire.channel, wire.is_damaged ? 2 : 1});
  }
  return pulled != 0;
}

// Find the destination of a part. False: not possible now. The frames of a rank are opened in
// order, each after the previous frame is complete, so parts may have to wait.
bool PeerWires::open_part(const Lock& lock, Wire& wire, const FrameHead& head) {
  const Incoming& in = parts_.delivery.incoming(peer_);
  if (head.kind != kPart && wire.channel == 0) {
    const Envelope envelope{head.context, head.tag, head.nbytes, head.info};
    if (in.is_open || !parts_.delivery.open(lock, peer_, envelope)) return false;
    comes_in_parts_ = head.kind == kInParts;
    if (comes_in_parts_) ++multipart_in_;
    wire.in = {0, comes_in_parts_ ? 0 : static_cast<size_t>(head.nbytes)};
    return true;
  }
  if (!in.is_open || !comes_in_parts_ || head.context != multipart_in_) {
    if (head.kind == kPart && head.context > multipart_in_) return false;
  } else if (const auto at = static_cast<uint64_t>(head.tag);
             at <= in.frame.nbytes && head.nbytes <= in.frame.nbytes - at) {
    wire.in = {static_cast<size_t>(at), static_cast<size_t>(at + head.nbytes)};
    return true;
  }
  wire.close_fd();  // the head is invalid
  return false;
}

// A blocked wire waits for a frame that the first wire opens, which cannot happen after the first
// wire has ended.
bool PeerWires::is_drained(const Lock& /*lock*/) const {
  const bool opens = first() != nullptr && !first()->has_ended();
  return std::all_of(wires_.begin(), wires_.end(), [&](const auto& wire) {
    return wire->has_ended() || (wire->is_blocked && !opens);
  });
}

}  // namespace unisono
