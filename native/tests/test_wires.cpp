// Messages over wires that come late, or end.
#include "tests/world.hpp"

#include <ctime>

namespace {

// Messages sent before a wire is there go over it in order. A waiting thread requests the wire.
void test_late_wire() {
  World world(2, false);
  std::atomic<int> wanted{-1};
  world[0].callbacks().wire = [&](int rank, int channel, bool ended) {
    assert(channel == 0 && !ended);
    wanted = rank;
  };
  world.run([&](Messages& messages, int rank) {
    const size_t nbytes = 40'000;
    for (unsigned round = 0; round < 3; ++round) {
      const std::vector<char> out = pattern(nbytes, round);
      std::vector<char> in(nbytes);
      if (rank == 0) {
        const Outcome started = messages.start_send(1, envelope(1, nbytes), out.data());
        const uint64_t first = started.number;
        assert(started.code != Code::unreachable);
        if (round == 0) {
          assert(wanted == 1 && first != 0);
          world.connect(0, 1);
        }
        assert(
          messages.send(1, envelope(1, nbytes), pattern(nbytes, round + 9).data(), kMinute).code ==
          Code::ok);
        const Code code = first == 0 ? Code::ok : messages.wait(first, kMinute).code;
        assert(code == Code::ok || code == Code::unknown);
      } else {
        for (unsigned seed : {round, round + 9}) {
          const Outcome got = messages.recv(0, envelope(1, nbytes), in.data(), nullptr, kMinute);
          assert(got.code == Code::ok && in == pattern(nbytes, seed));
        }
      }
    }
  });
}

// The end of a wire is reported once. Messages that came over it are there, and a receive waits for
// peer_down().
void test_wire_that_ends() {
  World world(2);
  std::atomic<int> ended{0};
  world[0].callbacks().wire = [&](int rank, int, bool has_ended) {
    assert(rank == 1 && has_ended);
    ++ended;
  };
  const std::vector<char> out = pattern(30, 1);
  std::vector<char> in(30);
  assert(world[1].send(0, envelope(1, 30), out.data(), kMinute).code == Code::ok);
  World::end(world[1], kMinute);
  assert(world[0].recv(1, envelope(2, 30), in.data(), nullptr, kMoment).code == Code::timeout);
  assert(ended == 1);
  assert(world[0].send(1, envelope(2, 30), out.data(), kMoment).code == Code::timeout);
  assert(!world[0].peer_down(1, Code::lost));
  assert(world[0].recv(1, envelope(2, 30), in.data(), nullptr, kMinute).code == Code::lost);
  assert(world[0].recv(1, envelope(1, 30), in.data(), nullptr, kMinute).code == Code::ok);
  assert(in == out && ended == 1);
}

// A rank is gone while its wire is still open, because the report came faster by another way.
void test_peer_down_before_the_last_message() {
  World world(2);
  const std::vector<char> out = pattern(30, 1);
  std::vector<char> in(30);
  assert(world[0].peer_down(1, Code::left));
  std::thread late([&] {
    assert(world[1].send(0, envelope(1, 30), out.data(), kMinute).code == Code::ok);
    World::end(world[1], kMinute);
  });
  assert(world[0].recv(1, envelope(1, 30), in.data(), nullptr, kMinute).code == Code::ok);
  assert(world[0].recv(1, envelope(1, 30), in.data(), nullptr, kMinute).code == Code::left);
  late.join();
}

// The first message that can use several wires requests them. Messages sent before all are there go
// over the existing wires, in order.
void test_wires_that_come_one_by_one() {
  channels = 4;
  World world(2, false);
  std::atomic<int> asked{0};
  world[0].callbacks().wire = [&](int rank, int channel, bool ended) {
    assert(rank == 1 && channel == asked && !ended);
    ++asked;
  };
  world.run([&](Messages& messages, int rank) {
    const size_t sizes[] = {8, 700'000, 16, 2'000'003, 1, 524'288, 524'287, 900'000, 0};
    for (unsigned seed = 0; seed < 9; ++seed) {
      const std::vector<char> right = pattern(sizes[seed], seed);
      std::vector<char> in(sizes[seed]);
      if (rank == 1) {
        assert(messages.recv(0, envelope(1, in.size()), in.data(), nullptr, kMinute).code ==
               Code::ok);
        assert(in == right);
        continue;
      }
      const uint64_t number = messages.start_send(1, envelope(1, in.size()), right.data()).number;
      assert(asked == (seed == 0 ? 1 : 4));
      const int next[] = {0, 3, -1, 1, -1, -1, 2, -1, -1};
      if (next[seed] >= 0) world.connect(0, 1, next[seed]);
      const Code code = number == 0 ? Code::ok : messages.wait(number, kMinute).code;
      assert(code == Code::ok || code == Code::unknown);
    }
  });
  channels = 1;
}

// One of several wires ends. A receive of a message with a part on that wire waits for peer_down().
// Messages that came before are there.
void test_one_of_several_wires_ends() {
  channels = 3;
  World world(2);
  std::atomic<int> ended{-1};
  world[0].callbacks().wire = [&](int rank, int channel, bool has_ended) {
    assert(rank == 1 && has_ended);
    ended = channel;
  };
  const std::vector<char> out = pattern(700'000, 1);
  std::vector<char> in(out.size());
  std::thread sender([&] {
    assert(world[1].send(0, envelope(1, out.size()), out.data(), kMinute).code == Code::ok);
  });
  assert(world[0].recv(1, envelope(1, in.size()), in.data(), nullptr, kMinute).code == Code::ok);
  sender.join();
  assert(in == out && ended == -1);
  world.cut(0, 1, 2);
  assert(world[1].send(0, envelope(1, 30), out.data(), kMinute).code == Code::ok);
  assert(world[1].send(0, envelope(2, out.size()), out.data(), kMoment).code == Code::timeout);
  assert(world[0].recv(1, envelope(2, in.size()), in.data(), nullptr, kMoment).code ==
         Code::timeout);
  assert(ended == 2);
  assert(world[0].peer_down(1, Code::lost));  // the other wires are open
  assert(world[0].recv(1, envelope(2, in.size()), in.data(), nullptr, kMinute).code == Code::lost);
  assert(world[0].recv(1, envelope(1, 30), in.data(), nullptr, kMinute).code == Code::ok);
  assert(world[0].send(1, envelope(1, in.size()), in.data(), kMinute).code == Code::lost);
  channels = 1;
}

// Sending over it fails, and incoming data must wait: its end must not wake the thread again and
// again.
void test_a_wire_that_is_broken_one_way() {
  int fds[2];
  assert(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
  Wire wire(fds[0], 0);
  wire.is_blocked = true;
  close(fds[1]);
  wire.begin({7, 1, 0, 5, kWhole}, {0, 0});
  bool moved = false;
  assert(!wire.cannot_send && !wire.write(nullptr, false, &moved) && wire.cannot_send && !moved);
  assert(wire.wanted_events() == 0);
  wire.is_blocked = false;
  assert(wire.wanted_events() == POLLIN);  // detects the end
}

// Unsent messages to a lost rank must not keep a thread awake.
void test_a_wait_beside_a_lost_rank_sleeps() {
  World world(3);
  const std::vector<char> out = pattern(1'000'000, 1);
  std::vector<char> in(out.size());
  const uint64_t number = world[0].start_send(1, envelope(1, out.size()), out.data()).number;
  assert(world[0].peer_down(1, Code::lost));
  char small[8];
  // Until no message of the rank is expected.
  while (world[0].recv(1, envelope(2, 8), small, nullptr, kMoment).code == Code::timeout) continue;
  assert(world[0].wait(number, kMinute).code == Code::lost);
  // Its end has room again.
  assert(world[1].recv(0, envelope(1, in.size()), in.data(), nullptr, kMoment).code != Code::ok);
  const auto used_ns = [] {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
  };
  const int64_t before_ns = used_ns();
  assert(world[0].recv(2, envelope(1, 8), small, nullptr, 10 * kMoment).code == Code::timeout);
  assert(used_ns() - before_ns < 2 * kMoment);
}

// All that the ranks send a root before it enters a call has a limit.
void test_early_data_between_far_hosts() {
  for (const auto& [ranks, expected] : {std::pair(2, 1024), {32, 1024}, {64, 512}, {4096, 32}}) {
    Messages one(0, ranks);
    one.introduce({}, false, true);
    assert(one.programs().eager_bytes() == static_cast<size_t>(expected) * 1024);
    one.introduce({}, false, false);
    assert(one.programs().eager_bytes() == kEagerBytes);
  }
}

}  // namespace

int main() {
  ways = kWires;
  test_a_wire_that_is_broken_one_way();
  test_early_data_between_far_hosts();
  test_late_wire();
  test_wire_that_ends();
  test_peer_down_before_the_last_message();
  test_wires_that_come_one_by_one();
  test_one_of_several_wires_ends();
  test_a_wait_beside_a_lost_rank_sleeps();
  std::puts("ok");
  return 0;
}
