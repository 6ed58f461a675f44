// Threads as ranks over one segment: results, agreement, flow control, and every way to end.
#include "core/futex.hpp"
#include "shared/group.hpp"

#include <cassert>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

using namespace unisono;

namespace {

constexpr int64_t kMinute = 60'000'000'000;

const unsigned char kNonce[16] = {1, 2, 3};

void on_ranks(int ranks, bool is_crowded, const std::function<void(Group&, int)>& body) {
  auto segment = std::make_shared<Segment>();
  assert(segment->create(ranks, 4096, kNonce) == 0);
  std::vector<std::unique_ptr<Group>> groups;
  const std::vector<int> pids(static_cast<size_t>(ranks), getpid());
  for (int rank = 0; rank < ranks; ++rank) {
    groups.push_back(std::make_unique<Group>(segment, rank, pids, is_crowded));
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] { body(*groups[static_cast<size_t>(rank)], rank); });
  }
  for (std::thread& thread : threads) thread.join();
}

// Post the vector and read the vectors of all other ranks: a one-shot all_reduce for sums of
// integers.
std::vector<Step> one_shot(int ranks, int rank, int64_t count) {
  std::vector<Step> steps{{kPost, -1, kOutput, 0, -1, -1, count, rank, 0, 1}};
  for (int i = 1; i < ranks; ++i) {
    const int peer = (rank + i) % ranks;
    steps.push_back({kReadReduce, peer, -1, -1, kOutput, 0, count, peer, 0, 1});
  }
  return steps;
}

Status run(Group& group, const std::vector<Step>& steps, const std::vector<Loop>& loops,
           std::vector<int64_t>& output, uint64_t fingerprint, int64_t timeout_ns = kMinute,
           Idler* idler = nullptr) {
  const Program program{steps.data(), steps.size(), loops.data(), loops.size()};
  auto* data = reinterpret_cast<char*>(output.data());
  const Buffers buffers{data,  static_cast<int64_t>(output.size()),
                        data,  static_cast<int64_t>(output.size()),
                        false, nullptr,
                        0,     8};
  return group.run(program, buffers, reduce_fn(DType::i64, RedOp::sum), {fingerprint, 1},
                   timeout_ns, idler);
}

void test_all_reduce_in_pieces(int ranks, bool is_crowded, int64_t piece) {
  on_ranks(ranks, is_crowded, [&](Group& group, int rank) {
    const int64_t pieces = 7;
    for (int round = 0; round < 200; ++round) {
      std::vector<int64_t> values(piece * pieces);
      std::iota(values.begin(), values.end(), rank + round);
      Status status = run(group, one_shot(ranks, rank, piece), {{0, ranks, pieces, 0, piece}},
                          values, static_cast<uint64_t>(round) + 1);
      assert(status.is_ok());
      for (int64_t i = 0; i < piece * pieces; ++i) {
        assert(values[size_t(i)] == ranks * (i + round) + ranks * (ranks - 1) / 2);
      }
    }
  });
}

class Postponer final : public Idler {
 public:
  Postponer() : Idler(true) {}
  void idle() override {}
};

// A run that is postponed has written nothing. Run again, also on another thread, it ends well.
void test_a_run_that_is_postponed(int ranks, bool is_crowded) {
  std::atomic<int> postponed{0};
  on_ranks(ranks, is_crowded, [&](Group& group, int rank) {
    Postponer idler;
    for (int round = 0; round < 100; ++round) {
      const auto fingerprint = static_cast<uint64_t>(round) + 1;
      if (round % ranks == rank) std::this_thread::sleep_for(std::chrono::milliseconds(round % 3));
      // On busy cores the others may yield so long that no sleep here is long enough.
      while (round == 0 && rank == 0 && ranks > 1 && postponed == 0) std::this_thread::yield();
      std::vector<int64_t> values(8, rank + round);
      const std::vector<int64_t> before = values;
      Status status{Code::postponed};
      const auto again = [&](Idler* with) {
        status = run(group, one_shot(ranks, rank, 8), {{0, ranks, 1, 0, 0}}, values, fingerprint,
                     kMinute, with);
      };
      for (int i = 0; i < 3 && status.code == Code::postponed; ++i) {
        again(&idler);
        if (status.code != Code::postponed) break;
        ++postponed;
        assert(values == before);
      }
      if (status.code == Code::postponed) std::thread([&] { again(nullptr); }).join();
      assert(status.is_ok());
      for (int64_t value : values) assert(value == ranks * round + ranks * (ranks - 1) / 2);
    }
  });
  assert(ranks == 1 || postponed > 0);
}

