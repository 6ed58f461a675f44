// Threads as ranks that run programs of messages: results, disagreement, time-outs, aborts.
#include "steps/steps.hpp"

#include <cassert>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <numeric>
#include <thread>

#include <unistd.h>

using namespace unisono;

namespace {

// Large allocations of this thread fail.
thread_local bool is_short = false;

}  // namespace

// Only arrays: with the sanitizers a plain `new` does not get here.
void* operator new[](std::size_t nbytes) {
  void* memory = is_short && nbytes > 500'000 ? nullptr : std::malloc(nbytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new[](std::size_t nbytes, const std::nothrow_t&) noexcept {
  return std::malloc(nbytes);
}
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

constexpr int64_t kMinute = 60'000'000'000;
constexpr int64_t kMoment = 30'000'000;

void on_ranks(int ranks, int per_host, const std::function<void(Steps&, Messages&, int)>& body) {
  std::vector<Address> addresses(static_cast<size_t>(ranks));
  std::vector<std::shared_ptr<Messages>> all;
  std::vector<int> numbers(static_cast<size_t>(ranks));
  std::iota(numbers.begin(), numbers.end(), 0);
  std::vector<int> hosts;
  for (int rank = 0; rank < ranks; ++rank) hosts.push_back(rank / per_host);
  for (int rank = 0; rank < ranks; ++rank) {
    Address& address = addresses[static_cast<size_t>(rank)];
    address.nonce[0] = static_cast<unsigned char>(rank + 1);
    all.push_back(std::make_shared<Messages>(rank, ranks));
    address.pid = getpid();
    address.fd = all.back()->create(address.nonce);
    assert(address.fd >= 0);
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    all[static_cast<size_t>(rank)]->introduce(addresses, true);
    threads.emplace_back([&, rank] {
      const auto& messages = all[static_cast<size_t>(rank)];
      Steps steps(messages, 7, numbers, hosts, nullptr);
      body(steps, *messages, rank);
    });
  }
  for (auto& each : threads) each.join();
  for (auto& messages : all) messages->close(0);
}

// Every rank sends the vector to every rank and adds the received vectors. The second half of
// OUTPUT is a copy.
std::vector<Step> all_reduce(int ranks, int rank, int64_t count) {
  std::vector<Step> steps{{kPost, -1, kOutput, 0, -1, -1, count, -1, -1, -1}};
  for (int i = 1; i < ranks; ++i) {
    steps.push_back({kReadReduce, (rank + i) % ranks, -1, -1, kOutput, 0, count, -1, -1, -1});
  }
  steps.push_back({kCopy, -1, kOutput, 0, kOutput, count, count, -1, -1, -1});
  return steps;
}

Status run(Steps& runner, const std::vector<Step>& steps, std::vector<int64_t>& output,
           uint64_t fingerprint, int64_t timeout_ns = kMinute) {
  const Program program{steps.data(), steps.size(), nullptr, 0};
  const auto count = static_cast<int64_t>(output.size());
  const Buffers buffers{nullptr, 0, reinterpret_cast<char*>(output.data()), count, false, nullptr,
                        0,       8};
  return runner.run(program, buffers, reduce_fn(DType::i64, RedOp::sum), {fingerprint, 1},
                    timeout_ns);
}

