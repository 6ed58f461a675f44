// Messages of a rank that gets no memory at some point: it is told, nothing else happens, and all goes on.
#include "world.hpp"

#include <cstdlib>
#include <new>

namespace {

// How many requests of this thread are granted before one is not; negative: all are.
thread_local int granted = -1;

bool is_refused() { return granted >= 0 && granted-- == 0; }

}  // namespace

// Not to be inlined, as the compiler would take new and free for a mismatch.
__attribute__((noinline)) void* operator new(size_t nbytes) {
  void* memory = is_refused() ? nullptr : std::malloc(nbytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace {

constexpr size_t kBytes = 1'000'000;  // more than the ring takes

// Let each request of `call` fail in turn, until it needs no more; how often it was told.
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
    numbers.push_back(sends ? world[0].start_send(1, envelope(2, kBytes), out.data()).number
                            : world[1].start_recv(0, envelope(2, kBytes), in.data(), nullptr).number);
  };
  // A receive that could not be started is not there: the next one gets the message.
  assert(with_less_and_less([&] { start(false); }) != 0);
  assert(world[1].number_of(in.data()) == numbers[0] && world[1].number_of(out.data()) == 0);
  assert(with_less_and_less([&] { start(true); }) != 0);
  std::thread waiter([&] { assert(world[0].wait(numbers[1], kMinute).code == Code::ok); });
  assert(world[1].wait(numbers[0], kMinute).code == Code::ok && in == out);
  waiter.join();
  exchange(world, 3);
}

// A message for which there is no memory stays where it is until there is some.
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

// A send whose beginning is at its receiver, and of whose rest no copy can be made.
void test_a_rest_that_cannot_be_kept() {
  World world(2);
  std::vector<char> out = pattern(kBytes, 1), in(kBytes);
  const uint64_t number = world[0].start_send(1, envelope(1, kBytes), out.data()).number;
  const uint64_t next = world[0].start_send(1, envelope(2, 8), out.data()).number;
  granted = 0;
  assert(world[0].cancel(number).code == Code::cancelled);
  granted = -1;
  std::fill(out.begin(), out.end(), 'x');
  assert(world[1].recv(0, envelope(1, kBytes), in.data(), nullptr, kMoment).code == Code::timeout);
  assert(world[0].wait(next, kMoment).code == Code::timeout);
  assert(world[0].cancel(next).code == Code::cancelled);
  assert(world[0].send(1, envelope(3, 8), out.data(), kMinute).code == Code::lost);
}

// A receive that needs memory to wake its sender: the message goes where it should, and nowhere else.
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
    world[0].wait(number, 0);  // it wants room
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

// A receive that could not begin is not there.
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
    }
    granted = -1;
    assert(world[1].number_of(in.data()) == number);
    assert(world[1].number_of(in.data(), world[1].last_number()) == 0);
    if (number != 0) assert(world[1].cancel(number).code == Code::cancelled);
  }
  exchange(world, 2);
}

}  // namespace

int main() {
  test_beginnings();
  test_a_message_that_cannot_be_kept();
  test_a_rest_that_cannot_be_kept();
  test_a_receive_into_memory_that_is_gone();
  test_a_receive_that_could_not_begin();
  std::puts("ok");
  return 0;
}
