// Messages over wires: moving bytes, and sleeping until a wire is ready.
#include <algorithm>
#include <new>
#include <utility>

#include "core/clock.hpp"
#include "core/futex.hpp"
#include "messages/messages.hpp"

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

// Open a rank's inbox, or request, once each, the wires that a message of this size can use.
bool Messages::find_route(int rank, uint64_t nbytes) {
  Peer& to = peer(rank);
  const Address& address = addresses_[static_cast<size_t>(rank)];
  const int channels = address.channels;
  const int wanted = nbytes < kMultipartBytes ? 1 : std::max(channels, 1);
  if (to.asked_wires >= wanted || attach(rank)) return true;
  if (address.pid != 0 && !to.unreachable) throw std::bad_alloc();
  if (channels == 0) return false;
  for (; to.asked_wires < wanted; ++to.asked_wires) {
    wire_events_.push_back({rank, to.asked_wires, false});
  }
  return true;
}

void Messages::add_wire(int rank, int channel, int fd) {
  const Lock lock(lock_);
  Peer& other = peer(rank);
  auto& wires = other.wires;
  auto wire = std::make_unique<Wire>(fd, channel);
  const bool is_there = std::any_of(wires.begin(), wires.end(),
                                    [&](const auto& each) { return each->channel == channel; });
  if (closed_ || is_there || other.down != Code::ok || bell_.make() != 0) return;
  bells().pipe.store(bell_.fd(), std::memory_order_relaxed);
  if (wires.empty()) wired_.push_back(rank);
  if (channel == other.asked_wires) ++other.asked_wires;  // no request is needed
  wires.insert(channel == 0 ? wires.begin() : wires.end(), std::move(wire));
  if (!other.sends.empty()) push(other);
  pull_wires(rank, true);
  anything_ended_ = true;  // a polling thread must poll this wire, too
  notify_ended();
  delegate_to_server();
}

void Messages::attend() {
  const Lock lock(lock_);
  attends_ = true;
  delegate_to_server();
}

void Messages::close_in_child() {
  for (Peer& other : peers_) {
    for (const auto& wire : other.wires) wire->close_fd();
  }
  bell_.close_fds();
}

// ---- moving bytes -------------------------------------------------------------------------

bool Messages::progress_wires(const Operation* awaited) {
  bool moved = false;
  for (int rank : wired_) {
    if (awaited != nullptr && awaited->peer >= 0 && awaited->peer != rank) continue;
    moved |= pull_wires(rank, awaited == nullptr);
    if (!peer(rank).sends.empty()) moved |= push(peer(rank));
  }
  if (departing_ != 0) end_departures();
  return moved;
}

// Receive the data of a rank. Unless `all`, the wires for parts are skipped while no parts are
// expected.
bool Messages::pull_wires(int source, bool all) {
  Peer& from = peer(source);
  if (from.down != Code::ok) return false;  // the rest of these frames never comes
  bool moved = false;
  bool again = true;
  for (bool is_first = true; again; is_first = false) {
    again = false;
    for (const auto& wire : from.wires) {
      const bool may_have = all || wire->channel == 0 || (from.in_frame && from.in_parts);
      // Data of one wire may be what another wire was blocked for.
      if (is_first ? may_have : wire->is_blocked) again |= pull_wire(source, *wire);
    }
    moved |= again;
  }
  return moved;
}

bool Messages::pull_wire(int source, Wire& wire) {
  Peer& from = peer(source);
  const bool had_ended = wire.has_ended();
  size_t pulled = 0;
  bool more = true;
  while (more && pulled < kPullBytes) {
    if (wire.in.left() == 0) {
      const FrameHead* head = wire.next_head();
      wire.is_blocked = head != nullptr && !open_part(from, source, wire, *head);
      if (head == nullptr || wire.is_blocked) break;
      wire.take_head();
      pulled += sizeof(FrameHead);
    }
    const size_t at = wire.in.at;
    const size_t nbytes = wire.read(address_of(from, at), wire.in.left());
    pulled += nbytes;
    wire.in.at += nbytes;
    if (Operation* const done = advance(from, at, nbytes)) finish(*done, Code::ok);
    // Another system call would most likely find no data.
    more = wire.in.left() != 0 ? nbytes != 0 : wire.has_buffered();
  }
  if (wire.has_ended() && !had_ended) wire_events_.push_back({source, wire.channel, true});
  return pulled != 0;
}

