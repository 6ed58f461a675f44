// One rank's messages: sends, receives, waits, and progress. Messages go through a ring to a rank
// whose memory can be opened, and over a wire to other ranks.
//
// Waiting threads make progress. A server thread, which Python starts and which calls serve(),
// makes progress for operations for which no thread waits. One lock guards all state. No thread
// holds it while it sleeps or acquires the interpreter lock.
//
// A waiting rank receives all messages that arrive, so that two ranks that both send first reach
// their receives. Loans, and large messages of programs, are received only shortly before the rank
// sleeps, or after a long wait. By then their receives are mostly posted. Messages without a
// receive are kept up to a limit; beyond it they stay in the ring or wire, and their sender waits.
//
// Python makes the wires: the first when a message needs it, further wires for the first large
// message. Python also detects ranks that are gone.
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
#include "core/status.hpp"
#include "messages/matching.hpp"
#include "messages/ring.hpp"
#include "messages/wires.hpp"
#include "shared/remote_read.hpp"

namespace unisono {

// Messages of programs up to this size are received also before their receive is posted.
constexpr size_t kEagerBytes = 32 * 1024;

// How an operation ended. `nbytes`, `info` and `tag` are those of the message of a receive, also for
// Code::mismatch.
struct Outcome {
  uint64_t number = 0;  // 0: the operation ended before it got a number
  Code code = Code::ok;
  int source = -1;
  uint64_t nbytes = 0;
  uint32_t info = 0;
  int64_t tag = 0;
  std::unique_ptr<char[]> memory = nullptr;  // the message, for Take::anything
};

// The address of another rank's inbox. pid 0: there is none. `channels`: the number of wires to use
// instead.
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
  // Set the addresses, before the first send. `is_crowded`: there are more ranks than cores.
  void introduce(std::vector<Address> addresses, bool is_crowded);

  // Whether this object has a route to a rank.
  bool reaches(int peer);

  // Whether a rank has sent messages and has closed its endpoint since.
  bool has_left(int rank);

  // Set a function that a long wait calls: (peers waited for, whether a ring is full).
  void set_stuck(std::function<void(const std::vector<int>&, bool)> stuck) {
    stuck_ = std::move(stuck);
  }
  // For tests: lend large payloads also outside huge pages.
  void ignore_pages() { ignores_pages_ = true; }
  // Set a function that is called when a wire to a rank is needed or has ended. The lock is not
  // held.
  void set_wire(std::function<void(int, int channel, bool ended)> wire) { wire_ = std::move(wire); }
  // Set a function that a wait calls at intervals; true ends the wait. It detects Ctrl-C.
  void set_poll(std::function<bool()> poll) { poll_ = std::move(poll); }

  // Wake the threads of a rank that wait for a message, before the work of sending the message.
  void wake_waiters(int to);
  // Send if that needs no waiting, not even for the lock. False: no byte was sent.
  bool try_send(int to, const Envelope& envelope, const char* data);

  // Send or receive, and wait for the end or the time-out. `data` is not used afterwards.
  Outcome send(int to, const Envelope& envelope, const char* data, int64_t timeout_ns);
  Outcome recv(int from, const Envelope& envelope, char* data, Ranks among, int64_t timeout_ns);

  // Whether a receive from this rank waits.
  bool has_receive(int from, uint64_t context, int64_t tag);

  // Start a send or a receive. A number that is not 0 names the operation that goes on.
  Outcome start_send(int to, const Envelope& envelope, const char* data);
  // The server thread does not complete the receive before `watch`. `data`: if the receive
  // does not take a fitting message, only an address for number_of().
  Outcome start_recv(int from, const Envelope& envelope, char* data, Ranks among,
                     Take takes = Take::fitting);
  void watch(uint64_t number);

  // Wait for a started operation. Code::unknown: it has ended, and serve() returns its outcome.
  // Code::timeout: it goes on.
  Outcome wait(uint64_t number, int64_t timeout_ns);
  // Cancel a started operation. Returns Code::cancelled, unless the operation has ended already.
  Outcome cancel(uint64_t number);

