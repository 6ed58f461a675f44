// Pairs messages with receives, as core/transports/mailbox.py does. The k-th message from a rank under a
// context and tag goes to the k-th receive for them. A receive from any source or of any tag takes
// the oldest message that it may take. A probe takes no message.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "core/status.hpp"

namespace unisono {

using Ranks = std::shared_ptr<const std::vector<int>>;

// Set in the `info` of a receive that takes shorter messages, too.
constexpr uint32_t kPartial = uint32_t{1} << 31;

// The word of a receive that takes shorter messages with any word.
constexpr uint32_t kRaw = ~uint32_t{0};

// The tag of a receive of any tag, and the first tag that it does not take. From there on tags are
// the library's.
constexpr int64_t kFirstInnerTag = int64_t{1} << 62;
constexpr int64_t kAnyTag = -kFirstInnerTag - 1;

// The message that a receive takes.
enum class Take : uint8_t {
  fitting,   // a message that fits, into the memory of the caller
  anything,  // a message of any size and `info`, into new memory
  nothing,   // a probe: it ends with the envelope, and leaves the message to another receive
};

struct Envelope {
  uint64_t context;
  int64_t tag;
  uint64_t nbytes;
  uint32_t info;  // a word about the payload that must be equal at both ends

  // Whether a receive of any tag is for this message.
  bool is_of_user() const { return tag >= 0 && tag < kFirstInnerTag; }

  // Whether a receive with this envelope may take a message.
  bool fits(const Envelope& message) const {
    const bool is_partial = (info & kPartial) != 0;
    return (info == kRaw || (info & ~kPartial) == message.info) &&
           (is_partial ? message.nbytes <= nbytes : message.nbytes == nbytes);
  }
};

// Whether steps/steps.cpp made this tag. The tags of the reference engine are lower, and that
// engine posts a receive only when it waits for it.
inline bool is_of_program(int64_t tag) { return tag < 0 && tag > -(int64_t{1} << 61); }

// The number of the run of a program, or of the call of the reference engine, with this tag. The
// largest number for a tag of a point-to-point call.
inline int64_t run_of(int64_t tag) {
  if (tag >= 0 || tag == kAnyTag) return INT64_MAX;
  return is_of_program(tag) ? (-tag - 1) / 2 : tag + (int64_t{1} << 62);
}

// A send or a receive. The payload's memory belongs to the caller and must stay valid until `done`.
struct Operation {
  Envelope envelope{};
  int peer = -1;  // -1: a receive from any source
  char* data = nullptr;
  const char* given = nullptr;  // of a started receive: the caller's address, see number_of()
  Ranks among;                  // of a receive from any source: the possible senders
  bool is_send = false;
  Take takes = Take::fitting;
  uint64_t number = 0;    // 0: a blocking call, and this object is on the caller's stack
  bool awaited = false;   // a thread waits for it and takes the outcome
  bool quiet = false;     // the caller will wait for it, so the server thread leaves it alone
  size_t moved = 0;       // of a send: bytes of the payload that were written or passed to a wire
  bool started = false;   // part of its frame was written or read
  bool in_parts = false;  // of a send: its payload goes over several wires
  uint64_t order = 0;     // of a receive: its number in the order of posting
  bool more = false;      // of a send: the next send to the same rank follows at once
  std::unique_ptr<char[]> copy;    // of a cancelled send: its payload, to complete the frame
  std::unique_ptr<char[]> memory;  // of a receive that takes anything: its message

  // The outcome. `done` is set last.
  std::atomic<bool> done{false};
  Code code = Code::ok;
  int source = -1;
  uint64_t got_nbytes = 0;
  uint32_t got_info = 0;
  int64_t got_tag = 0;

  bool takes_from(int rank) const;
  // Whether this receive is for a message with this envelope; its size and `info` may not fit.
  bool matches(int rank, const Envelope& message) const {
    if (envelope.context != message.context || (peer != -1 && peer != rank)) return false;
    return envelope.tag == message.tag || (envelope.tag == kAnyTag && message.is_of_user());
  }
  // Record the message of this receive, and return whether its memory takes the message. `kept`:
  // memory with the message. Without it, a receive that takes anything allocates memory.
  bool accept(int rank, const Envelope& message, std::unique_ptr<char[]>* kept = nullptr) {
    source = rank;
    got_nbytes = message.nbytes;
    got_info = message.info;
    got_tag = message.tag;
    return takes == Take::fitting ? envelope.fits(message) : accept_anything(message, kept);
  }
  bool accept_anything(const Envelope& message, std::unique_ptr<char[]>* kept);
  bool is_leftover() const { return copy != nullptr; }
};

// A message that came before its receive.
struct Arrival {
  int source;
  Envelope envelope;
  std::unique_ptr<char[]> data;
  size_t filled = 0;  // bytes from here on have not come
};

class Matching {
 public:
  // `sources`: how many receives may be taken and not done at a time.
  explicit Matching(size_t sources) : sources_(sources) {}

  // Take the receive for the next message with this envelope out of the list. nullptr: there is
  // none. `probes`: take a probe instead.
  Operation* take_posted(int source, const Envelope& envelope, bool probes = false);

  // Find the oldest message for this receive; end() if there is none.
  std::list<Arrival>::iterator find_arrival(const Operation& op);

  // Make an arrival for a message without a receive; nullptr if there is no memory.
  Arrival* keep(int source, const Envelope& envelope);
  void discard(std::list<Arrival>::iterator arrival);
  bool has_room(uint64_t nbytes) const { return kept_bytes_ + nbytes <= kKeptBytes; }

  // Number a receive, and reserve the memory to post it again later.
  void assign_order(Operation* op);
  void post(Operation* op);          // a receive that was taken goes back to its place
  bool unpost(const Operation* op);  // returns whether it was posted
  bool has_receive_from(int source) const;
  bool has_receive_for(int source, uint64_t context, int64_t tag) const;

  const std::vector<Operation*>& posted() const { return posted_; }
  std::list<Arrival>& arrivals() { return arrivals_; }

 private:
  // Most bytes of arrivals to keep. Further messages stay in their rings and wires and their
  // senders wait, unless a receive waits for a message behind them.
  static constexpr uint64_t kKeptBytes = uint64_t{256} << 20;

  const size_t sources_;
  std::vector<Operation*> posted_;  // sorted by `order`
  uint64_t last_order_ = 0;
  std::list<Arrival> arrivals_;
  uint64_t kept_bytes_ = 0;
};

}  // namespace unisono
