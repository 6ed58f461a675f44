// One rank's messages: sending, receiving, waiting, and progress meanwhile. They go through a ring
// to a rank whose memory can be opened, and over a wire to others.
//
// Progress is made by whoever waits, and by a server thread (of Python's, which calls serve())
// for what nobody waits for. Everything happens under one lock, which nobody holds while sleeping
// or while taking the interpreter lock.
//
// A rank that waits takes in all that arrives, so that two ranks that both send first come to
// their receives; loans, and large messages of programs, only once it is about to sleep, or has waited for
// long: their receives are mostly posted by then. Messages that nobody has asked for are kept up to a limit; beyond it they stay in
// the ring or wire, and their sender waits.
//
// Wires are made by Python, when the first message wants one, or the first large one several. Python
// also finds out who is gone.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <poll.h>

#include "core/fork_guard.hpp"
#include "messages/matching.hpp"
#include "shared/remote_read.hpp"
#include "messages/ring.hpp"
#include "core/status.hpp"
#include "messages/wires.hpp"

namespace unisono {

// Messages of programs up to this size are taken in whether or not somebody has asked for them.
constexpr size_t kEagerBytes = 32 * 1024;

// How an operation ended. For code `mismatch`, `nbytes` and `info` are those of the message.
struct Outcome {
  uint64_t number = 0;  // 0: it had ended before it got one
  Code code = Code::ok;
  int source = -1;
  uint64_t nbytes = 0;
  uint32_t info = 0;
};

// Where another rank's inbox can be found; pid 0: nowhere. `channels`: how many wires to it there may
// be instead.
struct Address {
  int pid = 0;
  int fd = -1;
  unsigned char nonce[kNonceBytes] = {};
  int channels = 0;
};

class Messages {
 public:
  Messages(int rank, int ranks);
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  int create(const unsigned char* nonce) { return inbox_.create(ranks_, nonce); }
  int fd() const { return inbox_.fd(); }
  // Before anything is sent. `is_crowded`: there are more ranks than cores.
  void introduce(std::vector<Address> addresses, bool is_crowded);

  // Whether messages to this rank go through here.
  bool reaches(int peer);

  // Whether this rank has sent something and closed its end since.
  bool has_left(int rank);

  // Called by a wait once it has become long: (peers waited for, whether one must make room).
  void set_stuck(std::function<void(const std::vector<int>&, bool)> stuck) {
    stuck_ = std::move(stuck);
  }
  // For tests: lend large payloads whatever pages they are in.
  void ignore_pages() { ignores_pages_ = true; }
  // Called when a wire to a rank is needed, and when one has ended. The lock is not held.
  void set_wire(std::function<void(int, int channel, bool ended)> wire) { wire_ = std::move(wire); }
  // Called by a wait now and then; true ends it. For Ctrl-C.
  void set_poll(std::function<bool()> poll) { poll_ = std::move(poll); }

  // Wake who sleeps there for a message, of which all that follows is still to be done.
  void wake_waiters(int to);
  // Send it if that needs no waiting, not even for the lock; false: nothing has happened.
  bool try_send(int to, const Envelope& envelope, const char* data);

  // Do it, waiting as long as it takes or until the time-out, after which `data` is not touched.
  Outcome send(int to, const Envelope& envelope, const char* data, int64_t timeout_ns);
  Outcome recv(int from, const Envelope& envelope, char* data, Ranks among, int64_t timeout_ns);

  // Start it; a number that is not 0 stands for what is still to come.
  Outcome start_send(int to, const Envelope& envelope, const char* data);
  // The server thread does not look after it before `watch`.
  Outcome start_recv(int from, const Envelope& envelope, char* data, Ranks among);
  void watch(uint64_t number);

  // Wait for one that was started. Code `unknown`: it has ended, and serve() tells how; `timeout`:
  // it goes on.
  Outcome wait(uint64_t number, int64_t timeout_ns);
  // End one that was started, with code `cancelled` unless it has ended already.
  Outcome cancel(uint64_t number);

  // The receive into this memory that was started last, if its number is above `after`; 0: none.
  uint64_t number_of(const char* data, uint64_t after = 0);
  // Of all that were started.
  uint64_t last_number() const { return last_number_.load(std::memory_order_relaxed); }

  // Make progress until operations that were started have ended, and return their outcomes; nothing
  // after `close`. `stuck` gets the ranks that do not make room.
  std::vector<Outcome> serve(std::vector<int>* stuck);

  // For programs, whose operations are their own until they are done or given up. `begin` starts
  // one; after `wait` with code `timeout` its operation goes on; `nudge` makes some progress in
  // between; `rest` says that nothing more is going to be waited for.
  void begin(Operation& op);
  Code wait(const Operation& op, int64_t timeout_ns);
  void cancel(Operation& op);
  void try_progress();
  void end_waits();
  // Drop what has come, and will come, for the negative tags of a context from `oldest` on up.
  void forget_tags(uint64_t context, int64_t oldest);

