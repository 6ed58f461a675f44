#include "messages/waiting.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "core/clock.hpp"
#include "core/cores.hpp"
#include "core/finally.hpp"
#include "core/futex.hpp"

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

bool Waiting::is_over(const Operation* op) const {
  // acquire: pairs with Operations::finish
  return op == nullptr ? parts_.queued_sends == 0 : op->done.load(std::memory_order_acquire);
}

Code Waiting::wait_for(const Operation* op, int64_t timeout_ns, Lock& lock) {
  ++waiters_;
  const Finally ended([&] {
    if (!lock.owns_lock()) lock.lock();
    --waiters_;
  });
  server_.attends = false;
  if (server_.sleeps) bells().server_wants.store(kFullRings, std::memory_order_relaxed);
  if (server_.polls) bells().polls.store(0, std::memory_order_relaxed);
  report_wires(lock);
  if (++waits_ % kHopeful == 0) spin_ns_ = kSpinNs;
  const int64_t spin_ends_ns = peers_.wired(lock).empty() ? INT64_MAX : now_ns() + spin_ns_;
  const Core* const core =
    op == nullptr || op->peer < 0 ? nullptr : peers_[op->peer].rings.core(lock);
  lock.unlock();
  Code reason = Code::ok;
  const bool came_soon = spin(op, spin_ends_ns, core, lock);
  if (!came_soon) {
    reason = wait_slowly(op, timeout_ns, core);
    lock.lock();
  }
  if (!peers_.wired(lock).empty()) last_wait_ns_ = now_ns();
  spin_ns_ = came_soon ? kSpinNs : spin_ns_ / 2;
  return reason;
}

// Spin until `op` is done; the lock is then held. False: it may take long.
bool Waiting::spin(const Operation* op, int64_t ends_ns, const Core* core, Lock& lock) {
  const SpinPolicy& patience = ends_ns != INT64_MAX ? kAtWires : is_crowded_ ? kCrowded : kAtRings;
  for (int round = 1; round <= patience.busy_rounds + patience.yield_rounds; ++round) {
    for (int i = 0; i < patience.spins; ++i) {
      if (lock.try_lock()) {
        // While a message moves its waiter stays awake. To sleep and wake for every ring of a large
        // message takes three times as long.
        if (peers_.progress(lock, i % kLookAround == 0 ? nullptr : op)) round = 1;
        if (is_over(op)) return true;
        notify(lock);
        lock.unlock();
      }
      cpu_pause();
    }
    const int64_t now = now_ns();
    if (now > ends_ns) return false;
    // wait_slowly() checks deadlines, signals and lost ranks.
    ends_ns = std::min(ends_ns, now + kSliceNs);
    const bool yields = round > patience.busy_rounds;
    if (is_on_this_core(core) ? is_crowded_ || !step_aside(*core) : yields) sched_yield();
  }
  return false;
}

// Whether the peer cannot be running because this thread runs on the same core. This is a guess.
bool Waiting::is_on_this_core(const Core* core) {
  const uint32_t here = record_core(parts_.inbox.head().core);
  return core != nullptr && here != 0 && core->load(std::memory_order_relaxed) == here;
}

// Leave this core to the peer, which needs it. False: this thread stays.
bool Waiting::step_aside(const Core& peer) {
  cpu_set_t taken;
  CPU_ZERO(&taken);
  const uint32_t core = peer.load(std::memory_order_relaxed);
  if (core != 0) CPU_SET(core - 1, &taken);
  return leave_core(taken, parts_.inbox.head().core);
}

Code Waiting::wait_slowly(const Operation* op, int64_t timeout_ns, const Core* core) {
  bool polls = false;
  const Finally ended([&] {
    const Lock lock(lock_);
    parts_.delivery.keeps_all = false;
    if (polls) poll_.end(lock);
  });
  return sleep_until_over(op, timeout_ns, core, &polls);
}

