#include "messages/peers.hpp"

#include <utility>

namespace unisono {

namespace {

// How often a ring and the wires of a rank are looked at when a context fails. A look takes up to
// 0.5 MiB from each. The limit is for ranks that send all the time.
constexpr int kMostLooks = 32;

}  // namespace

Peers::Peers(int ranks, Parts& parts) : parts_(parts) {
  peers_.reserve(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) peers_.emplace_back(rank, parts);
  active_.reserve(peers_.size());
}

// ---- progress -----------------------------------------------------------------------------

bool Peers::progress(const Lock& lock, const Operation* awaited) {
  look_for_senders(lock);
  bool moved = push_all(lock);
  for (int source : active_) moved |= (*this)[source].rings.pull(lock);
  if (!wired_.empty()) moved |= progress_wires(lock, awaited);
  return moved;
}

bool Peers::progress_wires(const Lock& lock, const Operation* awaited) {
  bool moved = false;
  for (int rank : wired_) {
    if (awaited != nullptr && awaited->peer >= 0 && awaited->peer != rank) continue;
    Peer& peer = (*this)[rank];
    moved |= peer.wires.pull(lock, awaited == nullptr);
    if (peer.has_sends(lock)) moved |= peer.push(lock);
  }
  if (parts_.ends.are_parting(lock)) end_parting(lock);
  return moved;
}

bool Peers::push_all(const Lock& lock) {
  bool moved = false;
  if (parts_.queued_sends == 0) return moved;
  for (Peer& to : peers_) {
    if (to.has_sends(lock) && to.rings.is_attached(lock)) moved |= to.push(lock);
  }
  return moved;
}

void Peers::receive_all(const Lock& lock) {
  const bool before = std::exchange(parts_.delivery.keeps_all, true);
  look_for_senders(lock);
  for (Peer& from : peers_) {
    for (int look = 0; look < kMostLooks; ++look) {
      const bool moved = from.rings.pull(lock);
      if (!(from.wires.pull(lock, true) || moved)) break;
    }
    // What came may have ended the handshake of TLS.
    if (!from.wires.all().empty() && from.has_sends(lock)) from.push(lock);
  }
  parts_.delivery.keeps_all = before;
}

void Peers::ask_for_room(const Lock& lock) {
  if (parts_.queued_sends == 0) return;
  for (Peer& to : peers_) {
    if (to.has_sends(lock) && to.rings.is_attached(lock)) to.rings.ask_for_room(lock);
  }
}

void Peers::look_for_senders(const Lock& lock) {
  const uint32_t joined =
    parts_.inbox.head().joined.load(std::memory_order_acquire);  // pairs with PeerRings::join
  if (joined == joined_seen_) return;
  joined_seen_ = joined;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    if ((*this)[rank].rings.find_sender(lock)) active_.push_back(rank);
  }
}

std::vector<int> Peers::awaited_ranks(const Lock& lock, const Operation* op) {
  if (op != nullptr && op->peer >= 0) return {op->peer};
  if (op != nullptr) return *op->among;
  std::vector<int> ranks;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    if ((*this)[rank].has_sends(lock)) ranks.push_back(rank);
  }
  return ranks;
}

bool Peers::add_wire(const Lock& lock, int rank, std::unique_ptr<Wire> wire) {
  Peer& peer = (*this)[rank];
  if (parts_.ends.is_closed(lock) || parts_.ends.down(lock, rank) != Code::ok ||
      peer.wires.has_channel(lock, wire->channel)) {
    return false;
  }
  if (peer.wires.all().empty()) wired_.push_back(rank);
  peer.wires.add(lock, std::move(wire));
  // First the read: it makes the handshake of TLS go on.
  peer.wires.pull(lock, true);
  if (peer.has_sends(lock)) peer.push(lock);
  return true;
}

void Peers::close_wires_in_child() {
  for (Peer& peer : peers_) {
    for (const auto& wire : peer.wires.all()) wire->close_fd();
  }
}

