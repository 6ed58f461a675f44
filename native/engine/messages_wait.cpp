// Waiting for sends and receives, and who makes progress meanwhile.
#include <algorithm>

#include <sched.h>

#include "clock.hpp"
#include "futex.hpp"
#include "messages.hpp"

namespace unisono {

namespace {

// How often a long wait says that it is stuck, after the first time.
constexpr int64_t kStuckNs = 1'000'000'000;

}  // namespace

// Wait for an operation whose memory is the caller's: it ends here in any case.
void Messages::await(Op& op, int64_t timeout_ns, Lock& lock) {
  const Code reason = wait_for(&op, timeout_ns, lock);
  if (!op.done) withdraw(op, reason);
  hand_over();
}

bool Messages::is_over(const Op* op) const {
  // acquire: pairs with finish()
  return op == nullptr ? queued_sends_ == 0 : op->done.load(std::memory_order_acquire);
}

// Make progress until `op` is done, or nothing is left to send if it is nullptr.
Code Messages::wait_for(const Op* op, int64_t timeout_ns, Lock& lock) {
  ++waiters_;
  if (server_sleeps_) bells().server_wants.store(kFullRings, std::memory_order_relaxed);
  lock.unlock();
  for (int round = 0; round < kYields; ++round) {
    for (int i = 0; i < spin_; ++i) {
      if (lock.try_lock()) {
        progress();
        if (is_over(op)) {
          --waiters_;
          return Code::ok;
        }
        settle();
        lock.unlock();
      }
      relax();
    }
    sched_yield();
  }
  const Code reason = wait_slowly(op, timeout_ns);
  lock.lock();
  --waiters_;
  return reason;
}

Code Messages::wait_slowly(const Op* op, int64_t timeout_ns) {
  const int64_t deadline_ns = now_ns() + timeout_ns;
  int64_t look_ns = now_ns() + kSliceNs;
  int64_t tell_ns = look_ns;
  while (true) {
    bells().sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint64_t seen = bells().waiters.load(std::memory_order_seq_cst);
    full_fence();
    {
      const Lock lock(lock_);
      ask_for_room();
      progress();
      settle();
    }
    const int64_t left_ns = deadline_ns - now_ns();
    if (!is_over(op) && left_ns > 0) {
      futex_wait(bells().waiters, seen, std::min(left_ns, kSliceNs));
    }
    bells().sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (is_over(op)) return Code::ok;
    const int64_t now = now_ns();
    if (now >= deadline_ns) return Code::timeout;
    if (now < look_ns) continue;
    look_ns = now + kSliceNs;
    if (poll_ && poll_()) return Code::interrupted;
    if (stuck_ && now >= tell_ns) {
      tell_ns = now + kStuckNs;
      Lock lock(lock_);
      const std::vector<int> ranks = awaited_ranks(op);
      lock.unlock();
      stuck_(ranks, op == nullptr || op->is_send);
    }
  }
}

// Whom a wait depends on.
std::vector<int> Messages::awaited_ranks(const Op* op) {
  if (op != nullptr && op->peer >= 0) return {op->peer};
  if (op != nullptr) return *op->among;
  std::vector<int> ranks;
  for (int to = 0; to < ranks_; ++to) {
    if (!peer(to).sends.empty()) ranks.push_back(to);
  }
  return ranks;
}

Outcome Messages::wait(uint64_t number, int64_t timeout_ns) {
  Lock lock(lock_);
  const auto found = open_.find(number);
  if (found == open_.end() || found->second->awaited) return {number, Code::unknown};
  Op& op = *found->second;
  op.awaited = true;
  const Code reason = op.done ? Code::ok : wait_for(&op, timeout_ns, lock);
  op.awaited = false;
  const Outcome outcome = op.done ? taken(number) : Outcome{number, reason};
  hand_over();
  settle();
  return outcome;
}

std::vector<Outcome> Messages::serve(std::vector<int>* stuck) {
  Lock lock(lock_);
  while (true) {
    progress();
    for (const int source : active_) {
      // A long message into a quiet receive: whoever asks for it is busy elsewhere.
      Op* const into = peer(source).into;
      if (into != nullptr && into->quiet && waiters_ == 0) watch(*into);
    }
    settle();
    std::vector<Outcome> outcomes;
    for (const uint64_t number : std::vector<uint64_t>(ended_)) outcomes.push_back(taken(number));
    if (!outcomes.empty() || closed_) return outcomes;
    const uint64_t seen = bells().server.load(std::memory_order_seq_cst);
    server_sleeps_ = true;
    bells().server_wants.store(kFullRings, std::memory_order_seq_cst);
    hand_over();
    if (ended_.empty()) {
      const int64_t limit_ns = queued_sends_ != 0 ? kSliceNs : 1000 * kSliceNs;
      lock.unlock();
      futex_wait(bells().server, seen, limit_ns);
      lock.lock();
    }
    server_sleeps_ = false;
    bells().server_wants.store(kNothing, std::memory_order_relaxed);
    if (queued_sends_ != 0 && now_ns() - stuck_told_ns_ > kStuckNs) {
      stuck_told_ns_ = now_ns();
      *stuck = awaited_ranks(nullptr);
      return {};
    }
  }
}

// Have the server thread woken for what is still open, now that nobody here looks after it.
void Messages::hand_over() {
  if (!server_sleeps_ || waiters_ != 0 || (watched_ == 0 && queued_sends_ == 0)) return;
  bells().server_wants.store(kEverything, std::memory_order_relaxed);
  // Either a sender sees that, or what it wrote is seen here.
  full_fence();
  ask_for_room();
  progress();
}

// Tell the other threads of this rank what has ended.
void Messages::settle() {
  if (!anything_ended_) return;
  anything_ended_ = false;
  if (bells().sleepers.load(std::memory_order_seq_cst) != 0) change_and_wake(bells().waiters);
  const bool due = (server_is_due_ && !ended_.empty()) || closed_;
  server_is_due_ = false;
  if (server_sleeps_ && due) change_and_wake(bells().server);
}

}  // namespace unisono
