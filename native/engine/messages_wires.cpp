// Messages over wires: moving bytes, the end of a wire, and sleeping until one has something.
#include <algorithm>
#include <utility>

#include "clock.hpp"
#include "futex.hpp"
#include "messages.hpp"

namespace unisono {

namespace {

// How much one call takes from one wire: others on this rank may be waiting for the lock.
constexpr size_t kPullBytes = 1024 * 1024;

// How long what a rank sent may be on its way after Python knows that it is gone. Of a rank that
// has left, everything comes unless the network loses it again and again; of one that was lost,
// nobody needs to have it all.
constexpr int64_t kLeftNs = 5'000'000'000;
constexpr int64_t kLostNs = 300'000'000;

}  // namespace

// Open a rank's inbox, or ask for a wire to it, once.
bool Messages::find_way(int rank) {
  Peer& to = peer(rank);
  if (to.wire != nullptr || to.wants_wire || attach(rank)) return true;
  if (!addresses_[static_cast<size_t>(rank)].has_wires) return false;
  to.wants_wire = true;
  wire_news_.emplace_back(rank, false);
  return true;
}

void Messages::add_wire(int rank, int fd) {
  const Lock lock(lock_);
  Peer& other = peer(rank);
  auto wire = std::make_unique<Wire>(fd);
  if (closed_ || other.wire != nullptr || other.down != Code::ok || bell_.make() != 0) return;
  bells().pipe.store(bell_.fd(), std::memory_order_relaxed);
  other.wire = std::move(wire);
  wired_.push_back(rank);
  if (!other.sends.empty()) push(other);
  pull_wire(rank);
  anything_ended_ = true;  // who sleeps has to look at this one, too
  settle();
  hand_over();
}

void Messages::attend() {
  const Lock lock(lock_);
  attends_ = true;
  hand_over();
}

void Messages::close_in_child() {
  for (Peer& other : peers_) {
    if (other.wire != nullptr) other.wire->close_fd();
  }
  bell_.close_fds();
}

// ---- moving bytes -------------------------------------------------------------------------

bool Messages::progress_wires(const Op* awaited) {
  bool moved = false;
  for (int rank : wired_) {
    if (awaited != nullptr && awaited->peer >= 0 && awaited->peer != rank) continue;
    moved |= pull_wire(rank);
    if (!peer(rank).sends.empty()) moved |= push(peer(rank));
  }
  if (parting_ != 0) end_partings();
  return moved;
}

bool Messages::pull_wire(int source) {
  Peer& from = peer(source);
  Wire& wire = *from.wire;
  const bool had_ended = wire.has_ended();
  size_t pulled = 0;
  bool more = true;
  while (more && pulled < kPullBytes) {
    if (!from.in_frame) {
      const FrameHead* head = wire.next_head();
      wire.is_blocked = head != nullptr && !open_frame(from, source, *head);
      if (head == nullptr || wire.is_blocked) break;
      wire.take_head();
      pulled += sizeof(FrameHead);
    }
    const size_t left = static_cast<size_t>(from.frame.nbytes) - from.filled;
    const size_t nbytes = wire.read(place(from), left);
    pulled += nbytes;
    if (Op* const done = advance(from, nbytes)) finish(*done, Code::ok);
    // Another system call would find nothing, most likely.
    more = from.in_frame ? nbytes != 0 : wire.has_buffered();
  }
  if (wire.has_ended() && !had_ended) wire_news_.emplace_back(source, true);
  return pulled != 0;
}

// ---- the end of a rank --------------------------------------------------------------------

bool Messages::peer_down(int rank, Code code) {
  const Lock lock(lock_);
  Peer& gone = peer(rank);
  look_for_senders();
  const Code known = std::exchange(gone.parting, code);
  // What it has sent is there to be received.
  while (gone.active && pull(rank)) continue;
  while (gone.wire != nullptr && pull_wire(rank)) continue;
  if (closed_ || gone.wire == nullptr || gone.wire->has_ended()) {
    gone.parting = known;
    end_peer(rank, code);
    return false;
  }
  if (known == Code::ok) ++parting_;
  gone.parting_ends_ns = now_ns() + (code == Code::left ? kLeftNs : kLostNs);
  settle();
  hand_over();
  return true;
}

// Give up the ranks whose wires have ended, or whose last messages are too late.
void Messages::end_partings() {
  for (int rank : wired_) {
    Peer& gone = peer(rank);
    if (gone.parting == Code::ok) continue;
    if (!gone.wire->has_ended() && now_ns() < gone.parting_ends_ns) continue;
    const Code code = gone.parting;
    gone.parting = Code::ok;
    --parting_;
    end_peer(rank, code);
  }
}

// ---- sleeping -----------------------------------------------------------------------------

// Tell Python which wires are needed, and which have ended.
void Messages::tell_of_wires(Lock& lock) {
  if (wire_news_.empty() || !wire_) return;
  const auto news = std::move(wire_news_);
  wire_news_.clear();
  lock.unlock();
  for (const auto& [rank, ended] : news) wire_(rank, ended);
  lock.lock();
}

// Become the thread that sleeps on wires; false: there is one, or there are no wires.
bool Messages::begin_polling() {
  if (polling_ || wired_.empty()) return false;
  polling_ = true;
  return true;
}

void Messages::end_polling() {
  polling_ = false;
  bells().polls.store(0, std::memory_order_relaxed);
  bell_.drain();
  // One of those who sleep takes over.
  if (bells().sleepers.load(std::memory_order_seq_cst) != 0) change_and_wake(bells().waiters);
}

short Messages::wanted_events(Peer& other) const {
  if (other.wire->has_ended()) return 0;
  const int in = other.wire->is_blocked ? 0 : POLLIN;
  return static_cast<short>(in | (other.sends.empty() ? 0 : POLLOUT));
}

void Messages::watch_wires() {
  poll_set_.clear();
  poll_set_.push_back({bell_.fd(), POLLIN, 0});
  for (int rank : wired_) {
    const Peer& from = peer(rank);
    Wire& wire = *from.wire;
    wire.watched = wanted_events(peer(rank));
    wire.wake_for(from.in_frame ? static_cast<size_t>(from.frame.nbytes) - from.filled : 1);
    if (wire.watched != 0) poll_set_.push_back({wire.fd(), wire.watched, 0});
  }
}

// Sleep until a wire has something or takes something, or the bell rings.
void Messages::poll_wires(int64_t limit_ns) {
  const timespec limit{limit_ns / 1'000'000'000, limit_ns % 1'000'000'000};
  ppoll(poll_set_.data(), poll_set_.size(), &limit, nullptr);
  if (poll_set_[0].revents != 0) bell_.drain();
}

// See to it that the thread that sleeps on wires sleeps on the right ones.
void Messages::repoll() {
  if (!polling_) return;
  for (int rank : wired_) {
    if ((wanted_events(peer(rank)) & ~peer(rank).wire->watched) != 0) return bell_.ring();
  }
}

}  // namespace unisono
