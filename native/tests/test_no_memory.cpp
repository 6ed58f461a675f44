// Messages of a rank that runs out of memory at any moment: the rank gets an error, and all
// messages go on.
#include "steps/steps.hpp"
#include "tests/world.hpp"

#include <cstdlib>
#include <new>

namespace {

// How many allocations of this thread succeed before one fails. Negative: all succeed.
thread_local int granted = -1;

bool is_refused() { return granted >= 0 && granted-- == 0; }

}  // namespace

// Not inlined, because the compiler would report a mismatch of new and free.
__attribute__((noinline)) void* operator new(size_t nbytes) {
  void* memory = is_refused() ? nullptr : std::malloc(nbytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

constexpr size_t kBytes = 4'000'000;  // more than the ring takes

// Let each allocation of `call` fail in turn, until none fails. Returns the number of errors.
int with_less_and_less(const std::function<void()>& call) {
  for (int count = 0;; ++count) {
    assert(count < 100);
    granted = count;
    try {
      call();
    } catch (const std::bad_alloc&) {
      continue;
    }
    const bool was_enough = granted >= 0;
    granted = -1;
    if (was_enough) return count;
  }
}

void exchange(World& world, int tag) {
  const std::vector<char> out = pattern(8, static_cast<unsigned>(tag));
  std::vector<char> in(8);
  assert(world[0].send(1, envelope(tag, 8), out.data(), kMinute).code == Code::ok);
  assert(world[1].recv(0, envelope(tag, 8), in.data(), nullptr, kMinute).code == Code::ok);
  assert(in == out);
}

void test_beginnings() {
  World world(2);
  exchange(world, 1);
  const std::vector<char> out = pattern(kBytes, 1);
  std::vector<char> in(kBytes), small(8);
  std::vector<uint64_t> numbers;
  numbers.reserve(2);
  const auto start = [&](bool sends) {
    numbers.push_back(sends
                        ? world[0].start_send(1, envelope(2, kBytes), out.data()).number
                        : world[1].start_recv(0, envelope(2, kBytes), in.data(), nullptr).number);
  };
  // A receive that could not be started does not exist: the next receive gets the message.
  assert(with_less_and_less([&] { start(false); }) != 0);
  assert(world[1].number_of(in.data()) == numbers[0] && world[1].number_of(out.data()) == 0);
  assert(with_less_and_less([&] { start(true); }) != 0);
  std::thread waiter([&] { assert(world[0].wait(numbers[1], kMinute).code == Code::ok); });
  assert(world[1].wait(numbers[0], kMinute).code == Code::ok && in == out);
  waiter.join();
  exchange(world, 3);
}

// A message without memory for it stays in its ring or wire until there is memory.
void test_a_message_that_cannot_be_kept() {
  World world(2);
  char in[8];
  assert(world[0].send(1, envelope(1, 8), "message", kMinute).code == Code::ok);
  granted = 1;  // for the receive's place in a list
  const Outcome got = world[1].recv(0, envelope(2, 8), in, nullptr, 0);
  granted = -1;
  assert(got.code == Code::timeout);
  exchange(world, 3);
  assert(world[1].recv(0, envelope(1, 8), in, nullptr, kMinute).code == Code::ok);
  assert(std::memcmp(in, "message", 8) == 0);
}

// Cancel a send without memory for a copy of its rest. The receiver has the beginning. `may_end`:
// a thread of the receiver may take the message before the cancel.
void cancel_without_memory(Messages& messages, uint64_t number, bool may_end = false) {
  granted = 0;
  const Code code = messages.cancel(number).code;
  granted = -1;
  const bool has_ended = code == Code::ok || code == Code::unknown;
  assert(code == Code::cancelled || (may_end && has_ended));
}

// A ring has no such message. The next message overwrites the bytes that the receive got.
void test_a_cancel_without_memory() {
  for (const bool is_asked_for : {false, true}) {
    for (const bool has_come : {false, true}) {
      World world(2);
      std::vector<char> out = pattern(kBytes, 1), in(kBytes), small(8);
      const std::vector<char> next = pattern(kBytes, 2);
      uint64_t receive = 0;
      const auto ask = [&] {
        receive = world[1].start_recv(0, envelope(1, kBytes), in.data(), nullptr).number;
      };
      if (is_asked_for) ask();
      const uint64_t number = world[0].start_send(1, envelope(1, kBytes), out.data()).number;
      const uint64_t behind = world[0].start_send(1, envelope(2, 8), next.data()).number;
      if (has_come) {
        const Outcome none = world[1].recv(0, envelope(3, 8), small.data(), nullptr, kMoment);
        assert(none.code == Code::timeout);
      }
      if (!is_asked_for) ask();
      cancel_without_memory(world[0], number);
      std::fill(out.begin(), out.end(), 'x');
      std::thread sender([&] {
        const Code code = world[0].wait(behind, kMinute).code;
        assert(code == Code::ok || code == Code::unknown);
        // Again, and the ring is full of it.
        const uint64_t other = world[0].start_send(1, envelope(2, kBytes), out.data()).number;
        cancel_without_memory(world[0], other, true);
        assert(world[0].send(1, envelope(1, kBytes), next.data(), kMinute).code == Code::ok);
      });
      assert(world[1].recv(0, envelope(2, 8), small.data(), nullptr, kMinute).code == Code::ok);
      assert(std::equal(small.begin(), small.end(), next.begin()));
      assert(world[1].wait(receive, kMinute).code == Code::ok && in == next);
      sender.join();
      exchange(world, 4);
    }
  }
}

// A receive from any source takes the message of another rank that came meanwhile.
void test_another_rank_replaces_an_aborted_message() {
  World world(3);
  const auto all = std::make_shared<const std::vector<int>>(std::vector<int>{0, 2});
  const std::vector<char> out = pattern(kBytes, 1), next = pattern(kBytes, 2);
  std::vector<char> in(kBytes), small(8);
  const uint64_t number = world[0].start_send(1, envelope(1, kBytes), out.data()).number;
  const uint64_t receive = world[1].start_recv(-1, envelope(1, kBytes), in.data(), all).number;
  std::thread sender([&] {
    assert(world[2].send(1, envelope(1, kBytes), next.data(), kMinute).code == Code::ok);
    assert(world[2].send(1, envelope(2, 8), next.data(), kMinute).code == Code::ok);
  });
  assert(world[1].recv(2, envelope(2, 8), small.data(), nullptr, kMinute).code == Code::ok);
  sender.join();
  cancel_without_memory(world[0], number);
  const Outcome got = world[1].wait(receive, kMinute);
  assert(got.code == Code::ok && got.source == 2 && in == next);
}

// The wire is broken, which both ranks detect at once and not by a time-out.
void test_a_cancel_without_memory_breaks_a_wire() {
  ways = kWires;
  World world(2);
  ways = kRings;
  for (const int rank : {0, 1}) {
    world[rank].callbacks().wire = [&world, rank](int other, int, bool ended) {
      if (ended) world[rank].peer_down(other, Code::lost);
    };
  }
  const std::vector<char> out = pattern(kBytes, 1);
  std::vector<char> in(kBytes);
  const uint64_t number = world[0].start_send(1, envelope(1, kBytes), out.data()).number;
  const uint64_t next = world[0].start_send(1, envelope(2, 8), out.data()).number;
  cancel_without_memory(world[0], number);
  assert(world[0].wait(next, kMinute).code == Code::lost);
  assert(world[0].send(1, envelope(3, 8), out.data(), kMinute).code == Code::lost);
  const Outcome got = world[1].recv(0, envelope(1, kBytes), in.data(), nullptr, kMinute);
  assert(got.code == Code::lost && got.source == 0);
}

// A receive that needs memory to wake its sender: the message goes to its place and to no other.
void test_a_receive_into_memory_that_is_gone() {
  const auto receive = [](World& world, int grant) {
    std::vector<char> in(kBytes);
    granted = grant;
    try {
      const Outcome got = world[1].recv(0, envelope(1, kBytes), in.data(), nullptr, kMoment);
      granted = -1;
      assert(got.code == Code::timeout || (got.code == Code::ok && in == pattern(kBytes, 1)));
    } catch (const std::bad_alloc&) {
      granted = -1;
    }
  };
  for (int grant = 0; grant < 8; ++grant) {
    World world(2);
    const std::vector<char> out = pattern(kBytes, 1);
    const uint64_t number = world[0].start_send(1, envelope(1, kBytes), out.data()).number;
    world[0].wait(number, 0);  // needs room in the ring
    receive(world, grant);
    std::vector<char> in(8);
    std::thread sender([&] {
      world[0].wait(number, kMoment);
      world[0].cancel(number);
      assert(world[0].send(1, envelope(2, 8), out.data(), kMinute).code == Code::ok);
    });
    assert(world[1].recv(0, envelope(2, 8), in.data(), nullptr, kMinute).code == Code::ok);
    sender.join();
    assert(std::equal(in.begin(), in.end(), out.begin()));
  }
}

// A receive that could not begin does not exist.
void test_a_receive_that_could_not_begin() {
  World world(2);
  const std::vector<char> out = pattern(kBytes, 1);
  std::vector<char> in(kBytes);
  for (int grant = 0; grant < 4; ++grant) {
    uint64_t number = 0;
    granted = grant;
    try {
      number = world[1].start_recv(0, envelope(1, kBytes), in.data(), nullptr).number;
    } catch (const std::bad_alloc&) {
      assert(number == 0);
    }
    granted = -1;
    assert(world[1].number_of(in.data()) == number);
    assert(world[1].number_of(in.data(), world[1].last_number()) == 0);
    if (number != 0) assert(world[1].cancel(number).code == Code::cancelled);
  }
  exchange(world, 2);
}

// Two ranks swap halves and add. Rank 1 runs out of memory at some moment and gets an error.
// Returns whether all allocations succeeded.
bool swaps_with_memory(int grant) {
  World world(2);
  const int64_t count = 600'000;
  const auto run = [&](int rank, std::vector<int64_t>* values, int memory) {
    const std::shared_ptr<Messages> here(&world[rank], [](Messages*) {});
    Steps steps(here, 7, {0, 1}, {0, 1}, nullptr);
    const Step both[] = {{kSend, 1 - rank, kOutput, 0, -1, -1, count, -1, -1, -1},
                         {kRecvReduce, 1 - rank, -1, -1, kOutput, count, count, -1, -1, -1}};
    const Buffers buffers{
      nullptr, 0, reinterpret_cast<char*>(values->data()), 2 * count, false, nullptr, 0, 8};
    granted = memory;
    const Status status =
      steps.run({both, 2, nullptr, 0}, buffers, reduce_fn(DType::i64, RedOp::sum), {5, 1}, kMinute);
    const bool was_enough = memory < 0 || granted >= 0;
    granted = -1;
    assert(status.is_ok() || status.code == Code::aborted || status.code == Code::no_memory);
    assert(status.is_ok() || !was_enough || rank == 0);
    return std::pair<Code, bool>{status.code, was_enough};
  };
  std::vector<int64_t> mine(2 * count, 1), theirs(2 * count, 2);
  std::thread other([&] { run(0, &theirs, -1); });
  const auto [code, was_enough] = run(1, &mine, grant);
  if (code == Code::ok) {
    assert(mine[0] == 1 && mine[count] == 3 && mine[2 * count - 1] == 3);
  } else {
    world[0].fail_context(7);
    std::fill(mine.begin(), mine.end(), 9);
  }
  other.join();
  std::thread sender(
    [&] { assert(world[0].send(1, envelope(1, 8, 8), "message", kMinute).code == Code::ok); });
  char in[8];
  assert(world[1].recv(0, envelope(1, 8, 8), in, nullptr, kMinute).code == Code::ok);
  sender.join();
  assert(code == Code::ok || std::count(mine.begin(), mine.end(), 9) == 2 * count);
  return was_enough;
}

void test_programs() {
  int grant = 0;
  while (!swaps_with_memory(grant)) ++grant;
  assert(grant > 5);
}

}  // namespace

int main() {
  test_beginnings();
  test_a_message_that_cannot_be_kept();
  test_a_cancel_without_memory();
  test_another_rank_replaces_an_aborted_message();
  test_a_cancel_without_memory_breaks_a_wire();
  test_a_receive_into_memory_that_is_gone();
  test_a_receive_that_could_not_begin();
  test_programs();
  std::puts("ok");
  return 0;
}
