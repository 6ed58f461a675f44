#include "store/link.hpp"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>

#include "core/clock.hpp"

namespace unisono::store {

namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr std::size_t kReadBytes = 4096;
constexpr std::size_t kPartBytes = 128 * 1024;

// After a spin in vain the next spin is half as long, so that a client that waits for other ranks
// sleeps.
constexpr int64_t kShortLookNs = 3'000;

}  // namespace

Link::Link(int fd, int64_t silence_ns, std::shared_ptr<TlsSession> tls)
    : fd_(fd), silence_ns_(silence_ns), tls_(std::move(tls)) {
  // Blocking calls return once a second to check the deadline, so that a wait is one system call. A
  // shorter time-out costs a second system call.
  const timeval second{1, 0};
  setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &second, sizeof second);
  setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &second, sizeof second);
}

void Link::begin() { out_.drop_front(out_.size()); }

Link::Result Link::exchange(int64_t timeout_ns, std::size_t most_bytes) {
  const int64_t until_ns = now_ns() + timeout_ns;
  Result end = send_all(until_ns);
  if (end == Result::ok) end = take();
  while (end == Result::ok && !expected_.empty()) {
    end = receive(until_ns, most_bytes);
    if (end == Result::ok) end = take();
    // A reply may come byte by byte.
    if (end == Result::ok && !expected_.empty() && now_ns() >= until_ns) end = Result::timeout;
  }
  return end;
}

Link::Result Link::send_all(int64_t until_ns) {
  while (!out_.is_empty() || (tls_ != nullptr && tls_->has_unsent())) {
    const int flags = until_ns - now_ns() < kSecond ? MSG_DONTWAIT : 0;
    const ssize_t count = put(flags);
    if (count >= 0) {
      out_.drop_front(static_cast<std::size_t>(count));
      // With TLS a part has been sent as a whole.
      if (tls_ != nullptr ? !tls_->has_unsent() : out_.is_empty()) {
        if (!out_.is_empty() && now_ns() >= until_ns) return Result::timeout;
        continue;
      }
      errno = EAGAIN;  // the socket is full, or a signal came
    }
    if (Result end = after_error(until_ns, POLLOUT); end != Result::ok) return end;
  }
  return Result::ok;
}

Link::Result Link::receive(int64_t until_ns, std::size_t most_bytes) {
  // Read more bytes for a long reply.
  const std::size_t asked = std::min(std::max(in_.size(), kReadBytes), most_bytes);
  char* into = in_.space(asked);
  ssize_t count = look(into, asked);
  while (true) {
    if (count > 0) in_.added(static_cast<std::size_t>(count));
    if (count >= 0) return count > 0 ? Result::ok : Result::closed;
    if (Result end = after_error(until_ns, POLLIN); end != Result::ok) return end;
    count = get(into, asked, until_ns - now_ns() < kSecond ? MSG_DONTWAIT : 0);
  }
}

ssize_t Link::put(int flags) {
  if (tls_ == nullptr) return send(fd_, out_.data(), out_.size(), MSG_NOSIGNAL | flags);
  // No more than goes to the socket in one call, so that the deadline is looked at in between.
  const iovec part{const_cast<char*>(out_.data()), std::min(out_.size(), kPartBytes)};
  return tls_->write(&part, 1, flags);
}

ssize_t Link::get(char* into, std::size_t asked, int flags) {
  if (tls_ == nullptr) return recv(fd_, into, asked, flags);
  const iovec part{into, asked};
  return tls_->read(&part, 1, flags);
}

// As recv(), but fail with EAGAIN after the spin time.
ssize_t Link::look(char* into, std::size_t asked) {
  const int64_t ends_ns = now_ns() + look_ns_;
  ssize_t count = get(into, asked, MSG_DONTWAIT);
  while (count < 0 && errno == EAGAIN && now_ns() < ends_ns) {
    sched_yield();  // the server may need this core
    count = get(into, asked, MSG_DONTWAIT);
  }
  look_ns_ = count > 0 ? kLongLookNs : std::max(look_ns_ / 2, kShortLookNs);
  return count;
}

// Decide whether to retry, and wait until a retry can succeed.
Link::Result Link::after_error(int64_t until_ns, short events) {
  if (errno == EINTR) return poll_ != nullptr && poll_() ? Result::interrupted : Result::ok;
  if (errno != EAGAIN) return Result::error;
  const int64_t left_ns = until_ns - now_ns();
  if (left_ns <= 0) return Result::timeout;
  if (is_host_lost()) {
    errno = EHOSTDOWN;
    return Result::error;
  }
  // A signal may have come just before the call that has waited for a second.
  if (left_ns > kSecond) return poll_ != nullptr && poll_() ? Result::interrupted : Result::ok;
  pollfd waiting{fd_, events, 0};
  const int ready = poll(&waiting, 1, static_cast<int>(left_ns / 1'000'000) + 1);
  if (ready < 0 && errno == EINTR && poll_ != nullptr && poll_()) return Result::interrupted;
  return Result::ok;
}

// A look may come just after a packet, before its answer can be here, so one look proves nothing.
bool Link::is_host_lost() {
  if (silence_ns_ == kNoLimitNs) return false;
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  const bool is_owed = info.tcpi_unacked > 0 ? info.tcpi_last_ack_recv >= info.tcpi_last_data_sent
                                             : info.tcpi_probes > 0 || info.tcpi_notsent_bytes == 0;
  const int64_t heard_ms = std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv);
  const bool is_silent = is_owed && heard_ms * 1'000'000 >= silence_ns_;
  return std::exchange(was_silent_, is_silent) && is_silent;
}

// Find the ends of the received replies.
Link::Result Link::take() {
  while (!expected_.empty()) {
    if (!is_scanning_) {
      const Expected& next = expected_.front();
      scanner_.start(reply_fields(next.op), kReplyLimits, next.values);
      is_scanning_ = true;
    }
    switch (scanner_.scan(in_.data() + end_, in_.size() - end_)) {
      case Scanner::State::partial: return Result::ok;
      case Scanner::State::bad: return Result::bad;
      case Scanner::State::whole: break;
    }
    is_scanning_ = false;
    starts_.push_back(end_);
    end_ += scanner_.length();
    expected_.pop_front();
  }
  // Further bytes are an error.
  return end_ == in_.size() ? Result::ok : Result::bad;
}

void Link::done() {
  in_.drop_front(end_);
  end_ = 0;
  starts_.clear();
}

}  // namespace unisono::store