  // Take in a message that came another way.
  void deliver(int source, const Envelope& envelope, const char* data);

  // Use this connected, non-blocking socket for messages with a rank; there is one at most for each
  // channel. It is this object's from now on.
  void add_wire(int rank, int channel, int fd);
  // Have the server thread take in what arrives, though nobody here waits: senders do.
  void attend();

  // From now on: this rank is gone (`lost` or `left`); this context is broken; it never was. What a
  // rank has sent over a wire may still be on its way: true if the server has to take that in.
  bool peer_down(int rank, Code code);
  void fail_context(uint64_t context);
  void forget_context(uint64_t context);

  // Give what was sent until `timeout_ns` to get into rings and wires, then end everything. Returns
  // the sockets, which have said their last. A socket that is closed with something unread in it
  // takes back what its peer has not read: read them until their peers have closed them.
  std::vector<int> close(int64_t timeout_ns);

  // Around a fork: hold everything still, and go on. In the child: give up the copies of files.
  void hold() { lock_.lock(); }
  void release() { lock_.unlock(); }
  void close_in_child();

  // Whether this is the child of a fork, in which nothing here may be used.
  bool is_forked() const { return fork_guard_.is_forked(); }
  int rank() const { return rank_; }

 private:
  struct Peer {
    std::unique_ptr<Outbox> outbox;  // once attached
    bool unreachable = false;
    bool joined = false;
    int asked_wires = 0;                       // the first so many have been asked for
    std::vector<std::unique_ptr<Wire>> wires;  // that of channel 0 first, once it is there
    Code down = Code::ok;
    // What Python has found out, while what it sent before may still come.
    Code departure = Code::ok;
    int64_t departure_ends_ns = 0;
    std::list<Operation*> sends;  // in order; what the ring or wire had no room for, or is on loan
    uint64_t multipart_out = 0;   // messages that were sent in parts
    bool refuses_loans = false;
    // What comes from it.
    Ring ring;
    bool active = false;
    bool in_frame = false;
    bool in_parts = false;      // the frame
    uint64_t multipart_in = 0;  // such frames
    bool is_proved = false;     // that process is the one it should be
    Envelope frame{};
    size_t filled = 0;
    Operation* into = nullptr;  // the receive it goes to, or
    Arrival* kept = nullptr;    // where it is kept; neither: it is dropped

    Wire* first_wire() const {
      return wires.empty() || wires[0]->channel != 0 ? nullptr : wires[0].get();
    }
  };
  struct WireEvent {
    int rank;
    int channel;
    bool ended;
  };
  using Lock = std::unique_lock<std::mutex>;
  using Core = std::atomic<uint32_t>;

  Peer& peer(int rank) { return peers_[static_cast<size_t>(rank)]; }
  Bells& bells() const { return inbox_.head().bells; }

  // progress.cpp: moving bytes
  bool progress(const Operation* awaited = nullptr);
  bool push_all();
  bool attach(int rank);
  void look_for_senders();
  bool pull(int source);
  size_t open_next(Peer& from, int source);
  bool open_frame(Peer& from, int source, const FrameHead& head);
  bool may_keep(const Peer& from, const FrameHead& head) const;
  char* address_of(const Peer& from, size_t at) const;
  Operation* advance(Peer& from, size_t at, size_t nbytes);
  size_t read_some(Peer& from);
  void abort_frame(Peer& from);
  bool push(Peer& to);
  bool push_some(Peer& to, Operation& op);
  void ring_bell(Outbox& outbox, bool ring_is_full);
  void ask_for_room();
  void accept_message(int source, const Envelope& envelope, const char* data);

  // loans.cpp: large payloads in huge pages, which their receivers read where they lie
  bool should_lend(const Peer& to, const Operation& op);
  bool is_loan_answered(Peer& to, Operation& op) const;
  bool revoke_loan(Operation& op);
  void fetch_loan(Peer& from, int source, const Loan& loan);
  bool read_loan(Peer& from, int source, const Loan& loan, char* into) const;

  // progress_wires.cpp: the same over wires, and sleeping on them
  bool progress_wires(const Operation* awaited);
  bool pull_wires(int source, bool all);
  bool pull_wire(int source, Wire& wire);
  bool open_part(Peer& from, int source, Wire& wire, const FrameHead& head);
  bool push_wires(Peer& to, Operation& op, bool* moved);
  void report_wires(Lock& lock);
  bool begin_polling();
  void end_polling();
  void watch_wires();
  void poll_wires(int64_t limit_ns);
  void repoll();

