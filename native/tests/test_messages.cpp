// Threads as ranks that exchange messages over rings, over wires, or over both: order, tags, sizes,
// and every way to end.
#include "kernels/kernels.hpp"
#include "tests/world.hpp"

#include <sys/mman.h>

namespace {

void test_ping_pong() {
  World world(2);
  world.run([](Messages& messages, int rank) {
    for (size_t nbytes : {0, 1, 31, 32, 33, 4096, 131072, 131073, 2097151, 2097152, 3'000'000}) {
      for (unsigned round = 0; round < (nbytes < 100'000 ? 20U : 3U); ++round) {
        const std::vector<char> out = pattern(nbytes, round);
        std::vector<char> in(nbytes);
        if (rank == 0) {
          assert(messages.send(1, envelope(1, nbytes), out.data(), kMinute).code == Code::ok);
        }
        const Outcome got =
          messages.recv(1 - rank, envelope(1, nbytes), in.data(), nullptr, kMinute);
        assert(got.code == Code::ok && got.source == 1 - rank && in == out);
        if (rank == 1) {
          assert(messages.send(0, envelope(1, nbytes), out.data(), kMinute).code == Code::ok);
        }
      }
    }
  });
}

void test_both_send_first(size_t nbytes) {
  World world(2);
  world.run([nbytes](Messages& messages, int rank) {
    const std::vector<char> out = pattern(nbytes, static_cast<unsigned>(rank));
    std::vector<char> in(nbytes);
    assert(messages.send(1 - rank, envelope(1, nbytes), out.data(), kMinute).code == Code::ok);
    assert(messages.recv(-1, envelope(1, nbytes), in.data(), both(), kMinute).code == Code::ok);
    assert(in == pattern(nbytes, static_cast<unsigned>(1 - rank)));
  });
}

// Every rank sends to every rank in an order of its own. Receives are posted in a further order.
void test_random(unsigned seed) {
  const int ranks = 3, tags = 3, count = 15;
  const size_t sizes[] = {0, 8, 100, 5000, 200'000, 8, 2'097'153, 100};
  World world(ranks);
  world.run([&](Messages& here, int rank) {
    std::mt19937 random(seed * 10 + static_cast<unsigned>(rank));
    auto size_of = [&](int from, int to, int tag, int k) {
      return sizes[static_cast<size_t>(from * 3 + to * 5 + tag * 7 + k) % 8];
    };
    auto shuffled = [&] {
      std::vector<int> order;
      for (int peer = 0; peer < ranks; ++peer) {
        for (int tag = 0; tag < tags; ++tag) {
          for (int k = 0; k < count; ++k) order.push_back(peer * tags + tag);
        }
      }
      std::shuffle(order.begin(), order.end(), random);
      return order;
    };
    std::vector<std::vector<char>> kept;
    std::vector<std::pair<std::vector<char>, std::vector<char>>> expected;
    kept.reserve(1000);
    expected.reserve(1000);
    std::vector<uint64_t> numbers;
    std::vector<int> sent(static_cast<size_t>(ranks * tags)), got(sent);
    std::vector<int> sends = shuffled(), receives = shuffled();
    for (size_t i = 0; i < sends.size(); ++i) {
      const int s = sends[i], to = s / tags, tag = s % tags;
      const size_t nbytes = size_of(rank, to, tag, sent[static_cast<size_t>(s)]++);
      kept.push_back(pattern(nbytes, static_cast<unsigned>(rank * 100 + tag)));
      numbers.push_back(here.start_send(to, envelope(tag, nbytes), kept.back().data()).number);
      const int r = receives[i], from = r / tags, wanted = r % tags;
      const size_t room = size_of(from, rank, wanted, got[static_cast<size_t>(r)]++);
      expected.emplace_back(std::vector<char>(room),
                            pattern(room, static_cast<unsigned>(from * 100 + wanted)));
      char* into = expected.back().first.data();
      numbers.push_back(here.start_recv(from, envelope(wanted, room), into, nullptr).number);
      // Short, because the message may be sent later.
      if (random() % 2 == 0) here.wait(numbers.back(), 100'000);
    }
    for (uint64_t number : numbers) {
      while (true) {
        const Outcome outcome = number == 0 ? Outcome{} : here.wait(number, kMoment);
        assert(outcome.code == Code::ok || outcome.code == Code::unknown ||
               outcome.code == Code::timeout);
        if (outcome.code != Code::timeout) break;
      }
    }
    // The server thread has the outcomes of those with Code::unknown, at once.
    for (const auto& [in, out] : expected) assert(in == out);
  });
}

// serve() does not return a receive that is not watched, but moves a long message into it.
void test_watch() {
  World world(2);
  Messages &sender = world[0], &receiver = world[1];
  std::vector<uint64_t> reported;
  std::atomic<uint64_t> last{0};
  std::thread server([&] {
    while (true) {
      const std::vector<Outcome> outcomes = receiver.serve();
      if (outcomes.empty()) return;
      for (const Outcome& outcome : outcomes) reported.push_back(outcome.number);
      if (!reported.empty()) last = reported.back();
    }
  });
  const std::vector<char> out = pattern(3'000'000, 1);
  std::vector<char> in(out.size()), small(8);
  const uint64_t long_one =
    receiver.start_recv(0, envelope(1, out.size()), in.data(), nullptr).number;
  // No thread waits there. On a wire, the transport of a blocked sender causes this call.
  receiver.attend();
  assert(sender.send(1, envelope(1, out.size()), out.data(), kMinute).code == Code::ok);
  const Code code = receiver.wait(long_one, kMinute).code;
  const uint64_t asked = receiver.start_recv(0, envelope(2, 8), small.data(), nullptr).number;
  assert(sender.send(1, envelope(2, 8), out.data(), kMinute).code == Code::ok);
  const Code short_code = receiver.wait(asked, kMinute).code;
  const uint64_t watched = receiver.start_recv(0, envelope(3, 8), small.data(), nullptr).number;
  receiver.watch(watched);
  assert(sender.send(1, envelope(3, 8), out.data() + 8, kMinute).code == Code::ok);
  while (last != watched) std::this_thread::yield();
  receiver.close(0);
  server.join();
  // The server may have completed the long receive first, and then the short receive before it
  // slept. It returns these outcomes and no other.
  assert(in == out && (code == Code::ok || reported.front() == long_one));
  const bool is_reported = std::find(reported.begin(), reported.end(), asked) != reported.end();
  assert(short_code == (is_reported ? Code::unknown : Code::ok));
  assert(std::memcmp(small.data(), out.data() + 8, 8) == 0);
}

void test_order_of_any_source() {
  World world(2);
  const char one = 1, two = 2;
  char in = 0;
  assert(world[0].send(1, envelope(1, 1), &one, kMinute).code == Code::ok);
  assert(world[0].send(1, envelope(2, 1), &two, kMinute).code == Code::ok);
  assert(world[1].send(1, envelope(1, 1), &two, kMinute).code == Code::ok);  // to itself
  Outcome got = world[1].recv(-1, envelope(2, 1), &in, both(), kMinute);
  assert(got.code == Code::ok && got.source == 0 && in == 2);
  assert(world[1].recv(1, envelope(1, 1), &in, nullptr, kMinute).source == 1 && in == 2);
  assert(world[1].recv(-1, envelope(1, 1), &in, both(), kMinute).source == 0 && in == 1);
}

void test_mismatch() {
  World world(2);
  std::vector<char> big = pattern(2'800'000, 1), room(8, 'x');
  for (bool posted_first : {true, false}) {
    uint64_t number = 0;
    if (posted_first) number = world[1].start_recv(0, envelope(1, 8), room.data(), nullptr).number;
    Outcome sent = world[0].start_send(1, envelope(1, big.size()), big.data());
    Outcome got = posted_first ? world[1].wait(number, kMinute)
                               : world[1].recv(0, envelope(1, 8), room.data(), nullptr, kMinute);
    assert(got.code == Code::mismatch && got.source == 0 && got.nbytes == big.size());
    assert(room == std::vector<char>(8, 'x'));
    // The receiver discards the rest while it waits for the next message.
    std::thread sender([&] {
      assert(sent.number == 0 || world[0].wait(sent.number, kMinute).code == Code::ok);
      assert(world[0].send(1, envelope(2, 1), big.data(), kMinute).code == Code::ok);
    });
    assert(world[1].recv(0, envelope(2, 1), room.data(), nullptr, kMinute).code == Code::ok);
    sender.join();
    room[0] = 'x';
  }
}

void test_time_outs() {
  World world(2);
  std::vector<char> big = pattern(4'000'000, 1), in(4'000'000);
  const std::vector<char> untouched(in);
  assert(world[1].recv(0, envelope(1, 8), in.data(), nullptr, kMoment).code == Code::timeout);
  // Half of the message is in the ring when the send times out. The receiver gets all of it.
  assert(world[0].send(1, envelope(1, big.size()), big.data(), kMoment).code == Code::timeout);
  std::fill(big.begin(), big.end(), 'x');
  assert(world[1].recv(0, envelope(2, 8), in.data(), nullptr, kMoment).code == Code::timeout);
  assert(in == untouched);
  std::thread helper([&] {
    assert(world[0].recv(1, envelope(3, 1), big.data(), nullptr, kMinute).code == Code::ok);
  });
  assert(world[1].recv(0, envelope(1, in.size()), in.data(), nullptr, kMinute).code == Code::ok);
  assert(in == pattern(4'000'000, 1));
  assert(world[1].send(0, envelope(3, 1), in.data(), kMinute).code == Code::ok);
  helper.join();
}

// A program's message stays in its ring or wire until its receive, unless a receive waits for a
// message behind it.
void test_messages_of_programs() {
  World world(3);
  const std::vector<char> out = pattern(4'000'000, 1);
  std::vector<char> in(out.size()), small(8);
  Operation sent;
  sent.envelope = envelope(-2, out.size());
  sent.peer = 1;
  sent.is_send = true;
  sent.data = const_cast<char*>(out.data());
  world[0].programs().begin(sent);
  std::thread waiter([&] {
    assert(world[1].recv(2, envelope(1, 8), small.data(), nullptr, kMinute).code == Code::ok);
  });
  assert(world[0].programs().wait(sent, kMinute) == Code::ok);
  assert(world[2].send(1, envelope(1, 8), out.data() + 1, kMinute).code == Code::ok);
  waiter.join();
  assert(std::memcmp(small.data(), out.data() + 1, 8) == 0);
  assert(world[1].recv(0, envelope(-2, in.size()), in.data(), nullptr, kMinute).code == Code::ok);
  assert(in == out);
}

void test_ends() {
  for (int way = 0; way < 5; ++way) {
    World world(3);
    char in[8];
    const char out[8] = "message";
    assert(world[2].send(0, envelope(9, 8), out, kMinute).code == Code::ok);
    const Code expected[] = {Code::aborted, Code::lost, Code::left, Code::closed, Code::left};
    std::thread waiter([&] {
      const Outcome got = world[0].recv(2, envelope(1, 8), in, nullptr, kMinute);
      assert(got.code == expected[way]);
    });
    const uint64_t other = world[0].start_recv(1, envelope(1, 8, 8), in, nullptr).number;
    assert(world[0].wait(other, kMoment).code == Code::timeout);
    if (way == 0) world[0].fail_context(7);
    if (way == 1 || way == 2) World::end(world[2], kMinute);
    if (way == 1) world[0].peer_down(2, Code::lost);
    if (way == 2) world[0].peer_down(2, Code::left);
    if (way == 3) World::end(world[0], 0);
    const Envelope last{7, kAnyTag, 0, 0};  // the rank has closed the context
    if (way == 4) assert(world[2].send(0, last, nullptr, kMinute).code == Code::ok);
    waiter.join();
    const Outcome later = world[0].recv(2, envelope(1, 8), in, nullptr, kMinute);
    assert(later.code == expected[way]);
    if (way == 1 || way == 2 || way == 4) {
      // Messages that the rank sent before are there. Operations with another rank go on.
      assert(world[0].recv(2, envelope(9, 8), in, nullptr, kMinute).code == Code::ok);
      assert(std::memcmp(in, out, 8) == 0);
      const Code sent = way == 4 ? Code::ok : expected[way];
      assert(world[0].send(2, envelope(1, 8), out, kMinute).code == sent);
    }
    if (way != 3) {
      assert(world[1].send(0, envelope(1, 8, 8), out, kMinute).code == Code::ok);
      assert(world[0].wait(other, kMinute).code == Code::ok);
    }
  }
}

void test_any_source_of_lost_ranks() {
  World world(3);
  char in[8];
  const auto all = std::make_shared<const std::vector<int>>(std::vector<int>{0, 1, 2});
  const uint64_t number = world[0].start_recv(-1, envelope(1, 8), in, all).number;
  for (int rank : {1, 2}) World::end(world[rank], kMinute);
  world[0].peer_down(1, Code::left);
  assert(world[0].wait(number, kMoment).code == Code::timeout);
  world[0].peer_down(2, Code::left);
  assert(world[0].wait(number, kMinute).code == Code::left);
  world[0].peer_down(1, Code::lost);
  const Outcome later = world[0].recv(-1, envelope(1, 8), in, all, kMinute);
  assert(later.code == Code::lost && later.source == 1);
}

// The received part is discarded. The sender may still revoke the rest.
void test_a_rank_is_lost_in_the_middle_of_a_message() {
  World world(2);
  const std::vector<char> out = pattern(4'000'000, 3);  // more than a ring or wire takes at once
  std::vector<char> in(out.size()), small(8);
  const Outcome begun = world[0].start_send(1, envelope(1, out.size()), out.data());
  assert(begun.number != 0);
  assert(world[1].recv(0, envelope(2, 8), small.data(), nullptr, kMoment).code == Code::timeout);
  world[1].peer_down(0, Code::lost);
  const Outcome outcome = world[1].recv(0, envelope(1, in.size()), in.data(), nullptr, kMinute);
  assert(outcome.code == Code::lost && outcome.source == 0);
  assert(world[0].cancel(begun.number).code == Code::cancelled);
  assert(world[0].cancel(begun.number).code == Code::unknown);
}

// A message that is too large to be kept stays in its ring or wire. Its sender is gone, so the rest
// never comes. A receive from that rank or from any rank then ends at once.
void test_half_a_message_of_a_rank_that_is_gone() {
  const size_t nbytes = size_t{300} << 20;
  const int protection = PROT_READ | PROT_WRITE, kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  auto* memory = static_cast<char*>(mmap(nullptr, nbytes, protection, kind, -1, 0));
  {
    World world(3);
    char small[8];
    assert(world[0].start_send(1, envelope(1, nbytes), memory).number != 0);
    world[1].peer_down(0, Code::lost);
    assert(world[1].recv(0, envelope(2, 8), small, nullptr, kMinute).code == Code::lost);
    const Outcome got = world[1].recv(0, envelope(1, nbytes), memory, nullptr, kMinute);
    assert(got.code == Code::lost && got.source == 0);
    const auto all = std::make_shared<const std::vector<int>>(std::vector<int>{0, 2});
    const Outcome any = world[1].recv(-1, envelope(1, nbytes), memory, all, kMinute);
    assert(any.code == Code::lost && any.source == 0);
  }
  munmap(memory, nbytes);
}

void test_cancelled_and_forgotten() {
  World world(2);
  const std::vector<char> out = pattern(8, 1);
  std::vector<char> in(8), other(8);
  const uint64_t cancelled = world[1].start_recv(0, envelope(1, 8), in.data(), nullptr).number;
  assert(world[1].cancel(cancelled).code == Code::cancelled);
  assert(world[1].wait(cancelled, kMinute).code == Code::unknown);
  // A context that ends with a message without a receive, and a receive without a message.
  assert(world[0].send(1, envelope(2, 8, 9), out.data(), kMinute).code == Code::ok);
  const uint64_t open = world[1].start_recv(0, envelope(3, 8, 9), in.data(), nullptr).number;
  assert(world[0].send(1, envelope(4, 8), out.data(), kMinute).code == Code::ok);
  assert(world[1].recv(0, envelope(4, 8), other.data(), nullptr, kMinute).code == Code::ok);
  world[1].forget_context(9);
  assert(world[1].wait(open, kMinute).code == Code::closed);
  assert(world[1].recv(0, envelope(2, 8, 9), in.data(), nullptr, kMoment).code == Code::timeout);
  assert(other == out && in == std::vector<char>(8));
  // Only a ring with room needs no waiting.
  assert(world[0].try_send(1, envelope(5, 8), out.data()) == (ways != kWires));
  assert(!world[0].try_send(0, envelope(5, 8), out.data()) && !world[1].has_left(0));
  if (ways != kWires) {
    World::end(world[0], kMinute);
    assert(world[1].has_left(0));
    assert(world[1].recv(0, envelope(5, 8), in.data(), nullptr, kMinute).code == Code::ok &&
           in == out);
  }
}

void test_unreachable() {
  World world(2);
  std::vector<Address> addresses(2);
  addresses[1].pid = getpid();
  addresses[1].fd = 0;
  Messages stranger(0, 2);
  assert(stranger.create(addresses[0].nonce) >= 0);
  stranger.introduce(addresses, true);
  assert(stranger.send(1, envelope(1, 0), nullptr, kMinute).code == Code::unreachable);
  stranger.close(0);
}

// A message that comes while a wait checks for signals. The signal then ends the wait.
void test_a_signal_that_comes_with_the_message() {
  World world(2);
  Messages &sender = world[0], &receiver = world[1];
  const std::vector<char> out = pattern(100, 1);
  std::vector<char> in(out.size()), next(out.size());
  bool is_pressed = false;
  receiver.callbacks().poll = [&] {
    if (is_pressed) return false;
    is_pressed = true;
    for (const int tag : {1, 2}) {
      assert(sender.send(1, envelope(tag, out.size()), out.data(), kMinute).code == Code::ok);
    }
    // The later message is here, so the earlier message is here as well.
    return receiver.recv(0, envelope(2, next.size()), next.data(), nullptr, kMinute).code ==
           Code::ok;
  };
  const Outcome got = receiver.recv(0, envelope(1, in.size()), in.data(), nullptr, kMinute);
  assert(got.code == Code::interrupted && is_pressed);
  is_pressed = false;
  const uint64_t number = receiver.start_recv(0, envelope(1, in.size()), in.data(), nullptr).number;
  assert(receiver.wait(number, kMinute).code == Code::interrupted && is_pressed);
  const std::vector<Outcome> reported = receiver.serve();
  assert(reported.size() == 1 && reported[0].number == number && reported[0].code == Code::ok &&
         in == out);
}

}  // namespace

int main() {
  for (const auto& [each, wires] : {std::pair(kRings, 0), {kWires, 1}, {kWires, 3}, {kBoth, 2}}) {
    ways = each;
    channels = wires;
    test_ping_pong();
    test_both_send_first(4'000'000);
    for (unsigned seed = 0; seed < 3; ++seed) test_random(seed);
    test_watch();
    test_order_of_any_source();
    test_mismatch();
    test_time_outs();
    test_messages_of_programs();
    test_ends();
    test_any_source_of_lost_ranks();
    test_a_rank_is_lost_in_the_middle_of_a_message();
    test_half_a_message_of_a_rank_that_is_gone();
    test_cancelled_and_forgotten();
    test_a_signal_that_comes_with_the_message();
  }
  ways = kRings;
  for (const size_t nbytes : {kLongBytes - 13, kLongBytes, kStreamBytes + 13}) {
    test_both_send_first(nbytes);
  }
  test_unreachable();
  std::puts("ok");
  return 0;
}
