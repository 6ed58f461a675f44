// What wires add to messages: they come late, and end.
#include "world.hpp"

namespace {

// What is sent before a wire stands, goes over it in order; and who waits is told to make one.
void test_late_wire() {
  World world(2, false);
  std::atomic<int> wanted{-1};
  world[0].set_wire([&](int rank, bool ended) {
    assert(!ended);
    wanted = rank;
  });
  world.run([&](Messages& messages, int rank) {
    const size_t nbytes = 40'000;
    for (unsigned round = 0; round < 3; ++round) {
      const std::vector<char> out = pattern(nbytes, round);
      std::vector<char> in(nbytes);
      if (rank == 0) {
        const uint64_t first = messages.start_send(1, envelope(1, nbytes), out.data()).number;
        assert(messages.reaches(1));
        if (round == 0) {
          assert(wanted == 1 && first != 0);
          world.connect(0, 1);
        }
        assert(messages.send(1, envelope(1, nbytes), pattern(nbytes, round + 9).data(), kMinute)
                 .code == Code::ok);
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

// A wire that ends is told of once; what came over it is there, and the rank's end is waited for.
void test_wire_that_ends() {
  World world(2);
  std::atomic<int> ended{0};
  world[0].set_wire([&](int rank, bool has_ended) {
    assert(rank == 1 && has_ended);
    ++ended;
  });
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

// A rank that is gone while its wire still stands (the news came another way, and faster).
void test_news_before_the_last_message() {
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

}  // namespace

int main() {
  ways = kWires;
  test_late_wire();
  test_wire_that_ends();
  test_news_before_the_last_message();
  std::puts("ok");
  return 0;
}