// ---- operations ---------------------------------------------------------------------------

void Peers::begin_send(const Lock& lock, Operation& op) {
  Operations& operations = parts_.operations;
  if (parts_.ends.is_closed(lock)) return operations.finish(lock, op, Code::closed);
  if (parts_.ends.is_failed(lock, op.envelope)) return operations.finish(lock, op, Code::aborted);
  if (op.peer == parts_.rank) {
    parts_.delivery.accept(lock, op.peer, op.envelope, op.data);
    return operations.finish(lock, op, Code::ok);
  }
  Peer& to = (*this)[op.peer];
  Code down = parts_.ends.down(lock, op.peer);
  if (down == Code::ok && !to.find_route(lock, op.envelope.nbytes)) down = Code::unreachable;
  if (down == Code::ok) return to.send(lock, op);
  op.source = op.peer;
  operations.finish(lock, op, down);
}

void Peers::cancel(const Lock& lock, Operation& op, Code code) {
  if (op.is_send) {
    (*this)[op.peer].cancel(lock, op, code);
  } else {
    parts_.delivery.cancel(lock, op, code);
  }
}

void Peers::end_all(const Lock& lock, const std::function<Code(Operation&)>& code_of) {
  std::vector<Operation*> candidates = parts_.delivery.receives(lock);
  for (Peer& to : peers_) {
    candidates.insert(candidates.end(), to.sends(lock).begin(), to.sends(lock).end());
  }
  for (Operation* op : candidates) {
    const Code code = op->is_leftover() ? Code::ok : code_of(*op);
    if (code != Code::ok) cancel(lock, *op, code);
  }
}

// ---- ends ---------------------------------------------------------------------------------

// End the operations that wait for a rank from which no message can come any more.
void Peers::end_peer(const Lock& lock, int rank, Code code) {
  Peer& gone = (*this)[rank];
  parts_.delivery.discard_partial(lock, rank);  // the rank will never send the rest
  // A wire with an incomplete outgoing frame stays writable, so poll() would return at once every
  // time.
  for (const auto& wire : gone.wires.all()) wire->close_fd();
  parts_.ends.set_down(lock, rank, code);
  Operation* const half_received = parts_.delivery.incoming(rank).into;
  end_all(lock, [&](Operation& op) {
    if (op.is_send) {
      op.source = rank;
      return op.peer == rank ? code : Code::ok;
    }
    if (&op == half_received) return code;
    return op.started || !op.takes_from(rank) ? Code::ok : parts_.ends.down_for(lock, op);
  });
  gone.discard_sends(lock);
}

bool Peers::peer_down(const Lock& lock, int rank, Code code) {
  look_for_senders(lock);
  parts_.ends.set_parting(lock, rank, code);
  Peer& gone = (*this)[rank];
  while (gone.rings.pull(lock)) continue;
  while (gone.wires.pull(lock, true)) continue;
  const bool is_parting = !parts_.ends.is_closed(lock) && !gone.wires.is_drained(lock);
  if (!is_parting) end_peer(lock, rank, code);
  return is_parting;
}

// End the ranks whose wires have ended, or whose last messages took too long.
void Peers::end_parting(const Lock& lock) {
  for (int rank : wired_) {
    const Code code = parts_.ends.parting(lock, rank);
    if (code == Code::ok) continue;
    if ((*this)[rank].wires.is_drained(lock) || parts_.ends.is_overdue(lock, rank)) {
      end_peer(lock, rank, code);
    }
  }
}

std::vector<int> Peers::close(const Lock& lock) {
  std::vector<int> fds;
  parts_.ends.close(lock);
  for (Peer& peer : peers_) {
    peer.rings.leave(lock);
    for (const auto& wire : peer.wires.all()) wire->hand_back(&fds);
  }
  end_all(lock, [](Operation&) { return Code::closed; });
  return fds;
}

}  // namespace unisono
