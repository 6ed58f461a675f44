// The other ranks: progress on the messages of all of them, and their ends.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "messages/parts.hpp"
#include "messages/peer.hpp"

namespace unisono {

class Peers {
 public:
  Peers(int ranks, Parts& parts);

  Peer& operator[](int rank) { return peers_[static_cast<size_t>(rank)]; }

  // Move all bytes that can be moved; return whether there were any. A look at a wire costs a
  // system call: if `awaited` depends on one rank, the wires of other ranks are skipped.
  bool progress(const Lock& lock, const Operation* awaited = nullptr);
  // Continue the sends that go through rings.
  bool push_all(const Lock& lock);
  // Receive what is in the rings and wires now, up to a limit.
  void receive_all(const Lock& lock);
  // See PeerRings::ask_for_room(): of all ranks with sends.
  void ask_for_room(const Lock& lock);
  void look_for_senders(const Lock& lock);
  // The ranks on which a wait depends. nullptr: on all queued sends.
  std::vector<int> awaited_ranks(const Lock& lock, const Operation* op);

  // Use a wire to a rank. False: it is not needed.
  bool add_wire(const Lock& lock, int rank, std::unique_ptr<Wire> wire);
  // The ranks that have a wire.
  const std::vector<int>& wired(const Lock& /*lock*/) const { return wired_; }
  void close_wires_in_child();

  // Begin a send; it may end at once.
  void begin_send(const Lock& lock, Operation& op);
  // End an operation that is not done. Its memory is not used afterwards.
  void cancel(const Lock& lock, Operation& op, Code code);
  // End every operation for which `code_of` returns another code than ok.
  void end_all(const Lock& lock, const std::function<Code(Operation&)>& code_of);
  // Receive the messages that a rank has sent, and end it. True: messages may still come over
  // wires, and progress() ends it.
  bool peer_down(const Lock& lock, int rank, Code code);
  // End everything. Returns the sockets, shut down for writing.
  std::vector<int> close(const Lock& lock);

 private:
  bool progress_wires(const Lock& lock, const Operation* awaited);
  void end_peer(const Lock& lock, int rank, Code code);
  void end_parting(const Lock& lock);

  Parts& parts_;
  std::vector<Peer> peers_;
  std::vector<int> active_;  // ranks that have joined
  std::vector<int> wired_;
  uint32_t joined_seen_ = 0;
};

}  // namespace unisono