// Vectors in lists of three arrays each. Steps and pieces begin and end at any position in them.
void test_lists(int ranks, int64_t piece) {
  on_ranks(ranks, true, [&](Group& group, int rank) {
    const int64_t part = 20;
    std::vector<int64_t> in(3 * part), apart[3];
    std::iota(in.begin(), in.end(), rank);
    char* inputs[3];
    char* outputs[3];
    for (int64_t i = 0; i < 3; ++i) {
      apart[i].assign(static_cast<size_t>(part), -1);
      inputs[i] = reinterpret_cast<char*>(in.data() + i * part);
      outputs[i] = reinterpret_cast<char*>(apart[i].data());
    }
    std::vector<Step> steps{{kPost, -1, kInput, 0, -1, -1, piece, rank, 0, 1},
                            {kCopy, -1, kInput, 0, kOutput, 0, piece, -1, -1, -1}};
    for (int i = 1; i < ranks; ++i) {
      const int peer = (rank + i) % ranks;
      steps.push_back({kReadReduce, peer, -1, -1, kOutput, 0, piece, peer, 0, 1});
    }
    const Loop loop{0, ranks + 1, 3 * part / piece, piece, piece};
    const Program program{steps.data(), steps.size(), &loop, 1};
    const Buffers buffers{nullptr, 3 * part, nullptr, 3 * part,       false,
                          nullptr, 0,        8,       {inputs, part}, {outputs, part}};
    const Status status =
      group.run(program, buffers, reduce_fn(DType::i64, RedOp::sum), {4, 1}, kMinute);
    assert(status.is_ok());
    for (int64_t i = 0; i < 3 * part; ++i) {
      assert(apart[i / part][size_t(i % part)] == ranks * i + ranks * (ranks - 1) / 2);
    }
  });
}

// Two ranks reduce a half each. A result goes into the peer's slot, to the place of the peer's
// operand.
void test_results_are_handed_back(bool is_crowded, int64_t half) {
  on_ranks(2, is_crowded, [&](Group& group, int rank) {
    const int64_t pieces = 7;
    const int64_t mine = rank * half, other = (1 - rank) * half;
    const std::vector<Step> steps{
      {kPost, 1 - rank, kOutput, other, -1, -1, half, rank, 0, 1},
      {kReadReduce, 1 - rank, -1, -1, kOutput, mine, half, 1 - rank, 0, 1},
      {kPost, 1 - rank, kOutput, mine, -1, -1, half, 1 - rank, 0, 2},
      {kRead, 1 - rank, -1, -1, kOutput, other, half, rank, 0, 2},
    };
    for (int round = 0; round < 200; ++round) {
      std::vector<int64_t> values(2 * half * pieces);
      std::iota(values.begin(), values.end(), rank + round);
      const std::vector<Loop> loops{{0, 4, pieces, 0, 2 * half}};
      assert(run(group, steps, loops, values, static_cast<uint64_t>(round) + 1).is_ok());
      for (size_t i = 0; i < values.size(); ++i) assert(values[i] == 2 * (int64_t(i) + round) + 1);
    }
  });
}

// The root never waits for data. Only the flow control keeps it from overwriting its slots and
// lines.
void test_broadcast_does_not_overrun(int ranks, int64_t piece) {
  on_ranks(ranks, true, [&](Group& group, int rank) {
    std::vector<Step> steps{rank == 0 ? Step{kSend, -1, kOutput, 0, -1, -1, piece, rank, 0, 1}
                                      : Step{kRead, 0, -1, -1, kOutput, 0, piece, 0, 0, 1}};
    for (int64_t round = 0; round < 500; ++round) {
      std::vector<int64_t> values(static_cast<size_t>(piece) * 3, rank == 0 ? round : -1);
      assert(run(group, steps, {{0, 1, 3, 0, piece}}, values, 7).is_ok());
      for (int64_t value : values) assert(value == round);
    }
  });
}

void test_mismatch_is_seen_by_all_and_harmless(int ranks) {
  on_ranks(ranks, true, [&](Group& group, int rank) {
    for (int round = 0; round < 50; ++round) {
      std::vector<int64_t> values(100, 1);
      const bool odd = rank == round % ranks;
      Status status =
        run(group, one_shot(ranks, rank, 100), {{0, ranks, 1, 0, 0}}, values, odd ? 5 : 6);
      assert(status.code == Code::mismatch);
      assert(values == std::vector<int64_t>(100, 1));
      status = run(group, one_shot(ranks, rank, 100), {{0, ranks, 1, 0, 0}}, values, 6);
      assert(status.is_ok() && values[99] == ranks);
    }
  });
}

