#include "messages/wires.hpp"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

namespace unisono {

namespace {

// Most bytes per system call, because other threads of this rank may wait for the lock.
constexpr size_t kCallBytes = 1024 * 1024;

// Size of the send buffer for a rank nearby, whose data in flight must stay in the processor's
// cache. With the system's buffers of megabytes, messages of 1 MiB and more took twice as long
// between two namespaces of one host. The system doubles this size. At a round trip of kNearUs it
// allows 5 GB/s. Above that time a wire needs more data in flight, and the system's choice stands.
constexpr int kNearBytes = 128 * 1024;
constexpr uint32_t kNearUs = 50;

// A thread that sleeps in the middle of a large message is not woken for fewer bytes. The system
// passes on up to 64 KiB at once, and makes its buffer at least twice this size.
constexpr size_t kWakeBytes = 64 * 1024;

// With encryption, bytes to read beyond what has a place: what comes after them needs no system
// call, and is copied only once.
constexpr size_t kAheadBytes = 4096;

void keep_in_cache(int fd) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return;
  if (info.tcpi_min_rtt <= kNearUs) {
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kNearBytes, sizeof(kNearBytes));
  }
}

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

Wire::Wire(int fd, int channel, std::shared_ptr<TlsSession> tls)
    : channel(channel), fd_(fd), tls_(std::move(tls)) {
  keep_in_cache(fd);
}

void Wire::close_fd() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

void Wire::abort() {
  if (has_ended()) return;
  shutdown(fd_, SHUT_RDWR);
  cannot_send = true;
}

void Wire::hand_back(std::vector<int>* fds) {
  if (has_ended()) return;
  shutdown(fd_, SHUT_WR);
  fds->push_back(fd_);
  fd_ = -1;
}

void Wire::begin(const FrameHead& head, Part part) {
  head_ = head;
  head_at_ = 0;
  out_ = part;
}

bool Wire::write(const char* payload, bool more, bool* moved) {
  const int flags = MSG_NOSIGNAL | MSG_DONTWAIT | (more ? MSG_MORE : 0);
  while (!has_ended() && !cannot_send && !is_idle()) {
    const size_t head_left = sizeof(head_) - head_at_;
    iovec parts[2] = {
      {reinterpret_cast<char*>(&head_) + head_at_, head_left},
      {const_cast<char*>(payload) + out_.at, std::min(out_.left(), kCallBytes)},
    };
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    const ssize_t sent =
      tls_ == nullptr ? sendmsg(fd_, &message, flags) : tls_->write(parts, 2, flags);
    if (sent < 0) {
      // A broken wire may still hold data to read, and the read then detects the end.
      cannot_send = !would_block();
      break;
    }
    const size_t of_head = std::min(static_cast<size_t>(sent), head_left);
    head_at_ += of_head;
    out_.at += static_cast<size_t>(sent) - of_head;
    *moved = true;
  }
  return is_idle();
}

const FrameHead* Wire::next_head() {
  if (end_ - at_ < sizeof(FrameHead)) {
    std::copy(buffer_.begin() + static_cast<ptrdiff_t>(at_),
              buffer_.begin() + static_cast<ptrdiff_t>(end_), buffer_.begin());
    end_ -= at_;
    at_ = 0;
    receive(nullptr, 0);
    if (end_ < sizeof(FrameHead)) return nullptr;
  }
  std::memcpy(&in_, buffer_.data() + at_, sizeof(in_));
  return &in_;
}

size_t Wire::read(char* into, size_t nbytes) {
  size_t taken = std::min(nbytes, end_ - at_);
  if (into != nullptr) copy_bytes(into, buffer_.data() + at_, taken);
  at_ += taken;
  if (taken == nbytes) return taken;
  if (into != nullptr) return taken + receive(into + taken, nbytes - taken);
  at_ = end_ = 0;
  receive(nullptr, 0);
  const size_t more = std::min(nbytes - taken, end_);
  at_ = more;
  return taken + more;
}

// Receive into `into` and then into the buffer, which must be empty. Without `into`: append to the
// buffer.
size_t Wire::receive(char* into, size_t nbytes) {
  if (has_ended()) return 0;
  if (nbytes != 0) at_ = end_ = 0;
  const size_t direct = std::min(nbytes, kCallBytes);
  // A record's payload that came with its head is decrypted; it goes straight to its place.
  const size_t most = tls_ == nullptr ? kBufferBytes : std::min(kBufferBytes, end_ + kAheadBytes);
  iovec parts[2] = {{into, direct}, {buffer_.data() + end_, most - end_}};
  const bool whole = direct == nbytes;  // the bytes after it are not payload
  const int count = whole ? 2 : 1;
  const ssize_t received =
    tls_ == nullptr ? readv(fd_, parts, count) : tls_->read(parts, count, MSG_DONTWAIT);
  if (received <= 0) {
    // A process that is killed ends inside a record, too.
    is_damaged = received < 0 && errno == EBADMSG && !(tls_ != nullptr && tls_->is_cut());
    if (received == 0 || !would_block()) close_fd();
    return 0;
  }
  const size_t into_place = std::min(static_cast<size_t>(received), direct);
  end_ += static_cast<size_t>(received) - into_place;
  return into_place;
}

short Wire::wanted_events() const {
  if (has_ended()) return 0;
  return static_cast<short>((is_blocked ? 0 : POLLIN) | (is_idle() || cannot_send ? 0 : POLLOUT));
}

void Wire::wake_for(size_t nbytes) {
  // Part of a record may have left the socket already.
  if (tls_ != nullptr) nbytes = nbytes < 2 * kWakeBytes ? 1 : kWakeBytes;
  const int least = static_cast<int>(std::min(nbytes, kWakeBytes));
  if (least == wakes_for_ || has_ended()) return;
  wakes_for_ = least;
  setsockopt(fd_, SOL_SOCKET, SO_RCVLOWAT, &least, sizeof(least));
}

int Bell::make() {
  if (fds_[0] >= 0) return 0;
  return pipe2(fds_, O_NONBLOCK | O_CLOEXEC) == 0 ? 0 : errno;
}

void Bell::close_fds() {
  for (int& fd : fds_) {
    if (fd >= 0) close(fd);
    fd = -1;
  }
}

// A full pipe wakes as well.
void Bell::ring() const { [[maybe_unused]] const ssize_t written = write(fds_[1], "!", 1); }

void Bell::drain() const {
  char bytes[64];
  while (read(fds_[0], bytes, sizeof(bytes)) == sizeof(bytes)) continue;
}

}  // namespace unisono