// Find the destination of a part. False: not possible now. The frames of a rank are opened in
// order, each after the previous frame is complete, so parts may have to wait.
bool Messages::open_part(Peer& from, int source, Wire& wire, const FrameHead& head) {
  if (head.kind != kPart && wire.channel == 0) {
    if (from.in_frame || !open_frame(from, source, head)) return false;
    from.in_parts = head.kind == kInParts;
    if (from.in_parts) ++from.multipart_in;
    wire.in = {0, from.in_parts ? 0 : static_cast<size_t>(head.nbytes)};
    return true;
  }
  if (!from.in_frame || !from.in_parts || head.context != from.multipart_in) {
    if (head.kind == kPart && head.context > from.multipart_in) return false;
  } else if (const auto at = static_cast<uint64_t>(head.tag);
             at <= from.frame.nbytes && head.nbytes <= from.frame.nbytes - at) {
    wire.in = {static_cast<size_t>(at), static_cast<size_t>(at + head.nbytes)};
    return true;
  }
  wire.close_fd();  // the head is invalid
  return false;
}

// Pass as much to the wires as they take; return whether the frame is complete. `moved`: set if a
// wire took bytes.
bool Messages::push_wires(Peer& to, Operation& op, bool* moved) {
  Wire* const first = to.first_wire();
  if (first == nullptr) return false;
  const Envelope& envelope = op.envelope;
  const auto nbytes = static_cast<size_t>(envelope.nbytes);
  const auto channels =
    static_cast<size_t>(std::max(addresses_[static_cast<size_t>(op.peer)].channels, 1));
  if (!op.started) {
    op.started = true;
    op.in_parts = channels > 1 && nbytes >= kMultipartBytes;
    if (op.in_parts) ++to.multipart_out;
    op.moved = op.in_parts ? 0 : nbytes;
    const FrameKind kind = op.in_parts ? kInParts : kWhole;
    first->begin({envelope.context, envelope.tag, envelope.nbytes, envelope.info, kind},
                 {0, op.moved});
  }
  const size_t share = std::min((nbytes + channels - 1) / channels, kPartBytes);
  bool are_idle = true;
  for (bool more = true; more;) {
    more = false;
    are_idle = true;
    for (const auto& wire : to.wires) {
      if (wire->is_idle() && op.moved != nbytes) {
        const size_t end = std::min(op.moved + share, nbytes);
        wire->begin({to.multipart_out, static_cast<int64_t>(op.moved), end - op.moved, 0, kPart},
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

// ---- sleeping -----------------------------------------------------------------------------

// Report to Python which wires are needed and which have ended.
void Messages::report_wires(Lock& lock) {
  if (wire_events_.empty() || !wire_) return;
  const auto news = std::move(wire_events_);
  wire_events_.clear();
  lock.unlock();
  for (const auto& [rank, channel, ended] : news) wire_(rank, channel, ended);
  lock.lock();
}

// Become the thread that sleeps on wires. False: there is such a thread, or there are no wires.
bool Messages::begin_polling() {
  if (polling_ || wired_.empty()) return false;
  polling_ = true;
  return true;
}

void Messages::end_polling() {
  polling_ = false;
  bells().polls.store(0, std::memory_order_relaxed);
  bell_.drain();
  // One of the sleeping threads takes over.
  if (bells().sleepers.load(std::memory_order_seq_cst) != 0) change_and_wake(bells().waiters);
}

void Messages::watch_wires() {
  poll_set_.clear();
  poll_set_.push_back({bell_.fd(), POLLIN, 0});
  has_unread_ = false;
  for (int rank : wired_) {
    for (const auto& wire : peer(rank).wires) {
      wire->watched = wire->wanted_events();
      wire->wake_for(std::max<size_t>(wire->in.left(), 1));
      if (wire->watched != 0) poll_set_.push_back({wire->fd(), wire->watched, 0});
      has_unread_ |= wire->has_unread();
    }
  }
}

// Sleep until a wire is readable or writable, or the bell rings.
void Messages::poll_wires(int64_t limit_ns) {
  if (has_unread_) limit_ns = 0;
  const timespec limit{limit_ns / 1'000'000'000, limit_ns % 1'000'000'000};
  ppoll(poll_set_.data(), poll_set_.size(), &limit, nullptr);
  if (poll_set_[0].revents != 0) bell_.drain();
}

// Wake the thread that sleeps on wires if it sleeps on the wrong events.
void Messages::repoll() {
  if (!polling_) return;
  for (int rank : wired_) {
    for (const auto& wire : peer(rank).wires) {
      const bool wants = (wire->wanted_events() & ~wire->watched) != 0;
      if (wants || wire->has_unread()) return bell_.ring();
    }
  }
}

}  // namespace unisono
