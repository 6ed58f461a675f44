// The queue of a group's calls, and how a thread serves it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <mutex>

#include <pthread.h>

#include "core/program.hpp"
#include "core/recorder.hpp"

namespace unisono {

// The copies that stand for arrays of a task.
class TaskCopies {
 public:
  // Copy the caller's values into the copies.
  virtual void fill() const = 0;
  // Copy results back.
  virtual void write_back() const = 0;

 protected:
  ~TaskCopies() = default;
};

// A call with everything that is needed to run it. The owner keeps the task until it is over.
struct Task {
  Runner* runner = nullptr;  // nullptr: Python runs the call
  Program program{};
  Buffers buffers{};
  ReduceFns reduce;
  AgreementWords words{};
  int64_t deadline_ns = 0;
  uint64_t seq = 0;       // set by push()
  bool watched = false;   // serve() must report its end, because not only waiters need it
  bool handed = false;    // the thread that serves reports the end of the task
  bool can_move = false;  // a waiting thread may run the task; see CallQueue::claim()
  bool has_run = false;   // a waiting thread has run it, with the end `outcome`
  Status outcome{};
  Recorder* recorder = nullptr;  // nullptr: the call is not recorded
  uint64_t record = 0;
  DivideFn divide = nullptr;  // for AVG
  int divisor = 0;
  const TaskCopies* copies = nullptr;  // nullptr: the task uses all arrays in place

  Status run(Idler* idler = nullptr) const;
  // Compute the result from what the program has left in OUTPUT.
  void finish() const {
    if (divide != nullptr) {
      char* const values = buffers.output;
      const auto itemsize = static_cast<size_t>(buffers.itemsize);
      share(runner->team_for(buffers.output_count * buffers.itemsize),
            static_cast<size_t>(buffers.output_count), itemsize, [&](size_t begin, size_t end) {
              divide(values + begin * itemsize, end - begin, divisor);
            });
    }
  }
};

// The right of a call to run: the calls of a group run one after another, in the order of their
// numbers.
//
// Either a caller has the turn, for a call that runs on the caller's thread, or the queue has it.
// While the queue holds a task, no caller gets the turn. Callers of take(), give(), push() and
// close() hold a lock of their own (Python's). So a call that finds the queue empty needs no atomic
// read-modify-write operation. The server, a thread that runs queued tasks, needs no such lock.
class CallQueue {
 public:
  static uintptr_t this_thread() { return static_cast<uintptr_t>(pthread_self()); }
  // Take the turn for the calling thread, whose identity the caller knows, and return the next
  // number, or 0 if the turn is not free.
  uint64_t take(uintptr_t thread) {
    if (!is_free()) return 0;
    owner_.store(thread, std::memory_order_relaxed);  // relaxed: seen by those with the same lock
    return ++seq_;
  }
  uint64_t take() { return take(this_thread()); }
  // Whether the calling thread has the turn: it is in a signal handler then.
  bool is_mine() const { return owner_.load(std::memory_order_relaxed) == this_thread(); }
  void give() {
    // release: pairs with the server's load in next()
    owner_.store(0, std::memory_order_release);
    if (pending_.load(std::memory_order_relaxed) != 0 || is_closed_) {
      ring();
      end_nap();
    }
  }
  bool is_free() const {
    // acquire: pairs with end(), so that this thread sees what the last task wrote
    return owner_.load(std::memory_order_relaxed) == 0 &&
           pending_.load(std::memory_order_acquire) == 0;
  }
  // Whether a call runs, on a caller's thread or for the queue.
  bool runs() const;

  // Queue a task, set its number and return the number; 0 if the queue is closed.
  uint64_t push(Task* task);
  // Drop the tasks that have not begun, and end the server. Returns the number of the first dropped
  // task, or 0 if there was none.
  uint64_t close();

  enum Reason {
    kClosed,   // the queue was closed
    kIdle,     // unreported tasks have ended, and no further task came for a moment
    kForeign,  // the caller of serve() must run the task and then call finish()
    kFailed,   // the task has failed; the caller cleans up and then calls finish()
    kEnded,    // the task, which is watched, has ended well
  };
  struct Served {
    Reason reason;
    uint64_t seq;
    Status status;
  };
  // Run tasks until something must be done that is not in a program.
  Served serve();
  // End the task with which serve() returned.
  void finish(uint64_t seq);
  // Take a task, which the calling thread must run and settle(). False: another thread does.
  //
  // To hand a small task to the server and to wake up takes ten times as long as to run it.
  bool claim(const Task* task);
  // The run of a claimed task has ended. The server reports the end, or runs the task again if it was
  // postponed.
  void settle(Task* task, Status status);

  // Whether a task has ended or was dropped.
  bool is_over(uint64_t seq) const {
    // acquire: pairs with end()
    return ended_.load(std::memory_order_acquire) >= seq ||
           seq >= dropped_from_.load(std::memory_order_acquire);
  }
  // Have serve() report the end of a task. False: the task has ended well already.
  bool watch(Task* task);
  // Wait until a task is over. False: the time-out came first.
  bool wait(uint64_t seq, int64_t timeout_ns);
  // Wait until no call runs. Called after close().
  bool wait_until_still(int64_t timeout_ns);
  // The number of the last call that took the turn or was queued.
  uint64_t last() const { return seq_; }
  // The number of the last queued task that began.
  uint64_t begun() const { return begun_.load(std::memory_order_relaxed); }

 private:
  Task* next();
  bool is_running() const {
    const std::lock_guard<std::mutex> lock(lock_);
    return running_ || settled_ != nullptr;
  }
  void end(uint64_t seq);
  // Have the server look again, soon if it naps. To wake it takes the caller several microseconds.
  void ring();
  // Wake the server from a nap, because a thread waits.
  void end_nap();

  std::atomic<uintptr_t> owner_{0};  // the thread that runs a call as its caller; 0: none
  std::atomic<size_t> pending_{0};   // tasks that are not over
  uint64_t seq_ = 0;
  std::atomic<bool> is_closed_{false};
  mutable std::mutex lock_;  // guards queue_, settled_ and running_
  std::deque<Task*> queue_;
  Task* settled_ = nullptr;  // a claimed task that the server must continue
  bool running_ = false;
  std::atomic<uint64_t> begun_{0};
  std::atomic<uint64_t> dropped_from_{std::numeric_limits<uint64_t>::max()};
  alignas(128) std::atomic<uint64_t> bell_{0};   // changes when the server must look again
  std::atomic<uint32_t> listens_{0};             // whether the server sleeps until it is woken
  std::atomic<uint32_t> naps_{0};                // whether it sleeps and looks again by itself
  alignas(128) std::atomic<uint64_t> ended_{0};  // number of the last task that has ended
  std::atomic<uint32_t> waiters_{0};             // threads that sleep until ended_ changes
};

}  // namespace unisono
