// Messages between hosts: a wire, which is a connection to one rank, and the bell that wakes who
// sleeps on wires.
//
// A frame on a wire is a FrameHead and the payload, without padding. There may be several wires to a
// rank. The first, channel 0, carries all heads and small payloads; a large payload is cut into parts,
// each behind a head of its own, which go over whichever wire takes them.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "messages/ring.hpp"

namespace unisono {

// Bytes [at, end) of a payload that are still to be moved.
struct Part {
  size_t at = 0;
  size_t end = 0;
  size_t left() const { return end - at; }
};

// One end of a connected, non-blocking socket. Its end (the other rank closed it, or it broke) is
// noted, not explained.
class Wire {
 public:
  Wire(int fd, int channel);
  ~Wire() { close_fd(); }
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  const int channel;
  int fd() const { return fd_; }
  bool has_ended() const { return fd_ < 0; }
  void close_fd();
  // Break it, for both ends: what has begun to go out cannot go on.
  void abort();
  // Tell the other end that nothing follows, and leave the socket to the caller unless it has ended.
  void hand_back(std::vector<int>* fds);

  // --- out: a head, then a part of a payload ---
  void begin(const FrameHead& head, Part part);
  // Send what the socket takes, the head first; whether that was all. `payload`: of the message;
  // `more`: the system may keep it for the next frame, which is there; `moved`: set if the socket
  // took any.
  bool write(const char* payload, bool more, bool* moved);
  bool is_idle() const { return head_at_ == sizeof(head_) && out_.left() == 0; }

  // --- in ---
  // The head of the next frame; nullptr: it is not there yet.
  const FrameHead* next_head();
  void take_head() { at_ += sizeof(FrameHead); }
  bool has_buffered() const { return end_ != at_; }
  // Whether something can be taken without asking the socket.
  bool has_unread() const {
    return !is_blocked && end_ - at_ >= (in.left() != 0 ? 1 : sizeof(FrameHead));
  }
  // Receive payload; nullptr: throw it away. Returns 0 if there is none now.
  size_t read(char* into, size_t nbytes);

  // Let who sleeps on it sleep until so many bytes have come, or enough for one look to be worth it.
  void wake_for(size_t nbytes);

  // The part that is coming in.
  Part in;

  // Whether a frame waits in here for which there is no room, or whose turn is later; nothing is read
  // meanwhile.
  bool is_blocked = false;
  // The events to sleep on; 0: there is no use in that.
  short wanted_events() const;
  // Whether nothing can be sent any more, though something may still come.
  bool cannot_send = false;
  // The events that somebody sleeps on.
  short watched = 0;

 private:
  size_t receive(char* into, size_t nbytes);

  // One system call takes in a head and a small payload, or many of them.
  static constexpr size_t kBufferBytes = 32 * 1024;

  int fd_;
  FrameHead head_{};  // of the frame going out
  size_t head_at_ = sizeof(FrameHead);
  Part out_;
  FrameHead in_{};
  std::array<char, kBufferBytes> buffer_;
  int wakes_for_ = 1;
  size_t at_ = 0;  // [at_, end_) of the buffer is received and not yet taken
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
