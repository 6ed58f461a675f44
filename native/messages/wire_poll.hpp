// The thread that sleeps on the wires of a rank. Other threads sleep on the bells of shared memory,
// and that thread wakes them.
#pragma once

#include <cstdint>
#include <vector>

#include <poll.h>

#include "messages/peers.hpp"

namespace unisono {

class WirePoll {
 public:
  WirePoll(Parts& parts, Peers& peers) : parts_(parts), peers_(peers) {}

  // Make the bell that wakes the thread. False: the system has no more descriptors.
  bool prepare(const Lock& lock);
  // Become the thread that sleeps. False: there is such a thread, or there are no wires.
  bool begin(const Lock& lock);
  void end(const Lock& lock);
  bool is_active(const Lock& /*lock*/) const { return is_active_; }
  // Choose the events for the next sleep. Then sleep until one comes or the bell rings.
  void watch(const Lock& lock);
  void sleep(int64_t limit_ns);

  void wake(const Lock& /*lock*/) const { bell_.ring(); }
  // Wake the thread if it sleeps on the wrong events.
  void refresh(const Lock& lock) const;
  void close_in_child() { bell_.close_fds(); }

 private:
  Parts& parts_;
  Peers& peers_;
  Bell bell_;
  bool is_active_ = false;
  std::vector<pollfd> events_;  // belongs to the thread, as the next member does
  bool has_unread_ = false;     // data is buffered, so it need not sleep
};

}  // namespace unisono