  // Return the last started receive into this memory, if its number is above `after`. 0: there is
  // none.
  uint64_t number_of(const char* data, uint64_t after = 0);
  // The number of the last started operation.
  uint64_t last_number() const { return last_number_.load(std::memory_order_relaxed); }

  // Make progress until started operations have ended, and return their outcomes. Returns no
  // outcome after close(). `stuck` is set to the ranks whose rings are full.
  std::vector<Outcome> serve(std::vector<int>* stuck);

  // For programs, which own their operations until these are done or cancelled. begin() starts an
  // operation. After wait() with Code::timeout the operation goes on. try_progress() makes some
  // progress in between. end_waits() reports that the program waits no more.
  void begin(Operation& op);
  Code wait(const Operation& op, int64_t timeout_ns);
  void cancel(Operation& op);
  void try_progress();
  void end_waits();
  // Discard received and future messages with the negative tags of a context from `oldest` up.
  void forget_tags(uint64_t context, int64_t oldest);

  // Accept a message that came over a link of Python.
  void deliver(int source, const Envelope& envelope, const char* data);

  // Use a connected, non-blocking socket for messages with a rank, at most one per channel. This
  // object then owns the socket.
  void add_wire(int rank, int channel, int fd);
  // Make the server thread receive messages although no thread of this rank waits, because senders
  // wait.
  void attend();

  // From now on a rank is gone (`lost` or `left`), a context is broken, or a context is not used
  // any more. A true result of peer_down() means that messages of the rank may still come over
  // wires, and the server must receive them.
  bool peer_down(int rank, Code code);
  // The operations of programs up to run `after` go on, and messages that have come are kept.
  void fail_context(uint64_t context, int64_t after = 0);
  void forget_context(uint64_t context);

  // Wait until queued sends are in rings and wires, or for the time-out, and then end all
  // operations. Returns the sockets, shut down for writing. The caller must read them until the
  // peers close them. Closing a socket with unread data would also discard data that the peer has
  // not read.
  std::vector<int> close(int64_t timeout_ns);

  // Around a fork: take the lock, and release it. In the child: close the copies of descriptors.
  void hold() { lock_.lock(); }
  void release() { lock_.unlock(); }
  void close_in_child();

  // Whether this process is the child of a fork, in which no other method may be used.
  bool is_forked() const { return fork_guard_.is_forked(); }
  int rank() const { return rank_; }

 private:
  struct Peer {
    std::unique_ptr<Outbox> outbox;  // set when attached
    bool unreachable = false;
    bool joined = false;
    int asked_wires = 0;                       // wires of lower channels have been requested
    std::vector<std::unique_ptr<Wire>> wires;  // channel 0 is first, once it is there
    Code down = Code::ok;
    // Why the rank is gone, while messages that it sent before may still come.
    Code departure = Code::ok;
    int64_t departure_ends_ns = 0;
    std::list<Operation*> sends;  // in order; not sent yet, or on loan
    uint64_t multipart_out = 0;   // messages sent in parts
    bool refuses_loans = false;
    // The incoming messages of the rank.
    Ring ring;
    bool active = false;
    bool in_frame = false;
    bool in_parts = false;      // whether the frame comes in parts
    uint64_t multipart_in = 0;  // frames that came in parts
    bool is_proved = false;     // the process has the rank's nonce
    Envelope frame{};
    size_t filled = 0;
    Operation* into = nullptr;  // the receive of the frame, or
    Arrival* kept = nullptr;    // the arrival that keeps it; neither: it is discarded

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

  // progress.cpp: moving bytes through rings
  bool progress(const Operation* awaited = nullptr);
  bool push_all();
  bool attach(int rank);
  void look_for_senders();
  bool pull(int source);
  size_t open_next(Peer& from, int source);
  bool open_frame(Peer& from, int source, const FrameHead& head);
  bool may_keep(const Peer& from, const FrameHead& head) const;
  void end_probes(int source, const Envelope& envelope);
  char* address_of(const Peer& from, size_t at) const;
  Operation* advance(Peer& from, size_t at, size_t nbytes);
  size_t read_some(Peer& from);
  void abort_frame(Peer& from);
  bool push(Peer& to);
  bool push_some(Peer& to, Operation& op);
  void ring_bell(Outbox& outbox, bool ring_is_full);
  void ask_for_room();
  void accept_message(int source, const Envelope& envelope, const char* data);

