// The wires between this rank and one rank of another host.
//
// Channel 0 carries all heads. A large payload goes in parts over all wires: see wires.hpp.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "messages/parts.hpp"
#include "messages/wires.hpp"

namespace unisono {

class PeerWires {
 public:
  PeerWires(int peer, Parts& parts) : peer_(peer), parts_(parts) {}

  // Whether there are enough wires for a message of this size, or Python has been asked for them.
  bool are_requested(const Lock& lock, uint64_t nbytes) const;
  // Request, once each, the wires that a message of this size can use. False: there are none.
  bool request(const Lock& lock, uint64_t nbytes);
  void add(const Lock& lock, std::unique_ptr<Wire> wire);
  bool has_channel(const Lock& lock, int channel) const;
  const std::vector<std::unique_ptr<Wire>>& all() const { return wires_; }

  // Pass as much of a send to the wires as they take; return whether the frame is complete.
  // `moved`: set if a wire took bytes.
  bool write(const Lock& lock, Operation& op, bool* moved);
  // Receive what has arrived; return whether there was anything. Unless `all`, the wires for parts
  // are skipped while no parts are expected.
  bool pull(const Lock& lock, bool all);
  // Whether no message can come any more.
  bool is_drained(const Lock& lock) const;

 private:
  Wire* first() const {
    return wires_.empty() || wires_[0]->channel != 0 ? nullptr : wires_[0].get();
  }
  int channels_for(uint64_t nbytes) const;
  bool pull_wire(const Lock& lock, Wire& wire);
  bool open_part(const Lock& lock, Wire& wire, const FrameHead& head);

  const int peer_;
  Parts& parts_;
  int requested_ = 0;                         // wires of lower channels have been requested
  std::vector<std::unique_ptr<Wire>> wires_;  // channel 0 is first, once it is there
  uint64_t multipart_out_ = 0;                // messages sent in parts
  uint64_t multipart_in_ = 0;                 // frames that came in parts
  bool comes_in_parts_ = false;               // the incoming frame
};

}  // namespace unisono