  // messages.cpp: beginning and ending
  bool find_route(int rank, uint64_t nbytes = 0);
  void begin_send(Operation& op);
  void begin_recv(Operation& op);
  void post_recv(Operation& op);
  void take_arrival(Operation& op, std::list<Arrival>::iterator arrival);
  void finish(Operation& op, Code code);
  void note_end(const Operation& op);
  Code down_for(Operation& op);
  bool is_failed(uint64_t context) const;
  Operation& open_operation(std::unique_ptr<Operation> op);
  Outcome start(Operation& op);
  void cancel_unfinished(Operation& op);
  Outcome take_outcome(uint64_t number);

  // ends.cpp: how operations end from outside
  void cancel_with(Operation& op, Code code);
  bool continue_from_copy(const Operation& op, Operation** place);
  std::unique_ptr<Operation> copy_of(const Operation& op) const;
  bool is_unwanted(const Envelope& envelope) const;
  void discard_partial(Peer& from);
  void discard_messages(const std::function<bool(const Envelope&)>& unwanted);
  void end_all(const std::function<Code(Operation&)>& code_of);
  void end_peer(int rank, Code code);
  bool is_drained(const Peer& gone) const;
  void end_departures();

  // waiting.cpp: waiting, and who makes progress meanwhile
  void wait_to_end(Operation& op, int64_t timeout_ns, Lock& lock);
  Code wait_for(const Operation* op, int64_t timeout_ns, Lock& lock);
  bool spin(const Operation* op, int64_t ends_ns, const Core* core, Lock& lock);
  const Core* core_of(const Operation* op);
  bool is_on_this_core(const Core* core);
  Code wait_slowly(const Operation* op, int64_t timeout_ns, const Core* core);
  bool is_over(const Operation* op) const;
  Code sleep_until_over(const Operation* op, int64_t timeout_ns, const Core* core, bool* polls);
  bool needs_server() const;
  void server_sleep(uint64_t seen, Lock& lock);
  void wake_server();
  std::vector<int> awaited_ranks(const Operation* op);
  void watch(Operation& op);
  void delegate_to_server();
  void notify_ended(bool here_polls = false);

  const int rank_;
  const int ranks_;
  bool is_crowded_ = false;
  size_t ring_bytes_ = kRingBytes;
  const ForkGuard fork_guard_;
  Inbox inbox_;
  std::vector<Address> addresses_;
  std::function<void(const std::vector<int>&, bool)> stuck_;
  std::function<bool()> poll_;
  std::function<void(int, int, bool)> wire_;

  std::mutex lock_;
  std::vector<Peer> peers_;
  std::vector<int> active_;  // ranks that have joined
  uint32_t joined_seen_ = 0;
  std::atomic<int> queued_sends_{0};  // in the queues of all peers
  HugePages huge_pages_;
  bool ignores_pages_ = false;
  Matching matching_;
  std::vector<uint64_t> failed_;                     // contexts
  std::unordered_map<uint64_t, int64_t> forgotten_;  // by context: the oldest tag, see forget_tags
  std::unordered_map<uint64_t, std::unique_ptr<Operation>> open_;
  size_t watched_ = 0;                    // those of open_ that are not quiet
  std::atomic<uint64_t> last_number_{0};  // written under the lock
  std::vector<uint64_t> ended_;           // of open_, to be told by serve()
  int waiters_ = 0;
  bool server_sleeps_ = false;
  int64_t stuck_reported_ns_ = 0;  // when serve() last named the ranks that make no room
  bool takes_all_ = false;         // somebody has waited for long: take in everything
  bool takes_loans_ = false;  // somebody is about to sleep: take in loans that nobody has asked for
  bool anything_ended_ = false;
  bool server_is_due_ = false;  // to tell what has ended
  bool closed_ = false;
  // Sends that were given up halfway; their frames must be completed.
  std::list<std::unique_ptr<Operation>> leftovers_;

  // Wires. One thread at a time sleeps on them; others sleep on the bells, and are woken by it.
  std::vector<int> wired_;              // ranks that have a wire
  std::vector<WireEvent> wire_events_;  // what set_wire's function is to be told
  Bell bell_;
  bool polling_ = false;
  std::vector<pollfd> poll_set_;  // belongs to that thread
  bool has_unread_ = false;       // nor does it need to sleep
  bool server_polls_ = false;     // it is the server
  bool server_idles_ = false;     // nothing is open, as far as the server knows
  bool attends_ = false;          // senders wait, though nobody here does
  int departing_ = 0;             // ranks
  uint32_t waits_ = 0;
  int64_t spin_ns_ = 0;       // of the next wait that looks at wires
  int64_t last_wait_ns_ = 0;  // when somebody last stopped waiting
  int64_t server_sleep_ns_ = 0;
};

}  // namespace unisono
