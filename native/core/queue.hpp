// The calls of a group that wait for their turn, and what its progress thread does with them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <mutex>

#include "core/program.hpp"

namespace unisono {

// A call with everything it needs to run. Its owner keeps it until it is over.
struct Job {
  Runner* runner = nullptr;  // nullptr: somebody else runs it
  Program program{};
  Buffers buffers{};
  ReduceFn reduce = nullptr;
  AgreementWords words{};
  int64_t deadline_ns = 0;
  uint64_t seq = 0;      // given by push()
  bool watched = false;  // its end has to be told, because not only waiters want to know
  bool handed = false;   // whoever serves is to tell of its end

  Status run() const;
};

// Whose turn it is: calls run one after another, in the order of their numbers.
//
// Either a caller has the turn, for a call that runs on its own thread, or the queue has: as long as
// something is in it, nobody else gets the turn. Callers hold a lock of theirs in take(), give(),
// push() and close() (Python's), so that these need no atomic operation on the way of a call that
// finds the queue empty; the server, a thread that runs what is queued, needs no such lock.
class Turn {
 public:
  // The next number, and the turn; 0 if it is not free.
  uint64_t take() {
    if (!is_free()) return 0;
    busy_.store(true, std::memory_order_relaxed);
    return ++seq_;
  }
  void give() {
    // release: pairs with the server's look at it
    busy_.store(false, std::memory_order_release);
    if (pending_.load(std::memory_order_relaxed) != 0 || is_closed_) ring();
  }
  bool is_free() const {
    // acquire: pairs with end(); what the last job wrote is to be seen here
    return !busy_.load(std::memory_order_relaxed) && pending_.load(std::memory_order_acquire) == 0;
  }
  // Whether a call runs, here or on the server.
  bool runs() const;

  // Queue a job; it gets the next number.
  uint64_t push(Job* job);
  // Drop what has not begun and let the server come to its end; return the number of the first
  // job that was dropped, 0 if none was.
  uint64_t close();

  enum Reason {
    kClosed,   // it is over
    kIdle,     // jobs have ended, of which nobody was told, and nothing else came for a moment
    kForeign,  // the job has to be run; then finish() it
    kFailed,   // the job has ended badly; do what remains, then finish() it
    kEnded,    // the job, which is watched, has ended well
  };
  struct Served {
    Reason reason;
    uint64_t seq;
    Status status;
  };
  // Run jobs until something has to be done that is not in their programs.
  Served serve();
  // End the job that serve() returned with.
  void finish(uint64_t seq);

  // Whether a job has ended, or never will.
  bool is_over(uint64_t seq) const {
    // acquire: pairs with end()
    return ended_.load(std::memory_order_acquire) >= seq ||
           seq >= dropped_from_.load(std::memory_order_acquire);
  }
  // Have the server told of a job's end; false: it has ended well already.
  bool watch(Job* job);
  // Wait until a job is over; false: it took longer than that.
  bool wait(uint64_t seq, int64_t timeout_ns);
  // Wait until no call runs; to be called after close().
  bool wait_until_still(int64_t timeout_ns);
  // Number of the last call that took the turn or was queued.
  uint64_t last() const { return seq_; }
  // Number of the last job that began.
  uint64_t begun() const { return begun_.load(std::memory_order_relaxed); }

 private:
  Job* next();
  void end(uint64_t seq);
  void ring();

  std::atomic<bool> busy_{false};
  std::atomic<size_t> pending_{0};  // jobs that are not over
  uint64_t seq_ = 0;
  std::atomic<bool> is_closed_{false};
  mutable std::mutex lock_;  // of what follows
  std::deque<Job*> queue_;
  bool running_ = false;
  std::atomic<uint64_t> begun_{0};
  std::atomic<uint64_t> dropped_from_{std::numeric_limits<uint64_t>::max()};
  alignas(128) std::atomic<uint64_t> bell_{0};   // changes when the server has to look again
  std::atomic<uint32_t> listens_{0};             // the server sleeps
  alignas(128) std::atomic<uint64_t> ended_{0};  // number of the last job that has ended
  std::atomic<uint32_t> waiters_{0};             // threads that sleep until it changes
};

}  // namespace unisono
