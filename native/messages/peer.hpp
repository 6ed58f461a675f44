// One other rank: the queue of sends to it, and their way. They go through rings if the memory of
// the rank can be opened, and over wires if not.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "messages/peer_rings.hpp"
#include "messages/peer_wires.hpp"

namespace unisono {

class Peer {
 public:
  Peer(int peer, Parts& parts)
      : rings(peer, parts), wires(peer, parts), peer_(peer), parts_(parts) {}

  // Open the rank's inbox, or request wires for a message of this size. False: there is no way.
  bool find_route(const Lock& lock, uint64_t nbytes = 0);
  // Queue a send, and begin it if it is the first.
  void send(const Lock& lock, Operation& op);
  // Send a message that needs no waiting. False: no byte was sent.
  bool try_send(const Lock& lock, const Envelope& envelope, const char* data);
  // Continue the sends; return whether bytes were moved.
  bool push(const Lock& lock);
  bool has_sends(const Lock& /*lock*/) const { return !sends_.empty(); }
  const std::list<Operation*>& sends(const Lock& /*lock*/) const { return sends_; }
  // End a send that is not done. Its memory is not used afterwards.
  void cancel(const Lock& lock, Operation& op, Code code);
  // The rank is down: the rest of cancelled sends has no receiver any more.
  void discard_sends(const Lock& lock);

  PeerRings rings;
  PeerWires wires;

 private:
  bool continue_from_copy(const Lock& lock, const Operation& op, Operation** place);

  const int peer_;
  Parts& parts_;
  std::list<Operation*> sends_;  // in order, not sent yet
  // Sends that were cancelled halfway. Their frames must be completed.
  std::list<std::unique_ptr<Operation>> leftovers_;
};

}  // namespace unisono
