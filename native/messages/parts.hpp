// The state that the parts of a `Messages` share.
#pragma once

#include <atomic>
#include <vector>

#include "messages/delivery.hpp"
#include "messages/ends.hpp"
#include "messages/operations.hpp"
#include "messages/ring.hpp"

namespace unisono {

// The address of another rank's inbox. pid 0: there is none. `channels`: the number of wires to use
// instead.
struct Address {
  int pid = 0;
  int fd = -1;
  unsigned char nonce[kNonceBytes] = {};
  int channels = 0;
};

// Python must make a wire, or learn that a wire has ended.
struct WireEvent {
  int rank;
  int channel;
  int ended;  // 1: it has ended; 2: because its bytes were changed on the way
};

struct Parts {
  Parts(int rank, int ranks)
      : rank(rank),
        addresses(static_cast<size_t>(ranks)),
        ends(rank, ranks),
        delivery(ranks, operations, ends) {}

  Bells& bells() const { return inbox.head().bells; }
  const Address& address(int peer) const { return addresses[static_cast<size_t>(peer)]; }

  const int rank;
  Inbox inbox;
  std::vector<Address> addresses;
  size_t ring_bytes = kRingBytes;
  Operations operations;
  Ends ends;
  Delivery delivery;
  std::atomic<int> queued_sends{0};    // in the queues of all peers
  std::vector<WireEvent> wire_events;  // arguments for later calls of Callbacks::wire
};

}  // namespace unisono
