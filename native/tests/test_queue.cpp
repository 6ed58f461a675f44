// The order of a queue's calls on all threads, and every way in which a task ends.
#include "core/queue.hpp"

#include <cassert>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

using namespace unisono;

namespace {

constexpr int64_t kMinute = 60'000'000'000;

// Counts its runs. The fingerprint of a task is the code with which it ends.
class Counter final : public Runner {
 public:
  Status run(const Program&, const Buffers&, ReduceFns, AgreementWords words, int64_t,
             Idler* idler) override {
    if (idler != nullptr && words.fingerprint == kLate) return {Code::postponed};
    // Without a lock: two threads never run it at the same time, which the thread sanitizer checks.
    ++runs;
    while (words.fingerprint == kStuck && !is_aborted()) std::this_thread::yield();
    if (words.fingerprint == kGood || words.fingerprint == kLate) return {};
    return {words.fingerprint == kStuck ? Code::aborted : Code::mismatch, 1};
  }
  void abort() override { aborted_ = true; }
  bool is_aborted() const override { return aborted_; }

  static constexpr uint64_t kGood = 1, kBad = 2, kStuck = 3, kLate = 4;
  int runs = 0;

 private:
  std::atomic<bool> aborted_{false};
};

std::unique_ptr<Task> task(Runner* runner, uint64_t ends = Counter::kGood) {
  auto made = std::make_unique<Task>();
  made->runner = runner;
  made->words = {ends, 1};
  return made;
}

// Serves until the end, and counts what Python would handle.
struct Server {
  explicit Server(CallQueue& turn) : thread([this, &turn] { serve(turn); }) {}
  void serve(CallQueue& turn) {
    while (true) {
      const CallQueue::Served served = turn.serve();
      ++reported[served.reason];
      if (served.reason == CallQueue::kClosed) return;
      if (served.reason == CallQueue::kFailed) assert(served.status.peer == 1);
      if (served.reason == CallQueue::kForeign || served.reason == CallQueue::kFailed) {
        turn.finish(served.seq);
      }
    }
  }
  int reported[5] = {};
  std::thread thread;
};

void test_calls_of_both_kinds_take_turns() {
  CallQueue turn;
  Counter counter;
  Server server(turn);
  int expected = 0;
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::unique_ptr<Task>> tasks;
    for (int i = 0; i < round % 5; ++i) {
      tasks.push_back(task(&counter));
      const uint64_t seq = turn.push(tasks.back().get());
      if (turn.take() != 0) {
        assert(turn.wait(seq, 1'000'000'000));
        turn.give();
      }
      ++expected;
    }
    // Freed at once, because no thread may use a task that is over.
    for (auto& each : tasks) {
      assert(turn.wait(each->seq, kMinute));
      each.reset();
    }
    assert(turn.take() != 0);
    assert(counter.runs == expected);
    ++counter.runs, ++expected;
    turn.give();
  }
  assert(turn.close() == 0);
  server.thread.join();
  assert(server.reported[CallQueue::kClosed] == 1 && server.reported[CallQueue::kEnded] == 0);
}

void test_a_job_waits_for_a_caller_that_has_the_turn() {
  CallQueue turn;
  Counter counter;
  Server server(turn);
  for (int round = 0; round < 500; ++round) {
    assert(turn.take() != 0);
    const auto mine = task(&counter);
    turn.push(mine.get());
    assert(!turn.wait(mine->seq, 10'000));
    assert(counter.runs == round);
    assert(turn.take() == 0);
    turn.give();
    assert(turn.wait(mine->seq, kMinute));
    assert(counter.runs == round + 1);
  }
  turn.close();
  server.thread.join();
}

void test_the_server_returns_for_other_work() {
  CallQueue turn;
  Counter counter;
  const auto foreign = task(nullptr), bad = task(&counter, Counter::kBad), good = task(&counter);
  for (const auto* each : {&foreign, &bad, &good}) turn.push(each->get());
  CallQueue::Served served = turn.serve();
  assert(served.reason == CallQueue::kForeign && served.seq == 1 && foreign->handed);
  assert(counter.runs == 0 && !turn.is_over(1) && turn.begun() == 1);
  turn.finish(1);
  served = turn.serve();
  assert(served.reason == CallQueue::kFailed && served.seq == 2 && bad->handed);
  assert(served.status.code == Code::mismatch && counter.runs == 1 && !turn.is_over(2));
  turn.finish(2);
  assert(turn.watch(good.get()));
  served = turn.serve();
  assert(served.reason == CallQueue::kEnded && served.seq == 3 && good->handed && turn.is_over(3));
  const auto last = task(&counter);
  turn.push(last.get());
  assert(turn.serve().reason == CallQueue::kIdle);
  assert(turn.is_over(4) && !last->handed && !turn.watch(last.get()) && turn.is_free());
}

void test_each_end_is_reported_once() {
  CallQueue turn;
  Counter counter;
  Server server(turn);
  int reported = 0;
  for (int round = 0; round < 2000; ++round) {
    const auto mine = task(&counter);
    turn.push(mine.get());
    if (round % 3 == 0) std::this_thread::yield();
    reported += turn.watch(mine.get());
    assert(turn.wait(mine->seq, kMinute));
  }
  turn.close();
  server.thread.join();
  assert(server.reported[CallQueue::kEnded] == reported);
}

class Postponer final : public Idler {
 public:
  Postponer() : Idler(true) {}
  void idle() override {}
};

// Run a task here if it can be had, as a waiting thread does.
bool run_here(CallQueue& turn, Task& mine) {
  Postponer idler;
  if (!turn.claim(&mine)) return false;
  turn.settle(&mine, mine.run(&idler));
  return true;
}

void test_a_waiting_thread_runs_its_job() {
  CallQueue turn;
  Counter counter;
  Server server(turn);
  int reported = 0, failed = 0, claimed = 0;
  for (int round = 0; round < 4000; ++round) {
    const uint64_t ends[] = {Counter::kGood, Counter::kBad, Counter::kLate};
    const auto first = task(&counter), mine = task(&counter, ends[round % 3]);
    mine->can_move = round % 10 != 0;
    if (round % 7 == 0) turn.push(first.get());
    turn.push(mine.get());
    if (round % 5 == 0) reported += turn.watch(mine.get());
    const bool runs_here = run_here(turn, *mine);
    assert(mine->can_move || !runs_here);
    claimed += runs_here;
    assert(turn.wait(mine->seq, kMinute));
    if (round % 3 == 1) {
      ++failed;
      reported -= round % 5 == 0;
      assert(mine->handed);
    }
  }
  assert(claimed > 0 && counter.runs == 4000 + 4000 / 7 + 1);
  turn.close();
  server.thread.join();
  assert(server.reported[CallQueue::kFailed] == failed);
  assert(server.reported[CallQueue::kEnded] == reported);
}

// A thread that has claimed its task may lose its core for long.
void test_the_server_goes_on_after_a_claimed_job() {
  CallQueue turn;
  Counter counter;
  const auto mine = task(&counter), next = task(&counter);
  mine->can_move = true;
  turn.push(mine.get());
  assert(turn.claim(mine.get()));
  turn.push(next.get());
  Server server(turn);
  // Meanwhile the server looks, finds nothing that it may run, and sleeps.
  assert(!turn.wait(next->seq, 100'000'000));
  turn.settle(mine.get(), {});
  // The server sleeps for longer if no thread wakes it.
  assert(turn.wait(next->seq, 5'000'000'000) && counter.runs == 1);
  turn.close();
  server.thread.join();
}

void test_closing_waits_for_a_thread_that_runs_its_job() {
  CallQueue turn;
  Counter counter;
  const auto mine = task(&counter, Counter::kLate), later = task(&counter);
  mine->can_move = later->can_move = true;
  turn.push(mine.get());
  turn.push(later.get());
  assert(!turn.claim(later.get()) && turn.claim(mine.get()) && !turn.claim(later.get()));
  Server server(turn);
  assert(turn.close() == 2 && turn.runs() && !turn.wait_until_still(1'000'000));
  turn.settle(mine.get(), {Code::postponed});
  assert(turn.wait(mine->seq, kMinute) && turn.wait_until_still(kMinute));
  server.thread.join();
  assert(counter.runs == 1 && server.reported[CallQueue::kClosed] == 1);
}

void test_closing_drops_what_has_not_begun() {
  CallQueue turn;
  Counter counter;
  Server server(turn);
  const auto stuck = task(&counter, Counter::kStuck), later = task(&counter);
  turn.push(stuck.get());
  turn.push(later.get());
  while (turn.begun() != 1) std::this_thread::yield();
  std::thread waiter([&] { assert(turn.wait(later->seq, kMinute)); });
  assert(turn.runs() && turn.close() == 2 && later->handed);
  waiter.join();
  assert(!turn.is_over(1) && !turn.wait_until_still(1'000'000));
  counter.abort();
  assert(turn.wait_until_still(kMinute) && turn.wait(1, kMinute));
  server.thread.join();
  assert(server.reported[CallQueue::kFailed] == 1 && counter.runs == 1);
}

}  // namespace

int main() {
  test_calls_of_both_kinds_take_turns();
  test_a_job_waits_for_a_caller_that_has_the_turn();
  test_the_server_returns_for_other_work();
  test_each_end_is_reported_once();
  test_a_waiting_thread_runs_its_job();
  test_the_server_goes_on_after_a_claimed_job();
  test_closing_waits_for_a_thread_that_runs_its_job();
  test_closing_drops_what_has_not_begun();
  std::puts("queue: ok");
}
