// Messages between hosts: a wire is a connection to one rank, and a bell wakes the thread that
// sleeps on wires.
//
// A frame on a wire is a FrameHead and the payload, without padding. There may be several wires to
// a rank. The first wire, channel 0, carries all heads and small payloads. A large payload is cut
// into parts, each with a head of its own, and each part goes over the next wire that is free.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "messages/ring.hpp"
#include "tls/session.hpp"

namespace unisono {

// Bytes [at, end) of a payload that are still to be moved.
struct Part {
  size_t at = 0;
  size_t end = 0;
  size_t left() const { return end - at; }
};

// One end of a connected, non-blocking socket. has_ended() reports that the peer closed it or that
// it broke; the reason is not kept.
class Wire {
 public:
  // `tls`: what the bytes pass through; nullptr: they are plain.
  Wire(int fd, int channel, std::shared_ptr<TlsSession> tls = nullptr);
  ~Wire() { close_fd(); }
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  const int channel;
  int fd() const { return fd_; }
  bool has_ended() const { return fd_ < 0; }
  void close_fd();
  // Break the connection for both ends, because the outgoing frame cannot be completed.
  void abort();
  // Shut the socket down for writing and append it to `fds`, unless it has ended. The caller then
  // owns it.
  void hand_back(std::vector<int>* fds);

  // --- out: a head, then a part of a payload ---
  void begin(const FrameHead& head, Part part);
  // Send as much as the socket takes, the head first; return whether that was all. `payload`: of
  // the message. `more`: a further frame follows, so the system may wait for it. `moved`: set if
  // the socket took bytes.
  bool write(const char* payload, bool more, bool* moved);
  bool is_idle() const {
    return head_at_ == sizeof(head_) && out_.left() == 0 &&
           (tls_ == nullptr || !tls_->has_unsent());
  }

  // --- in ---
  // The head of the next frame; nullptr: it is not there yet.
  const FrameHead* next_head();
  void take_head() { at_ += sizeof(FrameHead); }
  bool has_buffered() const { return end_ != at_ || (tls_ != nullptr && tls_->has_unread()); }
  // Whether data can be taken without a system call.
  bool has_unread() const {
    return !is_blocked && (end_ - at_ >= (in.left() != 0 ? 1 : sizeof(FrameHead)) ||
                           (tls_ != nullptr && tls_->has_unread()));
  }
  // Receive payload; nullptr: discard it. Returns 0 if there is none now.
  size_t read(char* into, size_t nbytes);

  // Let the polling thread sleep until `nbytes` bytes have come, or enough to be worth a look.
  void wake_for(size_t nbytes);

  // The incoming part.
  Part in;

  // Whether the next frame has no room yet, or must wait for its turn. Nothing is read meanwhile.
  bool is_blocked = false;
  // The events to poll for; 0: there is no reason to poll.
  short wanted_events() const;
  // Whether sending is impossible, although data may still come.
  bool cannot_send = false;
  // Whether it has ended because the bytes are not those that the peer has sent.
  bool is_damaged = false;
  // The events for which the polling thread polls.
  short watched = 0;

 private:
  size_t receive(char* into, size_t nbytes);

  // One system call receives a head and a small payload, or several of them.
  static constexpr size_t kBufferBytes = 32 * 1024;

  int fd_;
  const std::shared_ptr<TlsSession> tls_;
  FrameHead head_{};  // of the outgoing frame
  size_t head_at_ = sizeof(FrameHead);
  Part out_;
  FrameHead in_{};
  std::array<char, kBufferBytes> buffer_;
  int wakes_for_ = 1;
  size_t at_ = 0;  // [at_, end_) of the buffer is received and not taken yet
  size_t end_ = 0;
};

// A pipe, because another process that may open this process's descriptors can open its end.
class Bell {
 public:
  ~Bell() { close_fds(); }
  int make();  // 0 or an errno
  void close_fds();
  int fd() const { return fds_[0]; }
  void ring() const;
  void drain() const;

 private:
  int fds_[2] = {-1, -1};
};

}  // namespace unisono
