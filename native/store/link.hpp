// The client's end of a connection: sends prepared requests and receives their replies. The socket
// is blocking, and the caller owns it.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <memory>

#include <sys/types.h>

#include "store/buffer.hpp"
#include "store/wire.hpp"
#include "tls/session.hpp"

namespace unisono::store {

class Link {
 public:
  enum class Result { ok, timeout, closed, error, bad, interrupted };
  static constexpr std::size_t kMostReadBytes = 4 << 20;
  static constexpr int64_t kNoLimitNs = std::numeric_limits<int64_t>::max();

  // The server's host may be silent for `silence_ns` although it owes an answer; then the result is
  // an error, EHOSTDOWN. core/base/net/silence.py has the same rule.
  // `tls`: what the bytes pass through; nullptr: they are plain.
  explicit Link(int fd, int64_t silence_ns = kNoLimitNs, std::shared_ptr<TlsSession> tls = nullptr);

  // Forget unsent bytes of an earlier exchange.
  void begin();
  // Where to write requests before expect() and exchange().
  Buffer& out() { return out_; }
  // Record that `out` has a request of this kind. `values`: the number of keys of a multi_get.
  void expect(Opcode op, uint64_t values = 0) { expected_.push_back({op, values}); }
  // Send the requests and receive all replies: reply(i) has the i-th. Result::error: errno has the
  // reason. Reads at most `most_bytes` at a time.
  Result exchange(int64_t timeout_ns, std::size_t most_bytes = kMostReadBytes);
  const char* reply(std::size_t index) const { return in_.data() + starts_[index]; }
  // Forget the replies.
  void done();

  // Set a function that is called after a signal; true ends the wait.
  void set_poll(bool (*poll)()) { poll_ = poll; }
  // Why TLS has failed; empty: it has not.
  std::string why() const { return tls_ == nullptr ? std::string() : tls_->why(); }

 private:
  struct Expected {
    Opcode op;
    uint64_t values;
  };

  Result send_all(int64_t until_ns);
  Result receive(int64_t until_ns, std::size_t most_bytes);
  Result take();
  ssize_t put(int flags);
  ssize_t get(char* into, std::size_t asked, int flags);
  ssize_t look(char* into, std::size_t asked);
  Result after_error(int64_t until_ns, short events);
  bool is_host_lost();

  // How long the thread spins for a reply before it sleeps. To wake takes longer than most replies.
  static constexpr int64_t kLongLookNs = 50'000;

  const int fd_;
  const int64_t silence_ns_;
  const std::shared_ptr<TlsSession> tls_;
  bool was_silent_ = false;
  int64_t look_ns_ = kLongLookNs;
  bool (*poll_)() = nullptr;
  Buffer out_;
  Buffer in_;
  std::deque<Expected> expected_;  // replies that have not come yet
  std::vector<std::size_t> starts_;
  std::size_t end_ = 0;  // of the last whole reply
  Scanner scanner_;
  bool is_scanning_ = false;
};

}  // namespace unisono::store
