#include "store/link.hpp"

#include <algorithm>
#include <cerrno>

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/time.h>

#include "core/clock.hpp"

namespace unisono::store {

namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr std::size_t kReadBytes = 4096;

// After a look in vain the next one is half as long, so that whoever waits for others sleeps.
constexpr int64_t kShortLookNs = 3'000;
constexpr std::size_t kMostReadBytes = 4 << 20;

}  // namespace

Link::Link(int fd) : fd_(fd) {
  // Blocking calls come back once a second to look at the deadline, so that a wait is one system
  // call; one that ends sooner costs a second one.
  const timeval second{1, 0};
  setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &second, sizeof second);
  setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &second, sizeof second);
}

void Link::begin() { out_.drop_front(out_.size()); }

Link::Result Link::exchange(int64_t timeout_ns) {
  const int64_t until_ns = now_ns() + timeout_ns;
  Result end = send_all(until_ns);
  if (end == Result::ok) end = take();
  while (end == Result::ok && !expected_.empty()) {
    end = receive(until_ns);
    if (end == Result::ok) end = take();
  }
  return end;
}

Link::Result Link::send_all(int64_t until_ns) {
  while (!out_.is_empty()) {
    const int flags = until_ns - now_ns() < kSecond ? MSG_DONTWAIT : 0;
    const ssize_t count = send(fd_, out_.data(), out_.size(), MSG_NOSIGNAL | flags);
    if (count >= 0) {
      out_.drop_front(static_cast<std::size_t>(count));
    } else if (Result end = after_error(until_ns, POLLOUT); end != Result::ok) {
      return end;
    }
  }
  return Result::ok;
}

Link::Result Link::receive(int64_t until_ns) {
  // More for a reply that turns out to be long.
  const std::size_t asked = std::clamp(in_.size(), kReadBytes, kMostReadBytes);
  char* into = in_.space(asked);
  ssize_t count = look(into, asked);
  while (true) {
    if (count > 0) in_.added(static_cast<std::size_t>(count));
    if (count >= 0) return count > 0 ? Result::ok : Result::closed;
    if (Result end = after_error(until_ns, POLLIN); end != Result::ok) return end;
    count = recv(fd_, into, asked, until_ns - now_ns() < kSecond ? MSG_DONTWAIT : 0);
  }
}

// As recv(), but comes back with EAGAIN when looking any longer is not worth it.
ssize_t Link::look(char* into, std::size_t asked) {
  const int64_t ends_ns = now_ns() + look_ns_;
  ssize_t count = recv(fd_, into, asked, MSG_DONTWAIT);
  while (count < 0 && errno == EAGAIN && now_ns() < ends_ns) {
    sched_yield();  // the server may be waiting for this very core
    count = recv(fd_, into, asked, MSG_DONTWAIT);
  }
  look_ns_ = count > 0 ? kLongLookNs : std::max(look_ns_ / 2, kShortLookNs);
  return count;
}

// Decides whether to try again, and waits until that makes sense.
Link::Result Link::after_error(int64_t until_ns, short events) {
  if (errno == EINTR) return poll_ != nullptr && poll_() ? Result::interrupted : Result::ok;
  if (errno != EAGAIN) return Result::error;
  const int64_t left_ns = until_ns - now_ns();
  if (left_ns <= 0) return Result::timeout;
  if (left_ns > kSecond) return Result::ok;
  pollfd waiting{fd_, events, 0};
  const int ready = poll(&waiting, 1, static_cast<int>(left_ns / 1'000'000) + 1);
  if (ready < 0 && errno == EINTR && poll_ != nullptr && poll_()) return Result::interrupted;
  return Result::ok;
}

// Finds the ends of the replies that are there.
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
  // More than was asked for.
  return end_ == in_.size() ? Result::ok : Result::bad;
}

void Link::done() {
  in_.drop_front(end_);
  end_ = 0;
  starts_.clear();
}

}  // namespace unisono::store
