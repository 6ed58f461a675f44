// Messages between hosts: a wire, which is a connection to one rank, and the bell that wakes who
// sleeps on wires.
//
// A frame on a wire is a FrameHead and the payload, without padding.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "ring.hpp"

namespace unisono {

// One end of a connected, non-blocking socket. Its end (the other rank closed it, or it broke) is
// noted, not explained.
class Wire {
 public:
  explicit Wire(int fd);
  ~Wire() { close_fd(); }
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  int fd() const { return fd_; }
  bool has_ended() const { return fd_ < 0; }
  void close_fd();
  // Tell the other end that nothing follows, and leave the socket to the caller; -1: it has ended.
  int part();

  // --- out: a head, then its payload ---
  void begin(const FrameHead& head);
  // Send what the socket takes, the head first; return how much of the payload that was.
  size_t write(const char* data, size_t nbytes);
  bool head_is_out() const { return head_at_ == sizeof(head_); }

  // --- in ---
  // The head of the next frame; nullptr: it is not there yet.
  const FrameHead* next_head();
  void take_head() { at_ += sizeof(FrameHead); }
  bool has_buffered() const { return end_ != at_; }
  // Receive payload; nullptr: throw it away. Returns 0 if there is none now.
  size_t read(char* into, size_t nbytes);

  // Let who sleeps on it sleep until so many bytes have come, or enough for one look to be worth it.
  void wake_for(size_t nbytes);

  // Whether a frame waits in here for which there is no room; nothing is read meanwhile.
  bool is_blocked = false;
  // The events that somebody sleeps on.
  short watched = 0;

 private:
  size_t receive(char* into, size_t nbytes);

  // One system call takes in a head and a small payload, or many of them.
  static constexpr size_t kBufferBytes = 32 * 1024;

  int fd_;
  FrameHead head_{};  // of the frame going out
  size_t head_at_ = sizeof(FrameHead);
  FrameHead in_{};
  std::array<char, kBufferBytes> buffer_;
  int wakes_for_ = 1;
  size_t at_ = 0;   // [at_, end_) of the buffer is received and not yet taken
  size_t end_ = 0;
};

// A pipe, because other processes that may open this one's files can open its end.
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