void test_sums(int ranks) {
  on_ranks(ranks, 2, [&](Steps& steps, Messages&, int rank) {
    uint64_t call = 0;
    for (int64_t count : {1, 100, 9'000, 40'000, 300'000}) {
      std::vector<int64_t> values(static_cast<size_t>(2 * count));
      std::iota(values.begin(), values.end(), rank);
      assert(run(steps, all_reduce(ranks, rank, count), values, ++call).is_ok());
      for (int64_t i = 0; i < count; ++i) {
        const int64_t sum = ranks * i + ranks * (ranks - 1) / 2;
        assert(values[size_t(i)] == sum && values[size_t(count + i)] == sum);
      }
    }
  });
}

// Lists of arrays with steps that span several arrays.
void test_lists(int ranks) {
  on_ranks(ranks, 1, [&](Steps& steps, Messages&, int rank) {
    const int64_t part = 20, count = 3 * part;
    std::vector<int64_t> in(count), out(count, -1);
    std::iota(in.begin(), in.end(), rank);
    char *inputs[3], *outputs[3];
    for (int64_t i = 0; i < 3; ++i) {
      inputs[i] = reinterpret_cast<char*>(in.data() + i * part);
      outputs[i] = reinterpret_cast<char*>(out.data() + (2 - i) * part);
    }
    std::vector<Step> program{{kPost, -1, kInput, 0, -1, -1, count, -1, -1, -1},
                              {kCopy, -1, kInput, 0, kOutput, 0, count, -1, -1, -1}};
    for (int i = 1; i < ranks; ++i) {
      program.push_back({kReadReduce, (rank + i) % ranks, -1, -1, kOutput, 0, count, -1, -1, -1});
    }
    const Buffers buffers{nullptr, count, nullptr, count,          false,
                          nullptr, 0,     8,       {inputs, part}, {outputs, part}};
    const Status status = steps.run({program.data(), program.size(), nullptr, 0}, buffers,
                                    reduce_fn(DType::i64, RedOp::sum), {1, 1}, kMinute);
    assert(status.is_ok());
    for (int64_t i = 0; i < count; ++i) {
      const auto at = static_cast<size_t>((2 - i / part) * part + i % part);
      assert(out[at] == ranks * i + ranks * (ranks - 1) / 2);
    }
  });
}

// Messages sent before the ranks detect their disagreement must not be taken for later messages.
void test_disagreement(int ranks) {
  on_ranks(ranks, 2, [&](Steps& steps, Messages&, int rank) {
    for (uint64_t round = 0; round < 50; ++round) {
      std::vector<int64_t> values(20, rank);
      const uint64_t odd = rank == 1 && round % 2 == 0;
      const Status status = run(steps, all_reduce(ranks, rank, 10), values, 1000 + 2 * round + odd);
      assert(status.code == (round % 2 == 0 ? Code::mismatch : Code::ok));
      assert(values[0] == (round % 2 == 0 ? rank : ranks * (ranks - 1) / 2));
    }
  });
}

void test_uneven() {
  on_ranks(3, 1, [&](Steps& steps, Messages&, int rank) {
    const uint64_t even = rank == 1 ? 5 : 6;
    assert(steps.run({}, {}, nullptr, {9, even}, kMinute).code == Code::uneven);
    assert(steps.run({}, {}, nullptr, {9, 6}, kMinute).is_ok());
  });
}

void test_timeout_and_abort() {
  on_ranks(2, 1, [&](Steps& steps, Messages& messages, int rank) {
    if (rank == 1) return;
    std::vector<int64_t> values(600'000, 1);
    bool late = false;
    steps.set_late([&] { late = true; }, kMoment / 2);
    const Status status = run(steps, all_reduce(2, 0, 300'000), values, 3, kMoment);
    assert(status.code == Code::timeout && status.peer == 1 && late);
    std::thread other([&] { messages.fail_context(7); });
    assert(run(steps, all_reduce(2, 0, 300'000), values, 3).code == Code::aborted);
    other.join();
  });
}

// An accumulation of bfloat16 over several pieces is rounded once. With `twice` a rank sends two of
// its operands: all pieces of the first come before those of the second. One operand is local.
void test_accumulations(int64_t count, bool twice) {
  on_ranks(4, 2, [&](Steps& steps, Messages&, int rank) {
    constexpr uint16_t kOne = 0x3F80, kSmall = 0x3B00;  // 1 and 2^-9, a quarter of 1's last bit
    const auto size = static_cast<size_t>(count);
    std::vector<uint16_t> output(size, rank == 0 ? kOne : kSmall), input(size, kSmall);
    for (size_t i = 0; i < size; i += 7) output[i] = kOne;
    std::vector<Step> program;
    const auto add = [&](StepOp op, int peer) {
      const bool local = op == kReduce;
      const int64_t buf = local ? int64_t{kInput} : -1, off = local ? 0 : -1;
      program.push_back({op, peer, buf, off, kOutput, 0, count, -1, -1, -1, 1});
    };
    if (rank == 0) {
      add(kRecvReduce, 1);
      if (twice) add(kReadReduce, 1);
      add(kReadReduce, 2);
      add(kReduce, -1);
      add(kRecvReduce, 3);
      program.back().goes_on = 0;
    } else {
      for (int i = 0; i < (rank == 1 && twice ? 2 : 1); ++i) {
        const Buf from = i == 0 ? kOutput : kInput;
        program.push_back({kSend, 0, from, 0, -1, -1, count, -1, -1, -1});
      }
    }
    const Buffers buffers{reinterpret_cast<char*>(input.data()),
                          count,
                          reinterpret_cast<char*>(output.data()),
                          count,
                          false,
                          nullptr,
                          0,
                          2};
    const Program all{program.data(), program.size(), nullptr, 0};
    const Status status =
      steps.run(all, buffers, reduce_fns(DType::bf16, RedOp::sum), {1, 1}, kMinute);
    assert(status.is_ok());
    if (rank != 0) return;
    const int small = twice ? 5 : 4;  // operands of 2^-9 beside 1
    for (size_t i = 0; i < size; ++i) {
      const float sum = i % 7 == 0 ? 4 + (small - 3) / 512.0F : 1 + small / 512.0F;
      const double got = std::ldexp(0x80 | (output[i] & 0x7F), (output[i] >> 7) - 127 - 7);
      assert(std::fabs(got - sum) <= (sum > 2 ? 1 / 128.0 : 1 / 256.0) && got != 1);
    }
  });
}

// A message without elements holds its receiver back until it is sent.
void test_empty_message() {
  on_ranks(2, 2, [](Steps& steps, Messages&, int rank) {
    const Step copy{kCopy, -1, kOutput, 0, kOutput, 1, 1, -1, -1, -1};
    const Step send{kSend, 1, kOutput, 0, -1, -1, 0, -1, -1, -1};
    const Step receive{kRecv, 0, -1, -1, kOutput, 0, 0, -1, -1, -1};
    std::vector<int64_t> data{1, 2};
    assert(run(steps, {rank == 0 ? send : receive, copy}, data, 0).is_ok());
    assert(data[1] == 1);
    data[1] = 2;
    if (rank == 0) return;
    assert(run(steps, {receive, copy}, data, 0, kMoment).code == Code::timeout);
    assert(data[1] == 2);
  });
}

// Open operations are cancelled: no byte is written into memory that the caller may have freed.
void test_no_memory() {
  std::atomic<bool> is_over{false};
  on_ranks(2, 1, [&](Steps& steps, Messages& messages, int rank) {
    const int64_t count = 300'000;
    auto values = std::make_unique<std::vector<int64_t>>(static_cast<size_t>(count), 1);
    if (rank == 0) {
      const Step send{kSend, 1, kOutput, 0, -1, -1, count, -1, -1, -1};
      const Status status = run(steps, {send, send}, *values, 3, 3 * kMoment);
      assert(status.code == Code::timeout && status.peer == 1);
      is_over = true;
      return;
    }
    const std::vector<Step> receives{{kRecv, 0, -1, -1, kOutput, 0, count, -1, -1, -1},
                                     {kReadReduce, 0, -1, -1, kOutput, 0, count, -1, -1, -1}};
    is_short = true;
    const Status status = run(steps, receives, *values, 3);
    is_short = false;
    assert(status.code == Code::no_memory && status.peer == 1);
    values.reset();
    while (!is_over) messages.programs().try_progress();
  });
}

void test_bad_programs_are_refused() {
  on_ranks(2, 1, [&](Steps& steps, Messages&, int rank) {
    std::vector<int64_t> values(8, 1);
    const std::vector<Step> bad{
      {kSend, 2, kOutput, 0, -1, -1, 8, -1, -1, -1},
      {kSend, rank, kOutput, 0, -1, -1, 8, -1, -1, -1},
      {kRecv, 1 - rank, -1, -1, kOutput, 1, 8, -1, -1, -1},
      {kRecv, 1 - rank, -1, -1, kInput, 0, 1, -1, -1, -1},
      {9, -1, kOutput, 0, kOutput, 0, 1, -1, -1, -1},
    };
    Step sum{kReduce, -1, kInput, 0, kOutput, 0, 8, -1, -1, -1, 1};
    Step moved = sum;
    moved.goes_on = 0;
    moved.dst_off = 1;
    moved.count = 7;
    assert(run(steps, {sum}, values, 1).code == Code::bad_program);
    assert(run(steps, {sum, moved}, values, 1).code == Code::bad_program);
    for (const Step& step : bad) assert(run(steps, {step}, values, 1).code == Code::bad_program);
  });
}

}  // namespace

int main() {
  test_sums(2);
  test_sums(5);
  test_lists(2);
  test_lists(3);
  test_disagreement(2);
  test_disagreement(4);
  test_uneven();
  test_timeout_and_abort();
  for (int64_t count : {1, 5000, 1'300'000}) {
    test_accumulations(count, false);
    test_accumulations(count, true);
  }
  test_empty_message();
  test_no_memory();
  test_bad_programs_are_refused();
  std::puts("ok");
}
