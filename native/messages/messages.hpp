// One rank's messages: sends, receives, waits, and progress. Messages go through a ring to a rank
// whose memory can be opened, and over a wire to other ranks.
//
// This class is the interface and owns the lock, which guards all state. Its parts are in files of
// their own, from the lowest to the highest, and know only parts below them:
//
// - Operations: the started operations and their outcomes.
// - Ends: ranks that are gone, failed contexts, close().
// - Delivery: the receive that takes a message, over Matching.
// - Peers: the other ranks. Each is a Peer over PeerRings or PeerWires.
// - Waiting: which thread makes progress, spins or sleeps.
//
// Programs have an interface of their own, ProgramMessages, over the same parts and lock.
//
// A waiting rank receives all messages that arrive, so that two ranks that both send first reach
// their receives. Large messages of programs are received only after a long wait. By then their
// receives are mostly posted. Messages without a
// receive are kept up to a limit; beyond it they stay in the ring or wire, and their sender waits.
//
// Python makes the wires: the first when a message needs it, further wires for the first large
// message. Python also detects ranks that are gone.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "core/fork_guard.hpp"
#include "core/status.hpp"
#include "messages/matching.hpp"
#include "messages/operations.hpp"
#include "messages/parts.hpp"
#include "messages/peers.hpp"
#include "messages/program_messages.hpp"
#include "messages/waiting.hpp"

namespace unisono {

class Messages {
 public:
  Messages(int rank, int ranks);
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  // Make the inbox. Returns its descriptor, or a negative errno. `node`: see Inbox::create().
  int create(const unsigned char* nonce, int node = -1);
  // Set the addresses, before the first send. `is_crowded`: there are more ranks than cores.
  // `are_far`: hosts are far apart, equal on all ranks.
  void introduce(std::vector<Address> addresses, bool is_crowded, bool are_far = false);

  // Whether a rank has sent messages and has closed its endpoint since.
  bool has_left(int rank);

  // The functions that waits call, to be set before the first message.
  Callbacks& callbacks() { return waiting_.callbacks; }
  // The interface of programs.
  ProgramMessages& programs() { return programs_; }

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
  uint64_t last_number() const { return parts_.operations.last_number(); }

  // Make progress until started operations have ended, and return their outcomes. Returns no
  // outcome after close().
  std::vector<Outcome> serve();

  // Use a connected, non-blocking socket for messages with a rank, at most one per channel. This
  // object then owns the socket.
  void add_wire(int rank, int channel, int fd, std::shared_ptr<TlsSession> tls = nullptr);
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
  int rank() const { return parts_.rank; }

 private:
  void begin(const Lock& lock, Operation& op);
  Outcome run(Operation& op, int64_t timeout_ns);
  Outcome start(const Lock& lock, Operation& op);
  void cancel_unfinished(const Lock& lock, Operation& op);

  const ForkGuard fork_guard_;
  std::mutex lock_;
  Parts parts_;
  Peers peers_;
  Waiting waiting_;
  ProgramMessages programs_;
};

}  // namespace unisono
