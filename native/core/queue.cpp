#include "core/queue.hpp"

#include <algorithm>
#include <utility>

#ifdef __linux__
#include <sys/prctl.h>
#endif

#include "core/clock.hpp"
#include "core/futex.hpp"

namespace unisono {

namespace {

// How long the server waits for further tasks before it reports that tasks have ended. Shorter: a
// loop of calls is disturbed. Longer: the owner keeps the memory of ended tasks for that time.
constexpr int64_t kIdleNs = 10'000'000;

// The first sleep of the server after a task; each further one is twice as long. Shorter: it wakes
// for nothing more often. Longer: a task for which no thread waits begins later.
constexpr int64_t kFirstNapNs = 20'000;
// Then a push wakes the server.
constexpr int64_t kLastNapNs = 500'000;
// The longest nap while waiting threads run the tasks. Longer: a task for which no thread waits
// begins later. Shorter: the server takes more of the core on which those threads run.
constexpr int64_t kBesideNapNs = 160'000;

// Have the calling thread wake in time from short sleeps; by default Linux adds 50 us.
void sleep_exactly() {
#ifdef PR_SET_TIMERSLACK
  thread_local bool is_set = false;
  if (!is_set) prctl(PR_SET_TIMERSLACK, 1'000, 0, 0, 0);
  is_set = true;
#endif
}

}  // namespace

Status Task::run(Idler* idler) const {
  if (recorder != nullptr) recorder->start(record);
  const int64_t left_ns = std::max<int64_t>(deadline_ns - now_ns(), 0);
  if (copies != nullptr) copies->fill();
  const Status status = runner->run(program, buffers, reduce, words, left_ns, idler);
  if (status.is_ok()) {
    finish();
    if (copies != nullptr) copies->write_back();
  }
  // Python continues other calls, and ends their records.
  if (recorder != nullptr && status.is_ok()) recorder->end(record, Code::ok);
  return status;
}

bool CallQueue::runs() const {
  return is_running() || owner_.load(std::memory_order_acquire) != 0;  // pairs with give()
}

uint64_t CallQueue::push(Task* task) {
  {
    const std::lock_guard<std::mutex> lock(lock_);
    if (is_closed_) return 0;
    task->seq = seq_ + 1;
    queue_.push_back(task);
    // Not before, because a task that finds no memory must not count.
    ++seq_;
    pending_.fetch_add(1, std::memory_order_relaxed);
  }
  ring();
  return task->seq;
}

uint64_t CallQueue::close() {
  uint64_t first = 0;
  {
    const std::lock_guard<std::mutex> lock(lock_);
    is_closed_ = true;
    if (!queue_.empty()) first = queue_.front()->seq;
    pending_.fetch_sub(queue_.size(), std::memory_order_release);  // pairs with is_free()
    for (Task* task : queue_) task->handed = true;
    queue_.clear();
    // release: pairs with is_over()
    dropped_from_.store(first != 0 ? first : seq_ + 1, std::memory_order_release);
  }
  ring();
  futex_wake_all(ended_);
  return first;
}

CallQueue::Served CallQueue::serve() {
  bool has_run = false;
  int64_t nap_ns = kLastNapNs + 1;
  uint64_t seen_before = bell_.load(std::memory_order_relaxed);
  sleep_exactly();
  while (true) {
    const uint64_t seen = bell_.load(std::memory_order_seq_cst);  // pairs with ring()
    Task* const task = next();
    if (task == nullptr) {
      // A waiting thread may have a task that it gives back.
      if (is_closed_ && !is_running()) return {kClosed, 0, {}};
      if (seen != seen_before) {
        // Tasks have come, and waiting threads run them. A nap costs these threads no wake-up.
        seen_before = seen;
        has_run = true;
        nap_ns = std::min(nap_ns, kBesideNapNs);
      }
      if (nap_ns <= kLastNapNs) {
        // Pairs with ring() and end_nap(), which take the words in the other order: either the load
        // here sees the bell, or end_nap() sees the nap.
        naps_.store(1, std::memory_order_seq_cst);
        if (bell_.load(std::memory_order_seq_cst) == seen) futex_wait(bell_, seen, nap_ns);
        naps_.store(0, std::memory_order_relaxed);
        nap_ns *= 2;
        continue;
      }
      listens_.store(1, std::memory_order_seq_cst);  // pairs with ring(), as above
      if (bell_.load(std::memory_order_seq_cst) == seen) {
        futex_wait(bell_, seen, has_run ? kIdleNs : 1000 * kIdleNs);
      }
      listens_.store(0, std::memory_order_relaxed);
      if (has_run && bell_.load(std::memory_order_seq_cst) == seen) return {kIdle, 0, {}};
      continue;
    }
    if (task->runner == nullptr) return {kForeign, task->seq, {}};
    const Status status = task->has_run ? task->outcome : task->run();
    has_run = true;
    nap_ns = kFirstNapNs;
    const std::lock_guard<std::mutex> lock(lock_);
    const Served served{status.is_ok() ? kEnded : kFailed, task->seq, status};
    if (served.reason == kEnded) {
      const bool reports = task->handed = task->watched;
      end(served.seq);  // the owner may free the task from here on
      if (!reports) continue;
    } else {
      task->handed = true;
    }
    return served;
  }
}

// Take the next task that may run; nullptr: there is none.
Task* CallQueue::next() {
  const std::lock_guard<std::mutex> lock(lock_);
  // acquire: pairs with give()
  if (running_ || owner_.load(std::memory_order_acquire) != 0) return nullptr;
  if (settled_ != nullptr) {
    running_ = true;
    return std::exchange(settled_, nullptr);
  }
  if (queue_.empty()) return nullptr;
  Task* const task = queue_.front();
  queue_.pop_front();
  running_ = true;
  begun_.store(task->seq, std::memory_order_relaxed);
  if (task->runner == nullptr) task->handed = true;
  return task;
}

bool CallQueue::claim(const Task* task) {
  if (!task->can_move) return false;
  const std::lock_guard<std::mutex> lock(lock_);
  // acquire: pairs with give()
  if (running_ || settled_ != nullptr || queue_.empty() || queue_.front() != task ||
      owner_.load(std::memory_order_acquire) != 0) {
    return false;
  }
  queue_.pop_front();
  running_ = true;
  begun_.store(task->seq, std::memory_order_relaxed);
  return true;
}

void CallQueue::settle(Task* task, Status status) {
  {
    const std::lock_guard<std::mutex> lock(lock_);
    if (status.is_ok() && !task->watched) {
      end(task->seq);  // the owner may free the task from here on
      // The server may have looked for the next task while this one ran.
      if (!queue_.empty()) ring();
      return;
    }
    task->has_run = status.code != Code::postponed;
    task->outcome = status;
    settled_ = task;
    running_ = false;
  }
  ring();
  end_nap();
}

void CallQueue::finish(uint64_t seq) {
  const std::lock_guard<std::mutex> lock(lock_);
  end(seq);
}

void CallQueue::end(uint64_t seq) {
  running_ = false;
  // Before `ended_`: a thread that has waited for this task must find the turn free.
  pending_.fetch_sub(1, std::memory_order_release);  // pairs with is_free()
  // Both pair with wait(): either this load sees the waiter, or the waiter sees the end.
  ended_.store(seq, std::memory_order_seq_cst);
  if (waiters_.load(std::memory_order_seq_cst) != 0) futex_wake_all(ended_);
  if (is_closed_) ring();
}

bool CallQueue::watch(Task* task) {
  const std::lock_guard<std::mutex> lock(lock_);
  if (is_over(task->seq)) return task->handed;
  task->watched = true;
  return true;
}

bool CallQueue::wait(uint64_t seq, int64_t timeout_ns) {
  const int64_t deadline_ns = now_ns() + timeout_ns;
  if (!is_over(seq)) end_nap();
  while (!is_over(seq)) {
    waiters_.fetch_add(1, std::memory_order_seq_cst);  // pairs with end(), as the next load
    const uint64_t seen = ended_.load(std::memory_order_seq_cst);
    const int64_t left_ns = std::min(deadline_ns - now_ns(), kSliceNs);
    if (!is_over(seq) && left_ns > 0) futex_wait(ended_, seen, left_ns);
    waiters_.fetch_sub(1, std::memory_order_relaxed);
    if (left_ns <= 0) return is_over(seq);
  }
  return true;
}

bool CallQueue::wait_until_still(int64_t timeout_ns) {
  const int64_t deadline_ns = now_ns() + timeout_ns;
  while (runs()) {
    const uint64_t seen = bell_.load(std::memory_order_seq_cst);  // pairs with ring()
    if (now_ns() >= deadline_ns) return false;
    if (runs()) futex_wait(bell_, seen, kSliceNs);
  }
  return true;
}

void CallQueue::end_nap() {
  if (naps_.load(std::memory_order_seq_cst) != 0) futex_wake_all(bell_);  // pairs with serve()
}

void CallQueue::ring() {
  bell_.fetch_add(1, std::memory_order_seq_cst);  // pairs with serve(), as the next load
  if (listens_.load(std::memory_order_seq_cst) != 0 || is_closed_) futex_wake_all(bell_);
}

}  // namespace unisono