// `polls`: set if this thread becomes the thread that sleeps on wires.
Code Waiting::sleep_until_over(const Operation* op, int64_t timeout_ns, const Core* core,
                               bool* polls) {
  const int64_t deadline_ns = now_ns() + timeout_ns;
  int64_t look_ns = now_ns() + kSliceNs;
  int64_t report_ns = look_ns;
  uint64_t context = 0;
  while (true) {
    // Pairs with PeerRings::ring_bell by the fence below, and with wake_waiters() by the lock.
    bells().sleepers.fetch_add(1, std::memory_order_seq_cst);
    bool is_counted = true;
    const auto awake = [&] {
      if (std::exchange(is_counted, false)) {
        bells().sleepers.fetch_sub(1, std::memory_order_relaxed);
      }
    };
    const Finally ended(awake);
    // Not after the look at the rings. Pairs with change_and_wake().
    const uint64_t seen = bells().waiters.load(std::memory_order_seq_cst);
    bool goes_on = false;
    {
      Lock lock(lock_);
      *polls = *polls || poll_.begin(lock);
      // release, for `pipe`: pairs with Outbox::write_to_pipe
      if (*polls) bells().polls.store(1, std::memory_order_release);
      full_fence();  // pairs with PeerRings::ring_bell
      peers_.ask_for_room(lock);
      goes_on = peers_.push_all(lock);
      goes_on = (peers_.progress(lock) || goes_on) && peers_.wired(lock).empty();
      if (parts_.operations.take_change(lock)) wake_waiters(lock, *polls);
      report_wires(lock);
      *polls ? poll_.watch(lock) : poll_.refresh(lock);
    }
    if (*polls) awake();
    const int64_t limit_ns = std::min(deadline_ns - now_ns(), kSliceNs);
    if (!is_over(op) && limit_ns > 0 && !goes_on) {
      if (*polls) {
        poll_.sleep(limit_ns);
      } else {
        // Woken early, perhaps for a message that is about to come; see Messages::wake_waiters().
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
    if (op != nullptr && callbacks.poll && callbacks.poll()) return Code::interrupted;
    Lock lock(lock_);
    parts_.delivery.keeps_all = true;  // the message may be behind others in a ring or wire
    if (!callbacks.stuck || now < report_ns) continue;
    report_ns = now + kStuckNs;
    const std::vector<int> ranks = peers_.awaited_ranks(lock, op);
    lock.unlock();
    callbacks.stuck(ranks, op == nullptr || op->is_send, context);
    // Not before the second report, because the rank may only be late.
    if (op != nullptr && !op->is_send) context = op->envelope.context;
  }
}

std::vector<Outcome> Waiting::serve(Lock& lock) {
  Operations& operations = parts_.operations;
  while (true) {
    peers_.progress(lock);
    for (Operation* const op : parts_.delivery.receives(lock)) {
      // A long message comes into a quiet receive, and its caller is busy elsewhere.
      if (op->started && op->quiet && waiters_ == 0) operations.watch(lock, *op);
    }
    notify(lock);
    std::vector<Outcome> outcomes = operations.take_ended(lock);
    if (!outcomes.empty() || parts_.ends.is_closed(lock)) return outcomes;
    report_wires(lock);
    // Not after the look at the rings. Pairs with change_and_wake().
    const uint64_t seen = bells().server.load(std::memory_order_seq_cst);
    server_.sleeps = true;
    bells().server_wants.store(kFullRings, std::memory_order_relaxed);
    // Either a sender without room sees this word, or this thread sees what fills its ring. Pairs
    // with PeerRings::ring_bell.
    full_fence();
    peers_.progress(lock);
    delegate(lock);
    if (!operations.have_ended(lock) && !parts_.ends.is_closed(lock)) server_sleep(seen, lock);
    server_.sleeps = false;
    bells().server_wants.store(kNothing, std::memory_order_relaxed);
    report_stuck(lock);
  }
}

// Report, once a second, the operations for which no thread waits.
void Waiting::report_stuck(Lock& lock) {
  if (now_ns() - server_.stuck_told_ns < kStuckNs || !callbacks.stuck) return;
  server_.stuck_told_ns = now_ns();
  std::map<uint64_t, std::set<int>> ranks;  // by context; 0: those of sends
  for (const int rank : peers_.awaited_ranks(lock, nullptr)) ranks[0].insert(rank);
  for (const Operation* const op : parts_.delivery.receives(lock)) {
    if (op->quiet || op->awaited || op->started || op->number == 0) continue;
    for (const int rank : peers_.awaited_ranks(lock, op)) ranks[op->envelope.context].insert(rank);
  }
  lock.unlock();
  for (const auto& [context, its] : ranks) {
    callbacks.stuck({its.begin(), its.end()}, context == 0, context);
  }
  lock.lock();
}

// Whether operations go on for which no thread waits.
bool Waiting::needs_server(const Lock& lock) const {
  return parts_.operations.are_watched(lock) || parts_.queued_sends != 0 ||
         parts_.ends.are_parting(lock) || server_.attends;
}

void Waiting::server_sleep(uint64_t seen, Lock& lock) {
  const bool unattended = !peers_.wired(lock).empty() && needs_server(lock);
  const bool is_short = parts_.queued_sends != 0 || parts_.ends.are_parting(lock);
  const bool reports = parts_.operations.are_watched(lock);
  int64_t limit_ns = is_short ? kSliceNs : reports ? kStuckNs : 1000 * kSliceNs;
  const bool waits_elsewhere = waiters_ != 0 || now_ns() - last_wait_ns_ < kServerPauseNs;
  if (unattended && !waits_elsewhere && poll_.begin(lock)) {
    server_.sleep_ns = 0;
    server_.polls = true;
    bells().server_wants.store(kNothing, std::memory_order_relaxed);
    bells().polls.store(1, std::memory_order_release);  // pairs with Outbox::write_to_pipe
    full_fence();                                       // pairs with PeerRings::ring_bell
    peers_.progress(lock);
    notify(lock);
    poll_.watch(lock);
    lock.unlock();
    poll_.sleep(limit_ns);
    lock.lock();
    server_.polls = false;
    poll_.end(lock);
    return;
  }
  if (unattended) {
    server_.sleep_ns = std::clamp(2 * server_.sleep_ns, kServerPauseNs, kServerSleepNs);
    limit_ns = server_.sleep_ns;
  }
  server_.idles = !unattended;
  lock.unlock();
  futex_wait(bells().server, seen, limit_ns);
  lock.lock();
  server_.idles = false;
}

void Waiting::delegate(const Lock& lock) {
  if (server_.sleeps && waiters_ == 0 && needs_server(lock)) {
    if (server_.idles && !peers_.wired(lock).empty()) {
      wake_server(lock);
    } else {
      // release, for `pipe`: pairs with Outbox::write_to_pipe
      if (server_.polls) bells().polls.store(1, std::memory_order_release);
      const Wants wants = server_.polls ? kNothing : kEverything;
      bells().server_wants.store(wants, std::memory_order_relaxed);
      // Either a sender sees these words, or this thread sees what the sender wrote. Pairs with
      // PeerRings::ring_bell.
      full_fence();
      peers_.ask_for_room(lock);
      peers_.progress(lock);
      poll_.refresh(lock);
    }
  }
  notify(lock);
}

void Waiting::attend(const Lock& lock) {
  server_.attends = true;
  delegate(lock);
}

void Waiting::wake_server(const Lock& lock) {
  server_.idles = false;
  change_and_wake(bells().server);
  if (server_.polls) poll_.wake(lock);
}

// Wake the threads of this rank whose operations have ended. `here_polls`: this thread sleeps on
// the wires.
void Waiting::wake_waiters(const Lock& lock, bool here_polls) {
  // The lock, which sleepers take after they have counted themselves, orders this load.
  if (bells().sleepers.load(std::memory_order_relaxed) != 0) change_and_wake(bells().waiters);
  const bool due = parts_.operations.take_due(lock) || parts_.ends.is_closed(lock);
  if (poll_.is_active(lock) && !server_.polls && !here_polls) poll_.wake(lock);
  if (server_.sleeps && due) wake_server(lock);
}

void Waiting::report_wires(Lock& lock) {
  if (parts_.wire_events.empty() || !callbacks.wire) return;
  const auto news = std::move(parts_.wire_events);
  parts_.wire_events.clear();
  lock.unlock();
  for (const auto& [rank, channel, ended] : news) callbacks.wire(rank, channel, ended);
  lock.lock();
}

}  // namespace unisono
