// Gives each message to its receive, or keeps it until there is one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <list>
#include <utility>
#include <vector>

#include "messages/ends.hpp"
#include "messages/matching.hpp"
#include "messages/operations.hpp"

namespace unisono {

// Messages of programs up to this size are received also before their receive is posted. Between
// hosts that are far apart a second copy costs less than a delay. Each rank sends a root at most
// that much early, and the root has memory for all ranks. core/schedules/choice/far.py has the same numbers.
constexpr size_t kEagerBytes = 32 * 1024;
constexpr size_t kFarEagerBytes = 1024 * 1024;
constexpr size_t kFarKeptBytes = 32 * 1024 * 1024;

// The frame of which a ring or wire has brought the head. Each rank has at most one.
struct Incoming {
  bool is_open = false;
  Envelope frame{};
  size_t filled = 0;
  Operation* into = nullptr;  // its receive, or
  Arrival* kept = nullptr;    // the arrival that keeps it; neither: it is discarded

  size_t left() const { return static_cast<size_t>(frame.nbytes) - filled; }
  // The destination of the bytes from `at` on; nullptr: they are discarded.
  char* address_of(size_t at) const;
};

class Delivery {
 public:
  Delivery(int ranks, Operations& operations, Ends& ends);

  // --- receives ---
  // Let a receive take the oldest message for it, or wait for one. False: it has ended or has begun
  // to take a message.
  bool post(const Lock& lock, Operation& op);
  // End a receive that waits for a rank that is down.
  void end_if_down(const Lock& lock, Operation& op) {
    if (!op.done && !op.started) end_waiting_if_down(lock, op);
  }
  // End a receive that is not done. Its memory is not used afterwards.
  void cancel(const Lock& lock, Operation& op, Code code);
  // Before a receive is cancelled: leave its half-received message to other receives, because the
  // sender will not send it again. Without memory for that the message is lost.
  void leave_message(const Lock& lock, Operation& op);
  bool has_receive(const Lock& /*lock*/, int from, uint64_t context, int64_t tag) const {
    return matching_.has_receive_for(from, context, tag);
  }
  // The receives that wait or take a message.
  std::vector<Operation*> receives(const Lock& lock) const;

  // --- messages ---
  // Accept a message of this rank to itself.
  void accept(const Lock& lock, int source, const Envelope& envelope, const char* data);
  // Find the destination of the next frame of a rank. False: there is none now.
  bool open(const Lock& lock, int source, const Envelope& envelope);
  // Record that `nbytes` more bytes of the frame have come. The last bytes end it and its receive.
  void advance(const Lock& lock, int source, size_t at, size_t nbytes) {
    Incoming& from = incoming(source);
    from.filled += nbytes;
    if (from.kept != nullptr) from.kept->filled = std::max(from.kept->filled, at + nbytes);
    if (from.left() != 0) return;
    Operation* const op = std::exchange(from.into, nullptr);
    from.is_open = false;
    from.kept = nullptr;
    if (op != nullptr) operations_.finish(lock, *op, Code::ok);
  }
  // The sender has aborted the frame: there is no such message.
  void abort(const Lock& lock, int source);
  // Discard kept messages; of a rank: the part of its frame, if that is kept.
  void discard(const Lock& lock, const std::function<bool(const Envelope&)>& unwanted);
  void discard_unwanted(const Lock& lock);
  void discard_partial(const Lock& lock, int source);

  Incoming& incoming(int source) { return incoming_[static_cast<size_t>(source)]; }

  // After a long wait: keep all messages without a receive; see may_keep().
  bool keeps_all = false;
  // Equal on all ranks. Set before the first message.
  size_t eager_bytes = kEagerBytes;

 private:
  void end_waiting_if_down(const Lock& lock, Operation& op);
  void close_context(const Lock& lock, int source, uint64_t context);
  bool may_keep(const Lock& lock, int source, const Envelope& envelope) const;
  void end_probes(const Lock& lock, int source, const Envelope& envelope);
  void take_arrival(const Lock& lock, Operation& op, std::list<Arrival>::iterator arrival);

  Matching matching_;
  Operations& operations_;
  Ends& ends_;
  std::vector<Incoming> incoming_;  // by rank
};

}  // namespace unisono
