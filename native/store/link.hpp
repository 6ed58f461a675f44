// The client's end of a connection: sends what was prepared, receives as many replies as that
// asks for. The socket is blocking, and stays its owner's.
#pragma once

#include <cstdint>
#include <deque>

#include <sys/types.h>

#include "store/buffer.hpp"
#include "store/wire.hpp"

namespace unisono::store {

class Link {
 public:
  enum class Result { ok, timeout, closed, error, bad, interrupted };

  explicit Link(int fd);

  // Forgets what an exchange before this one left to send.
  void begin();
  // Where to write requests, before `expect` and `exchange`.
  Buffer& out() { return out_; }
  // Says that a request of this kind is in `out`; `values` is the number of keys of multi_get.
  void expect(Opcode op, uint64_t values = 0) { expected_.push_back({op, values}); }
  // Returns once all replies are there: one after another at `reply(i)`. After `error`, errno.
  Result exchange(int64_t timeout_ns);
  const char* reply(std::size_t index) const { return in_.data() + starts_[index]; }
  // Forgets the replies.
  void done();

  // Asked when a signal came; true ends the wait.
  void set_poll(bool (*poll)()) { poll_ = poll; }

 private:
  struct Expected {
    Opcode op;
    uint64_t values;
  };

  Result send_all(int64_t until_ns);
  Result receive(int64_t until_ns);
  Result take();
  ssize_t look(char* into, std::size_t asked);
  Result after_error(int64_t until_ns, short events);

  // How long a reply is looked for before the thread sleeps: waking up takes longer than most
  // replies do.
  static constexpr int64_t kLongLookNs = 50'000;

  const int fd_;
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
