// The two rings between this rank and one rank whose memory can be opened.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "messages/parts.hpp"
#include "messages/ring.hpp"

namespace unisono {

class PeerRings {
 public:
  PeerRings(int peer, Parts& parts) : peer_(peer), parts_(parts) {}

  // --- out ---
  // Open the peer's inbox, once. False: it cannot be opened, or there is no memory for it now.
  bool attach(const Lock& lock);
  bool is_attached(const Lock& /*lock*/) const { return outbox_ != nullptr; }
  bool is_unreachable(const Lock& /*lock*/) const { return is_unreachable_; }
  bool has_room_for(const Lock& /*lock*/, const Envelope& envelope) const {
    const size_t needed = frame_bytes(envelope.nbytes);
    return outbox_->ring.room(needed) >= needed;
  }
  // Write as much of a send as the ring has room for; return whether the frame is complete.
  bool write(const Lock& lock, Operation& op);
  // Abort the frame that is only partly written.
  void abort_frame(const Lock& lock);
  // Wake the threads of the peer that sleep for the bytes just written or read. `is_full`: wake
  // also a server thread without open operations, so that it reads.
  void ring_bell(const Lock& lock, bool is_full = false);
  // Wake the threads of the peer that wait for a message, before the work of sending the message.
  void wake_waiters(const Lock& lock) const;
  // Request a bell when there is room again. The caller must push afterwards, or it could miss room
  // that was made just before.
  void ask_for_room(const Lock& lock);
  void leave(const Lock& lock) const;
  // The word in which the peer records its core; nullptr: unknown.
  const std::atomic<uint32_t>* core(const Lock& /*lock*/) const {
    return outbox_ == nullptr ? nullptr : &outbox_->head().core;
  }

  // --- in ---
  // Whether the peer has joined since the last call.
  bool find_sender(const Lock& lock);
  // Receive what is in the ring; return whether there was anything.
  bool pull(const Lock& lock) { return is_active_ && ring_.available() != 0 && pull_frames(lock); }
  // Whether the peer has left after it joined.
  bool has_left(const Lock& lock) const;

 private:
  Incoming& incoming() const { return parts_.delivery.incoming(peer_); }
  void join();
  bool pull_frames(const Lock& lock);
  size_t open_next(const Lock& lock);
  size_t read_some(const Lock& lock);

  const int peer_;
  Parts& parts_;
  std::unique_ptr<Outbox> outbox_;  // set when attached
  bool is_unreachable_ = false;
  bool has_joined_ = false;
  Ring ring_;  // of incoming messages
  bool is_active_ = false;
};

}  // namespace unisono
