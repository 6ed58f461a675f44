// Waits for operations, and which thread makes progress meanwhile.
//
// Waiting threads make progress. A server thread makes progress for operations for which no thread
// waits. No thread holds the lock while it sleeps or calls Python.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "messages/parts.hpp"
#include "messages/peers.hpp"
#include "messages/wire_poll.hpp"

namespace unisono {

// Functions that are called without the lock.
struct Callbacks {
  // A long wait calls it: (peers waited for, whether a ring is full, context). The context is that
  // of a receive that has waited for a second, else 0.
  std::function<void(const std::vector<int>&, bool, uint64_t)> stuck;
  // A wait calls it at intervals; true ends the wait. It detects Ctrl-C.
  std::function<bool()> poll;
  // A wire to a rank is needed or has ended.
  std::function<void(int, int channel, int ended)> wire;
};

class Waiting {
 public:
  Waiting(std::mutex& lock, Parts& parts, Peers& peers)
      : lock_(lock), parts_(parts), peers_(peers), poll_(parts, peers) {}

  Callbacks callbacks;

  // There are more ranks than cores.
  void set_crowded(const Lock& /*lock*/, bool is_crowded) { is_crowded_ = is_crowded; }
  bool is_crowded(const Lock& /*lock*/) const { return is_crowded_; }

  // Make progress until `op` is done. nullptr: until no send is queued. The lock is released
  // meanwhile.
  Code wait_for(const Operation* op, int64_t timeout_ns, Lock& lock);
  // See Messages::serve().
  std::vector<Outcome> serve(Lock& lock);

  // Let the server thread handle the open operations if no other thread does, and wake the threads
  // of this rank whose operations have ended.
  void delegate(const Lock& lock);
  void notify(const Lock& lock) {
    if (parts_.operations.take_change(lock)) wake_waiters(lock, false);
  }
  // Make the server thread receive messages until the next wait.
  void attend(const Lock& lock);
  // Report to Python which wires are needed and which have ended.
  void report_wires(Lock& lock);

  // Threads will sleep on wires. False: they cannot.
  bool prepare_for_wires(const Lock& lock) { return poll_.prepare(lock); }
  void close_in_child() { poll_.close_in_child(); }

 private:
  using Core = std::atomic<uint32_t>;
  struct Server {
    bool sleeps = false;
    bool polls = false;         // it is the thread that sleeps on wires
    bool idles = false;         // it sleeps without open operations
    bool attends = false;       // senders wait, although no thread here does
    int64_t sleep_ns = 0;       // its last sleep, while other threads look at the wires
    int64_t stuck_told_ns = 0;  // when it last reported that operations are stuck
  };

  bool spin(const Operation* op, int64_t ends_ns, const Core* core, Lock& lock);
  bool is_on_this_core(const Core* core);
  bool step_aside(const Core& peer);
  Code wait_slowly(const Operation* op, int64_t timeout_ns, const Core* core);
  bool is_over(const Operation* op) const;
  Code sleep_until_over(const Operation* op, int64_t timeout_ns, const Core* core, bool* polls);
  bool needs_server(const Lock& lock) const;
  void report_stuck(Lock& lock);
  void server_sleep(uint64_t seen, Lock& lock);
  void wake_server(const Lock& lock);
  void wake_waiters(const Lock& lock, bool here_polls);
  Bells& bells() const { return parts_.bells(); }

  std::mutex& lock_;
  Parts& parts_;
  Peers& peers_;
  WirePoll poll_;
  bool is_crowded_ = false;
  Server server_;
  int waiters_ = 0;
  uint32_t waits_ = 0;
  int64_t spin_ns_ = 0;       // of the next wait that looks at wires
  int64_t last_wait_ns_ = 0;  // when a thread last ended a wait
};

}  // namespace unisono
