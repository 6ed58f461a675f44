#include "core/team.hpp"

#include <algorithm>
#include <csignal>
#include <exception>

#include <pthread.h>
#include <sched.h>

#include "core/clock.hpp"
#include "core/finally.hpp"
#include "core/futex.hpp"

namespace unisono {

namespace {

// Parts are multiples of this many elements. So they fill whole cache lines. And a kernel that does
// its last elements one by one, where the payload of a NaN may differ, does so in the last part only.
constexpr size_t kUnit = 64;
constexpr size_t kLargestElement = 16;  // what is larger is a row of a copy

// Smaller parts: taking them costs more than they save. More parts than threads, so that a thread
// that comes late leaves its share to the others.
constexpr size_t kPartBytes = 32 * 1024;
constexpr size_t kPartsPerThread = 4;

// How long a helper looks for the next loop. A call has a loop per piece, and to wake a thread for
// each would take as long as a loop. Longer: a rank that waits for others burns a second core.
constexpr int64_t kAwakeNs = 50'000;

// How long the caller looks whether the last parts are done: longer than a part takes.
constexpr int64_t kLastPartsNs = 50'000;

constexpr int64_t kForeverNs = 3'600'000'000'000;

}  // namespace

ThreadTeam::ThreadTeam(int threads) : threads_(std::clamp(threads, 1, kMostThreads)) {
  helpers_.reserve(static_cast<size_t>(threads_ - 1));
}

void ThreadTeam::run(Loop loop, size_t itemsize) {
  const size_t most = kPartsPerThread * static_cast<size_t>(threads_);
  const size_t parts = std::min(loop.count * itemsize / kPartBytes, most);
  if (parts < 2) return loop.part(loop.context, 0, loop.count);
  const size_t unit = itemsize <= kLargestElement ? kUnit : 1;
  loop.size = (loop.count / parts + unit) / unit * unit;
  const uint64_t left = (loop.count + loop.size - 1) / loop.size;
  if (left < 2 || !begin()) return loop.part(loop.context, 0, loop.count);
  loop_ = loop;
  done_.store(0, std::memory_order_relaxed);
  const uint64_t number = (open_.load(std::memory_order_relaxed) >> kPartBits) + 1;
  change(number << kPartBits | left);
  uint64_t mine = 0;
  while (do_part()) ++mine;
  wait_for_parts(left - mine);
  give_back();
}

// Take the team for a loop. False: another loop has it, or it has ended.
bool ThreadTeam::begin() {
  if (fork_guard_.is_forked()) return false;
  int free = kFree;
  // acquire: pairs with give_back(), so that loops come one after another
  if (!use_.compare_exchange_strong(free, kTaken, std::memory_order_acquire)) return false;
  if (!has_started_) start_threads();
  if (!helpers_.empty()) return true;
  give_back();
  return false;
}

void ThreadTeam::give_back() {
  use_.store(kFree, std::memory_order_release);  // pairs with begin() and close()
}

void ThreadTeam::start_threads() {
  has_started_ = true;
  // Signals must reach Python's main thread: taken here, they would not interrupt its wait.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const Finally unblock([&before] { pthread_sigmask(SIG_SETMASK, &before, nullptr); });
  try {
    for (int i = 1; i < threads_; ++i) helpers_.emplace_back(&ThreadTeam::serve, this);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // Fewer threads: the system allows no more, or has no memory for them.
  }
}

// Do a part of the current loop that nobody has taken. False: there is none.
bool ThreadTeam::do_part() {
  uint64_t seen = open_.load(std::memory_order_relaxed);
  do {
    if ((seen & kPartMask) == 0 || seen == kClosed) return false;
    // acquire: pairs with change(), so that the loop is the one of this number. It stays while a
    // part of it is not done.
  } while (!open_.compare_exchange_weak(seen, seen - 1, std::memory_order_acquire,
                                        std::memory_order_relaxed));
  const size_t left = (seen & kPartMask) - 1;  // the last part of the loop is taken first
  const Loop& loop = loop_;
  loop.part(loop.context, left * loop.size, std::min(loop.count, (left + 1) * loop.size));
  return true;
}

// A helper has done a part.
void ThreadTeam::finish_part() {
  // seq_cst: pairs with wait_for_parts(). Either this load sees that the caller sleeps, or the
  // caller sees the part.
  done_.fetch_add(1, std::memory_order_seq_cst);
  if (caller_sleeps_.load(std::memory_order_seq_cst)) futex_wake_all(done_);
}

void ThreadTeam::wait_for_parts(uint64_t parts) {
  // acquire: pairs with finish_part(), so that the caller sees what the parts have written
  if (done_.load(std::memory_order_acquire) == parts) return;
  const int64_t until_ns = now_ns() + kLastPartsNs;
  while (now_ns() < until_ns) {
    if (done_.load(std::memory_order_acquire) == parts) return;  // as above
    cpu_pause();
  }
  caller_sleeps_.store(true, std::memory_order_seq_cst);  // pairs with finish_part(), as the load
  uint64_t seen = 0;
  while ((seen = done_.load(std::memory_order_seq_cst)) != parts) {
    futex_wait(done_, seen, kForeverNs);
  }
  caller_sleeps_.store(false, std::memory_order_relaxed);
}

// Change `open_`, and wake the threads that sleep on it.
void ThreadTeam::change(uint64_t value) {
  // seq_cst: pairs with sleep(). Either this load sees the sleeper, or the sleeper sees the value.
  // As a release store it pairs with do_part().
  open_.store(value, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) futex_wake_all(open_);
}

// Sleep until there is a part to do. False: the team has ended.
bool ThreadTeam::sleep() {
  sleepers_.fetch_add(1, std::memory_order_seq_cst);  // pairs with change(), as the load
  const uint64_t seen = open_.load(std::memory_order_seq_cst);
  if ((seen & kPartMask) == 0) futex_wait(open_, seen, kForeverNs);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
  return open_.load(std::memory_order_relaxed) != kClosed;
}

void ThreadTeam::serve() {
  pthread_setname_np(pthread_self(), "unisono-team");
  int64_t until_ns = 0;
  while (true) {
    bool has_worked = false;
    while (do_part()) {
      finish_part();
      has_worked = true;
    }
    const int64_t now = now_ns();
    if (has_worked) until_ns = now + kAwakeNs;
    if (now >= until_ns && !sleep()) return;
    cpu_pause();
  }
}

void ThreadTeam::close() {
  if (fork_guard_.is_forked()) {
    // The threads do not exist in the child, where one of the parent's may have the team for ever.
    for (std::thread& helper : helpers_) helper.detach();
    helpers_.clear();
    return;
  }
  int free = kFree;
  // acquire: pairs with give_back(), so that the threads are those that the last loop has started
  while (!use_.compare_exchange_strong(free, kEnded, std::memory_order_acquire)) {
    if (free == kEnded) return;
    free = kFree;
    sched_yield();  // a loop takes microseconds
  }
  change(kClosed);
  for (std::thread& helper : helpers_) helper.join();
  helpers_.clear();
}

}  // namespace unisono
