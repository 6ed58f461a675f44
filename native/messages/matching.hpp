// Which message goes to which receive, as transports/mailbox.py has it: the k-th message from a
// rank under a context and tag meets the k-th receive for them; a receive from any source takes the
// oldest message.
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

struct Envelope {
  uint64_t context;
  int64_t tag;
  uint64_t nbytes;
  uint32_t info;  // a word about the payload that both ends must agree on
};

// A send or a receive. Its memory belongs to the caller until it is done.
struct Operation {
  Envelope envelope{};
  int peer = -1;  // -1: a receive from any source
  char* data = nullptr;
  Ranks among;  // of a receive from any source: who may send
  bool is_send = false;
  uint64_t number = 0;    // 0: its caller waits for it, on whose stack it lies
  bool awaited = false;   // somebody waits for it, who will find out by itself
  bool quiet = false;     // its caller will ask for it, so that the server thread need not look
  size_t moved = 0;       // of a send: bytes of the payload that are written, or left to a wire
  bool started = false;   // its message is in part in the ring, or taken out of it
  bool in_parts = false;  // of a send: it goes over several wires
  bool on_loan = false;   // of a send: its receiver may be reading the memory right now
  uint64_t order = 0;     // of a receive: its place in the order in which they were posted
  bool more = false;      // of a send: another one to the same rank follows at once
  std::unique_ptr<char[]> copy;  // of a send that was given up: a copy, to write what is left

  // The outcome; `done` is set last.
  std::atomic<bool> done{false};
  Code code = Code::ok;
  int source = -1;
  uint64_t got_nbytes = 0;
  uint32_t got_info = 0;

  bool takes_from(int rank) const;
  bool is_leftover() const { return copy != nullptr; }
};

// A message that came before its receive.
struct Arrival {
  int source;
  Envelope envelope;
  std::unique_ptr<char[]> data;
  size_t filled = 0;  // nothing has come for what is behind
};

class Matching {
 public:
  // `sources`: as many receives may be taken out and not be done.
  explicit Matching(size_t sources) : sources_(sources) {}

  // The receive that the next message of this kind goes to, taken out; nullptr: none.
  Operation* take_posted(int source, const Envelope& envelope);

  // The oldest message for this receive; end() if there is none.
  std::list<Arrival>::iterator find_arrival(const Operation& op);

  // Room for a message without receive; nullptr if memory is short.
  Arrival* keep(int source, const Envelope& envelope);
  void discard(std::list<Arrival>::iterator arrival);
  bool has_room(uint64_t nbytes) const { return kept_bytes_ + nbytes <= kKeptBytes; }

  // Give a receive its place in the order, and have memory for that.
  void assign_order(Operation* op);
  void post(Operation* op);          // what was taken out: where it was
  bool unpost(const Operation* op);  // whether it was there
  bool has_receive_from(int source) const;

  std::vector<Operation*>& posted() { return posted_; }
  std::list<Arrival>& arrivals() { return arrivals_; }

 private:
  // Beyond this many bytes of unexpected messages, further ones stay in their rings and their
  // senders wait, unless a receive waits for something behind them.
  static constexpr uint64_t kKeptBytes = uint64_t{256} << 20;

  const size_t sources_;
  std::vector<Operation*> posted_;  // by `order`
  uint64_t last_order_ = 0;
  std::list<Arrival> arrivals_;
  uint64_t kept_bytes_ = 0;
};

}  // namespace unisono