void test_agree_reports_uneven(int ranks) {
  on_ranks(ranks, true, [&](Group& group, int rank) {
    uint64_t even = 3;
    assert(group.agree(9, &even, kMinute).is_ok() && even == 3);
    even = rank == 0 ? 4 : 3;
    assert(group.agree(9, &even, kMinute).is_ok() && (ranks == 1 || even == 0));
  });
}

// A rank is an epoch ahead of the slowest rank most of the time. Its words must stay readable for
// that rank.
void test_agreements_in_a_row(int ranks) {
  on_ranks(ranks, false, [&](Group& group, int rank) {
    for (uint64_t round = 1; round < 3000; ++round) {
      uint64_t even = round;
      if (round % 7 == static_cast<uint64_t>(rank)) std::this_thread::yield();
      assert(group.agree(round, &even, kMinute).is_ok() && even == round);
    }
  });
}

void test_absent_rank_times_out() {
  on_ranks(3, true, [&](Group& group, int rank) {
    if (rank == 2) return;
    std::vector<int64_t> values(10, 1);
    Status status = run(group, one_shot(3, rank, 10), {{0, 3, 1, 0, 0}}, values, 6, 50'000'000);
    assert(status.code == Code::timeout && status.peer == 2);
    assert(values == std::vector<int64_t>(10, 1));
  });
}

void test_a_woken_rank_sleeps_again() {
  auto segment = std::make_shared<Segment>();
  assert(segment->create(2, 4096, kNonce) == 0);
  Group first(segment, 0, {getpid(), getpid()}, false),
    second(segment, 1, {getpid(), getpid()}, false);
  std::thread other([&] {
    uint64_t even = 3;
    assert(first.agree(9, &even, kMinute).is_ok());
  });
  const RankWords& theirs = segment->words(1);
  for (int round = 0; round < 3; ++round) {
    while (theirs.sleepers.load() == 0) std::this_thread::yield();
    second.wake_waiters();  // without a new value
  }
  uint64_t even = 3;
  second.wake_waiters();
  assert(second.agree(9, &even, kMinute).is_ok());
  other.join();
}

void test_abort_and_leave_end_a_wait() {
  on_ranks(2, true, [&](Group& group, int rank) {
    std::vector<int64_t> values(10, 1);
    if (rank == 1) {
      group.leave();
      return;
    }
    Status status = run(group, one_shot(2, rank, 10), {{0, 2, 1, 0, 0}}, values, 6);
    assert(status.code == Code::left && status.peer == 1);
  });
  on_ranks(2, true, [&](Group& group, int rank) {
    if (rank == 1) return;
    std::thread other([&] { group.abort(); });
    std::vector<int64_t> values(10, 1);
    assert(run(group, one_shot(2, rank, 10), {{0, 2, 1, 0, 0}}, values, 6).code == Code::aborted);
    other.join();
  });
}

// To other ranks the flag of a later epoch would mean that the failed epoch is posted.
void test_no_call_runs_after_a_failure() {
  auto segment = std::make_shared<Segment>();
  assert(segment->create(2, 4096, kNonce) == 0);
  Group mine(segment, 0, {getpid(), getpid()}, true);
  segment->words(1).line(1).flag.store(kStages);  // the other rank has entered the first epoch
  std::vector<int64_t> values(10, 1);
  const std::vector<Step> waits{{kRead, 1, -1, -1, kOutput, 0, 10, 1, 0, 1}};
  assert(run(mine, waits, {{0, 1, 1, 0, 0}}, values, 0, 1'000'000).code == Code::timeout);
  const uint64_t flag = segment->words(0).line(1).flag.load();
  for (const bool is_aborted : {false, true}) {
    if (is_aborted) mine.abort();
    const Status status = run(mine, one_shot(2, 0, 10), {{0, 1, 1, 0, 0}}, values, 0);
    assert(status.code == Code::aborted && status.peer == 0);
    uint64_t even = 1;
    assert(mine.agree(9, &even, kMinute).code == Code::aborted);
    assert(segment->words(0).line(1).flag.load() == flag);
    assert(segment->words(0).line(2).flag.load() == 0);
  }
  assert(segment->words(0).ended_in.load() == 1);
}

// Rank 1 enters the epoch and aborts, then rank 0 enters. Rank 2 must not report success.
void test_a_rank_that_aborts_during_a_wait() {
  for (int round = 0; round < 50; ++round) {
    auto segment = std::make_shared<Segment>();
    assert(segment->create(3, 4096, kNonce) == 0);
    Group last(segment, 2, {getpid(), getpid(), getpid()}, false);
    uint64_t even = 1;
    for (int rank : {0, 1}) segment->words(rank).line(1).agreement = {9, even};
    segment->words(1).line(1).flag.store(kStages);
    Status status;
    std::thread waiting([&] { status = last.agree(9, &even, kMinute); });
    while (segment->words(0).sleepers.load() == 0) std::this_thread::yield();
    segment->words(1).ended_in.store(1);
    segment->words(1).membership.store(kAborted);
    segment->words(0).line(1).flag.store(kStages);
    futex_wake_all(segment->words(0).line(1).flag);
    waiting.join();
    assert(status.code == Code::aborted && status.peer == 1);
  }
}

