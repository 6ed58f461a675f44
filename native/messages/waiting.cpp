// Waits for sends and receives, and which thread makes progress meanwhile.
#include <algorithm>
#include <utility>

#include <sched.h>

#include "core/clock.hpp"
#include "core/finally.hpp"
#include "core/futex.hpp"
#include "messages/messages.hpp"

namespace unisono {

namespace {

// How often a long wait reports that it is stuck, after the first time.
constexpr int64_t kStuckNs = 1'000'000'000;

// A look at a wire is a system call, so a wait also limits the time of its looks. At wires on which
// the wait does not depend it looks only now and then.
constexpr int64_t kSpinNs = 50'000;
constexpr int kLookAround = 16;

// Some kernels process packets on a thread that needs a core. A message then arrives only after its
// receiver sleeps. So a wait spins for half the time of the last wait if that spin was in vain.
// Every 32nd wait spins for the full time, to detect whether the situation has changed.
constexpr uint32_t kHopeful = 32;

// A few looks at a wire take as long as 100 looks at a ring. After them other threads may need the
// core.
constexpr SpinPolicy kAtWires{8, 0, 64};

// To sleep and wake once per ring multiplies the time of a large message. It costs most if other
// processes compute on the core that this thread must get back. So a wait spins longer here than
// for the pieces of a collective.
constexpr SpinPolicy kAtRings{100, 32, 64};

// How long after a wait the server ignores the wires, because in a loop of synchronous calls each
// message would wake two threads. It then looks again, at growing intervals.
constexpr int64_t kServerPauseNs = 1'000'000;
constexpr int64_t kServerSleepNs = 4'000'000;

}  // namespace

// Wait for an operation in the caller's memory. The operation has ended on return.
void Messages::wait_to_end(Operation& op, int64_t timeout_ns, Lock& lock) {
  const Code reason = wait_for(&op, timeout_ns, lock);
  if (!op.done) {
    leave_message(op);
    cancel_with(op, reason);
  }
  // The message may have come at that moment, but the caller must see the signal.
  if (reason == Code::interrupted) op.code = reason;
  delegate_to_server();
}

bool Messages::is_over(const Operation* op) const {
  // acquire: pairs with finish()
  return op == nullptr ? queued_sends_ == 0 : op->done.load(std::memory_order_acquire);
}

// Make progress until `op` is done. nullptr: until no send is queued.
Code Messages::wait_for(const Operation* op, int64_t timeout_ns, Lock& lock) {
  ++waiters_;
  const Finally ended([&] {
    if (!lock.owns_lock()) lock.lock();
    --waiters_;
  });
  attends_ = false;
  if (server_sleeps_) bells().server_wants.store(kFullRings, std::memory_order_relaxed);
  if (server_polls_) bells().polls.store(0, std::memory_order_relaxed);
  report_wires(lock);
  if (++waits_ % kHopeful == 0) spin_ns_ = kSpinNs;
  const int64_t spin_ends_ns = wired_.empty() ? INT64_MAX : now_ns() + spin_ns_;
  const Core* const core = core_of(op);
  lock.unlock();
  Code reason = Code::ok;
  const bool came_soon = spin(op, spin_ends_ns, core, lock);
  if (!came_soon) {
    reason = wait_slowly(op, timeout_ns, core);
    lock.lock();
  }
  if (!wired_.empty()) last_wait_ns_ = now_ns();
  spin_ns_ = came_soon ? kSpinNs : spin_ns_ / 2;
  return reason;
}

// Spin until `op` is done; the lock is then held. False: it may take long.
bool Messages::spin(const Operation* op, int64_t ends_ns, const Core* core, Lock& lock) {
  const SpinPolicy& patience = ends_ns != INT64_MAX ? kAtWires : is_crowded_ ? kCrowded : kAtRings;
  for (int round = 1; round <= patience.busy_rounds + patience.yield_rounds; ++round) {
    for (int i = 0; i < patience.spins; ++i) {
      if (lock.try_lock()) {
        // While a message moves its waiter stays awake. To sleep and wake for every ring of a large
        // message takes three times as long.
        if (progress(i % kLookAround == 0 ? nullptr : op)) round = 1;
        if (is_over(op)) return true;
        notify_ended();
        lock.unlock();
      }
      cpu_pause();
    }
    const int64_t now = now_ns();
    if (now > ends_ns) return false;
    // wait_slowly() checks deadlines, signals and lost ranks.
    ends_ns = std::min(ends_ns, now + kSliceNs);
    if (is_on_this_core(core) || round > patience.busy_rounds) sched_yield();
  }
  return false;
}

// The word in which the peer of an operation records its core; nullptr: unknown.
const Messages::Core* Messages::core_of(const Operation* op) {
  const Peer* other = op == nullptr || op->peer < 0 ? nullptr : &peer(op->peer);
  return other == nullptr || other->outbox == nullptr ? nullptr : &other->outbox->head().core;
}

// Whether the peer cannot be running because this thread runs on the same core. This is a guess.
bool Messages::is_on_this_core(const Core* core) {
  const uint32_t here = record_core(inbox_.head().core);
  return core != nullptr && here != 0 && core->load(std::memory_order_relaxed) == here;
}

Code Messages::wait_slowly(const Operation* op, int64_t timeout_ns, const Core* core) {
  bool polls = false;
  const Finally ended([&] {
    const Lock lock(lock_);
    takes_all_ = takes_loans_ = false;
    if (polls) end_polling();
  });
  return sleep_until_over(op, timeout_ns, core, &polls);
}

// `polls`: set if this thread becomes the thread that sleeps on wires.
Code Messages::sleep_until_over(const Operation* op, int64_t timeout_ns, const Core* core,
                                bool* polls) {
  const int64_t deadline_ns = now_ns() + timeout_ns;
  int64_t look_ns = now_ns() + kSliceNs;
  int64_t report_ns = look_ns;
  while (true) {
    bells().sleepers.fetch_add(1, std::memory_order_seq_cst);
    bool is_counted = true;
    const auto awake = [&] {
      if (std::exchange(is_counted, false)) {
        bells().sleepers.fetch_sub(1, std::memory_order_relaxed);
      }
    };
    const Finally ended(awake);
    const uint64_t seen = bells().waiters.load(std::memory_order_seq_cst);
    bool goes_on = false;
    {
      Lock lock(lock_);
      *polls = *polls || begin_polling();
      if (*polls) bells().polls.store(1, std::memory_order_seq_cst);
      full_fence();
      ask_for_room();
      goes_on = push_all();
      takes_loans_ = !is_over(op);
      goes_on = (progress() || goes_on) && wired_.empty();
      notify_ended(*polls);
      report_wires(lock);
      *polls ? watch_wires() : repoll();
    }
    if (*polls) awake();
    const int64_t limit_ns = std::min(deadline_ns - now_ns(), kSliceNs);
    if (!is_over(op) && limit_ns > 0 && !goes_on) {
      if (*polls) {
        poll_wires(limit_ns);
      } else {
        // Woken early, perhaps for a message that is about to come; see wake_waiters().
        goes_on = futex_wait(bells().waiters, seen, limit_ns) && !is_crowded_;
      }
    }
    awake();
    Lock kept(lock_, std::defer_lock);
    if (is_over(op) || (goes_on && spin(op, INT64_MAX, core, kept))) return Code::ok;
    const int64_t now = now_ns();
    if (now >= deadline_ns) return Code::timeout;
    if (now < look_ns) continue;
    look_ns = now + kSliceNs;
    // close(), which passes nullptr, ends soon, whatever a signal handler raises.
    if (op != nullptr && poll_ && poll_()) return Code::interrupted;
    Lock lock(lock_);
    takes_all_ = true;  // the message may be behind others in a ring or wire
    if (!stuck_ || now < report_ns) continue;
    report_ns = now + kStuckNs;
    const std::vector<int> ranks = awaited_ranks(op);
    lock.unlock();
    stuck_(ranks, op == nullptr || op->is_send);
  }
}

// The ranks on which a wait depends.
std::vector<int> Messages::awaited_ranks(const Operation* op) {
  if (op != nullptr && op->peer >= 0) return {op->peer};
  if (op != nullptr) return *op->among;
  std::vector<int> ranks;
  for (int to = 0; to < ranks_; ++to) {
    if (!peer(to).sends.empty()) ranks.push_back(to);
  }
  return ranks;
}

Outcome Messages::wait(uint64_t number, int64_t timeout_ns) {
  // Otherwise the child of a fork would take its parent's messages out of the rings.
  if (is_forked()) return {number, Code::unknown};
  Lock lock(lock_);
  const auto found = open_.find(number);
  if (found == open_.end() || found->second->awaited) return {number, Code::unknown};
  Operation& op = *found->second;
  Code reason = Code::ok;
  {
    op.awaited = true;
    const Finally ended([&] { op.awaited = false; });
    if (!op.done) reason = wait_for(&op, timeout_ns, lock);
  }
  // A signal ends the wait, not the message, even if the message came at that moment.
  const bool is_taken = op.done && reason != Code::interrupted;
  if (op.done && !is_taken) {
    note_end(op);
    anything_ended_ = true;
  }
  Outcome outcome = is_taken ? take_outcome(number) : Outcome{number, reason};
  delegate_to_server();
  notify_ended();
  return outcome;
}

std::vector<Outcome> Messages::serve(std::vector<int>* stuck) {
  Lock lock(lock_);
  while (true) {
    progress();
    for (const Peer& from : peers_) {
      // A long message comes into a quiet receive, and its caller is busy elsewhere.
      Operation* const into = from.into;
      if (into != nullptr && into->quiet && waiters_ == 0) watch(*into);
    }
    notify_ended();
    std::vector<Outcome> outcomes;
    for (const uint64_t number : std::vector<uint64_t>(ended_)) {
      outcomes.push_back(take_outcome(number));
    }
    if (!outcomes.empty() || closed_) return outcomes;
    report_wires(lock);
    const uint64_t seen = bells().server.load(std::memory_order_seq_cst);
    server_sleeps_ = true;
    bells().server_wants.store(kFullRings, std::memory_order_seq_cst);
    delegate_to_server();
    if (ended_.empty() && !closed_) server_sleep(seen, lock);
    server_sleeps_ = false;
    bells().server_wants.store(kNothing, std::memory_order_relaxed);
    if (queued_sends_ != 0 && now_ns() - stuck_reported_ns_ > kStuckNs) {
      stuck_reported_ns_ = now_ns();
      *stuck = awaited_ranks(nullptr);
      return {};
    }
  }
}

// Whether operations go on for which no thread waits.
bool Messages::needs_server() const {
  return watched_ != 0 || queued_sends_ != 0 || departing_ != 0 || attends_;
}

void Messages::server_sleep(uint64_t seen, Lock& lock) {
  const bool unattended = !wired_.empty() && needs_server();
  int64_t limit_ns = queued_sends_ != 0 || departing_ != 0 ? kSliceNs : 1000 * kSliceNs;
  const bool waits_elsewhere = waiters_ != 0 || now_ns() - last_wait_ns_ < kServerPauseNs;
  if (unattended && !waits_elsewhere && begin_polling()) {
    server_sleep_ns_ = 0;
    server_polls_ = true;
    bells().server_wants.store(kNothing, std::memory_order_relaxed);
    bells().polls.store(1, std::memory_order_seq_cst);
    full_fence();
    progress();
    notify_ended();
    watch_wires();
    lock.unlock();
    poll_wires(limit_ns);
    lock.lock();
    server_polls_ = false;
    end_polling();
    return;
  }
  if (unattended) {
    server_sleep_ns_ = std::clamp(2 * server_sleep_ns_, kServerPauseNs, kServerSleepNs);
    limit_ns = server_sleep_ns_;
  }
  server_idles_ = !unattended;
  lock.unlock();
  futex_wait(bells().server, seen, limit_ns);
  lock.lock();
  server_idles_ = false;
}

// Wake the server thread for the open operations, because no other thread handles them now.
void Messages::delegate_to_server() {
  if (!server_sleeps_ || waiters_ != 0 || !needs_server()) return;
  if (server_idles_ && !wired_.empty()) return wake_server();
  if (server_polls_) bells().polls.store(1, std::memory_order_release);  // acquire: ring_pipe
  bells().server_wants.store(server_polls_ ? kNothing : kEverything, std::memory_order_relaxed);
  // Either a sender sees these words, or this thread sees what the sender wrote.
  full_fence();
  ask_for_room();
  progress();
  repoll();
}

void Messages::wake_server() {
  server_idles_ = false;
  change_and_wake(bells().server);
  if (server_polls_) bell_.ring();
}

// Wake the threads of this rank whose operations have ended. `here_polls`: this thread sleeps on
// the wires.
void Messages::notify_ended(bool here_polls) {
  if (!anything_ended_) return;
  anything_ended_ = false;
  if (bells().sleepers.load(std::memory_order_seq_cst) != 0) change_and_wake(bells().waiters);
  const bool due = (server_is_due_ && !ended_.empty()) || closed_;
  server_is_due_ = false;
  if (polling_ && !server_polls_ && !here_polls) bell_.ring();
  if (server_sleeps_ && due) wake_server();
}

}  // namespace unisono