  // loans.cpp: payloads that their receivers read from the sender's memory
  bool should_lend(const Peer& to, const Operation& op);
  bool is_loan_answered(Peer& to, Operation& op) const;
  bool revoke_loan(Operation& op);
  void fetch_loan(Peer& from, int source, const Loan& loan);
  bool read_loan(Peer& from, int source, const Loan& loan, char* into) const;

  // progress_wires.cpp: moving bytes through wires, and sleeping on wires
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

  // messages.cpp: how operations begin
  bool find_route(int rank, uint64_t nbytes = 0);
  void begin_send(Operation& op);
  void begin_recv(Operation& op);
  void post_recv(Operation& op);
  void take_arrival(Operation& op, std::list<Arrival>::iterator arrival);
  void finish(Operation& op, Code code);
  void note_end(const Operation& op);
  Code down_for(Operation& op);
  bool is_failed(const Envelope& envelope) const;
  Operation& open_operation(std::unique_ptr<Operation> op);
  Outcome start(Operation& op);
  void cancel_unfinished(Operation& op);
  Outcome take_outcome(uint64_t number);

  // ends.cpp: how operations end from outside
  void leave_message(Operation& op);
  void cancel_with(Operation& op, Code code);
  bool continue_from_copy(const Operation& op, Operation** place);
  std::unique_ptr<Operation> copy_of(const Operation& op) const;
  bool is_unwanted(const Envelope& envelope) const;
  void discard_partial(Peer& from);
  void discard_messages();
  void discard_messages(const std::function<bool(const Envelope&)>& unwanted);
  void receive_all();
  void end_all(const std::function<Code(Operation&)>& code_of);
  void end_peer(int rank, Code code);
  bool is_drained(const Peer& gone) const;
  void end_departures();

  // waiting.cpp: waiting, and which thread makes progress
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
  std::unordered_map<uint64_t, int64_t> failed_;  // contexts that are broken, and after which run
  std::unordered_map<uint64_t, int64_t> forgotten_;  // by context: the oldest tag; see forget_tags
  std::unordered_map<uint64_t, std::unique_ptr<Operation>> open_;
  size_t watched_ = 0;                    // operations of open_ that are not quiet
  std::atomic<uint64_t> last_number_{0};  // written under the lock
  std::vector<uint64_t> ended_;           // of open_; serve() returns them
  int waiters_ = 0;
  bool server_sleeps_ = false;
  int64_t stuck_reported_ns_ = 0;  // when serve() last returned the ranks with full rings
  bool takes_all_ = false;         // after a long wait: receive all messages
  bool takes_loans_ = false;       // before a sleep: accept loans without a receive
  bool anything_ended_ = false;
  bool server_is_due_ = false;  // serve() must return outcomes
  bool closed_ = false;
  // Sends that were cancelled halfway; their frames must be completed.
  std::list<std::unique_ptr<Operation>> leftovers_;

  // Wires. One thread at a time sleeps on them. Other threads sleep on the bells, and that thread
  // wakes them.
  std::vector<int> wired_;              // ranks that have a wire
  std::vector<WireEvent> wire_events_;  // arguments for later calls of set_wire's function
  Bell bell_;
  bool polling_ = false;
  std::vector<pollfd> poll_set_;  // belongs to the polling thread
  bool has_unread_ = false;       // data is buffered, so that thread need not sleep
  bool server_polls_ = false;     // the polling thread is the server
  bool server_idles_ = false;     // the server sleeps without open operations
  bool attends_ = false;          // senders wait, although no thread here does
  int departing_ = 0;             // number of ranks with a departure
  uint32_t waits_ = 0;
  int64_t spin_ns_ = 0;       // of the next wait that looks at wires
  int64_t last_wait_ns_ = 0;  // when a thread last ended a wait
  int64_t server_sleep_ns_ = 0;
};

}  // namespace unisono