// The child's copy of a group does not affect other ranks.
void test_the_child_of_a_fork_is_not_this_rank() {
  auto segment = std::make_shared<Segment>();
  assert(segment->create(2, 4096, kNonce) == 0);
  const std::vector<int> pids(2, getpid());
  Group mine(segment, 0, pids, true);
  auto other = std::make_unique<Group>(segment, 1, pids, true);
  const pid_t child = fork();
  if (child == 0) {
    mine.abort();
    mine.leave();
    other.reset();
    _exit(mine.is_aborted() ? 0 : 1);
  }
  int status = -1;
  assert(waitpid(child, &status, 0) == child && status == 0);
  for (int rank : {0, 1}) assert(segment->words(rank).membership.load() == kMember);
  other.reset();
  assert(segment->words(1).membership.load() == kLeft && !mine.is_aborted());
}

void test_bad_programs_are_refused() {
  on_ranks(1, true, [&](Group& group, int) {
    std::vector<int64_t> values(10, 1);
    const std::vector<Step> bad{
      {kCopy, -1, kOutput, 5, kOutput, 0, 6, -1, -1, -1},  // reads past the end
      {kCopy, -1, kOutput, 0, kInput, 0, 1, -1, -1, -1},   // writes the input
      {kPost, -1, kOutput, 0, -1, -1, 10, 0, 510, 1},      // leaves the slot
      {kPost, -1, kOutput, 0, -1, -1, 1, 1, 0, 1},  // into the slot of a rank that does not exist
      {kPost, -1, kOutput, 0, -1, -1, 1, -1, 0, 1},
      {kRead, 0, -1, -1, kOutput, 0, 1, 0, 0, 1},  // reads its own post
      {99, 0, -1, -1, kOutput, 0, 1, 0, 0, 1},
    };
    for (const Step& step : bad) {
      assert(run(group, {step}, {{0, 1, 1, 0, 0}}, values, 6).code == Code::bad_program);
    }
    assert(run(group, {bad[0]}, {{0, 0, 1, 0, 0}}, values, 6).is_ok());
    const Step copy{kCopy, -1, kOutput, 0, kOutput, 1, 1, -1, -1, -1};
    assert(run(group, {copy}, {{0, 1, 9, 0, 1}}, values, 6).is_ok());
    assert(run(group, {copy}, {{0, 1, 10, 0, 1}}, values, 6).code == Code::bad_program);
  });
}

void test_attach_proves_the_memory() {
  Segment made;
  assert(made.create(2, 4096, kNonce) == 0);
  Segment seen;
  assert(seen.attach(getpid(), made.fd(), kNonce) == 0);
  seen.words(1).membership.store(1);
  assert(made.words(1).membership.load() == 1);
  const unsigned char other[16] = {9};
  Segment wrong, absent;
  assert(wrong.attach(getpid(), made.fd(), other) == EXDEV);
  assert(absent.attach(getpid(), 1'000'000, kNonce) == ENOENT);
}

}  // namespace

int main() {
  for (int ranks : {1, 2, 3, 5}) {
    for (bool is_crowded : {true, false}) {
      // The largest post beside a flag, the smallest in a slot, and a long one.
      for (int64_t piece : {12, 13, 100}) test_all_reduce_in_pieces(ranks, is_crowded, piece);
    }
    for (bool is_crowded : {true, false}) test_a_run_that_is_postponed(ranks, is_crowded);
    test_agree_reports_uneven(ranks);
    for (int64_t piece : {4, 12, 30, 60}) test_lists(ranks, piece);
    if (ranks > 1) {
      for (int64_t piece : {8, 40}) test_broadcast_does_not_overrun(ranks, piece);
      test_mismatch_is_seen_by_all_and_harmless(ranks);
      test_agreements_in_a_row(ranks);
    }
  }
  for (bool is_crowded : {true, false}) {
    for (int64_t half : {3, 50}) test_results_are_handed_back(is_crowded, half);
  }
  test_absent_rank_times_out();
  test_a_woken_rank_sleeps_again();
  test_abort_and_leave_end_a_wait();
  test_no_call_runs_after_a_failure();
  test_a_rank_that_aborts_during_a_wait();
  test_the_child_of_a_fork_is_not_this_rank();
  test_bad_programs_are_refused();
  test_attach_proves_the_memory();
  std::puts("ok");
}
