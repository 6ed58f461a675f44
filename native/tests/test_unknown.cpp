// Receives of any tag and of any size, and probes: order, sizes, threads, and ends.
#include "tests/world.hpp"

namespace {

constexpr Envelope kAny{7, kAnyTag, 0, 0};

Ranks all() { return std::make_shared<const std::vector<int>>(std::vector<int>{0, 1, 2}); }

Outcome finished(Messages& messages, Outcome started) {
  return started.number == 0 ? std::move(started) : messages.wait(started.number, kMinute);
}

Outcome receive(Messages& messages, int from, const Envelope& envelope) {
  return finished(messages, messages.start_recv(from, envelope, nullptr, all(), Take::anything));
}

Outcome look(Messages& messages, int from, const Envelope& envelope) {
  return finished(messages, messages.start_recv(from, envelope, nullptr, all(), Take::nothing));
}

bool is_there(Messages& messages, const Envelope& envelope) {
  const Outcome outcome = messages.start_recv(-1, envelope, nullptr, all(), Take::nothing);
  return outcome.number == 0 || messages.cancel(outcome.number).code == Code::ok;
}

void send(Messages& messages, int64_t tag, const std::vector<char>& out) {
  assert(messages.send(1, envelope(tag, out.size()), out.data(), kMinute).code == Code::ok);
}

void check(const Outcome& got, int64_t tag, const std::vector<char>& out) {
  assert(got.code == Code::ok && got.source == 0 && got.tag == tag && got.info == 5);
  assert(got.nbytes == out.size() && got.memory != nullptr);
  assert(std::equal(out.begin(), out.end(), got.memory.get()));
}

// Run a body per rank. Without server threads, every outcome comes to the thread that waits for it.
void run(World& world, const std::function<void(Messages&, int)>& body) {
  std::vector<std::thread> bodies;
  for (int rank = 0; rank < 3; ++rank) {
    bodies.emplace_back([&, rank] { body(world[rank], rank); });
  }
  for (auto& each : bodies) each.join();
}

// With `first`, the receive or probe is posted before the message comes.
void test_sizes(bool first) {
  World world(3);
  run(world, [&](Messages& messages, int rank) {
    if (rank == 2) return;
    char go = 0;
    for (const size_t nbytes : {0, 1, 4096, 131073, 524289, 3'000'000}) {
      for (const int64_t tag : {3, 4}) {
        const std::vector<char> out = pattern(nbytes, static_cast<unsigned>(tag));
        if (rank == 0) {
          assert(!first || messages.recv(1, envelope(1, 1), &go, nullptr, kMinute).nbytes == 1);
          send(messages, tag, out);
          send(messages, 2, {});
          continue;
        }
        Outcome probe, got;
        const auto begin = [&] {
          const auto take = tag == 3 ? Take::anything : Take::nothing;
          got = messages.start_recv(0, kAny, nullptr, nullptr, take);
        };
        if (first) {
          begin();
          assert(messages.send(0, envelope(1, 1), &go, kMinute).code == Code::ok);
        } else {
          assert(look(messages, 0, envelope(tag, 0)).nbytes == nbytes);
          begin();
        }
        got = finished(messages, std::move(got));
        if (tag == 4) {
          assert(got.code == Code::ok && got.nbytes == nbytes && got.memory == nullptr);
          got = receive(messages, -1, envelope(tag, 0));
        }
        check(got, tag, out);
        assert(receive(messages, 0, kAny).tag == 2);
        assert(!first || !is_there(messages, kAny));
      }
    }
  });
}

void test_order_of_any_tag() {
  World world(3);
  Messages& here = world[1];
  const std::vector<char> out(8);
  // Neither the tags of the library nor those of programs.
  send(world[0], kFirstInnerTag, out);
  send(world[0], -5, out);
  send(world[0], 9, out);
  assert(look(here, -1, kAny).tag == 9 && look(here, 0, kAny).tag == 9);
  assert(receive(here, -1, kAny).tag == 9 && !is_there(here, kAny));
  assert(receive(here, 0, envelope(-5, 0)).nbytes == 8);
  assert(receive(here, 0, envelope(kFirstInnerTag, 0)).nbytes == 8);
  // The receive that was posted first takes the message; a probe only one that no receive takes.
  char in[8];
  const uint64_t probe = here.start_recv(0, kAny, nullptr, nullptr, Take::nothing).number;
  const uint64_t any = here.start_recv(0, kAny, nullptr, nullptr, Take::anything).number;
  const uint64_t one = here.start_recv(0, envelope(1, 8), in, nullptr).number;
  for (int i = 0; i < 3; ++i) send(world[0], 1, out);
  assert(here.wait(one, kMinute).code == Code::ok && here.wait(any, kMinute).tag == 1);
  assert(here.wait(probe, kMinute).tag == 1 && is_there(here, envelope(1, 0)));
  assert(receive(here, 0, kAny).code == Code::ok && !is_there(here, kAny));
  // Only a receive counts as a receive.
  assert(here.start_recv(1, envelope(4, 0), nullptr, nullptr, Take::nothing).number != 0);
  assert(!here.has_receive(1, 7, 4));
  assert(here.start_recv(1, kAny, nullptr, nullptr, Take::anything).number != 0);
  assert(here.has_receive(1, 7, 4) && !here.has_receive(1, 7, kFirstInnerTag));
}

// Threads of one rank receive and probe at once. Every message comes to one thread, and whole.
void test_threads() {
  World world(3);
  const size_t sizes[] = {0, 8, 5000, 200'000, 2'097'153};
  constexpr int kMessages = 60;
  std::atomic<int> received{0};
  std::atomic<bool> is_over{false};
  run(world, [&](Messages& messages, int rank) {
    if (rank != 1) {
      for (unsigned i = 0; i < kMessages; ++i) send(messages, i, pattern(sizes[i % 5], i));
      return;
    }
    const auto take = [&] {
      while (received.fetch_add(1) < 2 * kMessages) {
        const Outcome got = receive(messages, -1, kAny);
        const auto out = pattern(sizes[got.tag % 5], static_cast<unsigned>(got.tag));
        assert(got.code == Code::ok && got.nbytes == out.size());
        assert(std::equal(out.begin(), out.end(), got.memory.get()));
      }
    };
    std::thread probe([&] {
      while (!is_over) {
        const Outcome seen = messages.start_recv(-1, kAny, nullptr, all(), Take::nothing);
        if (seen.number != 0) messages.cancel(seen.number);
      }
    });
    std::thread other(take);
    take();
    other.join();
    is_over = true;
    probe.join();
    assert(!is_there(messages, kAny));
  });
}

// A receive that is cancelled in the middle of a message leaves the message to the next receive.
void test_cancelled_halfway() {
  constexpr size_t kSize = 8'000'000;
  World world(3);
  run(world, [&](Messages& messages, int rank) {
    if (rank == 2) return;
    for (unsigned i = 0; i < 4; ++i) {
      const std::vector<char> out = pattern(kSize, i);
      if (rank == 0) {
        send(messages, 3, out);
        continue;
      }
      std::vector<char> in(kSize);
      const auto take = i % 2 == 0 ? Take::anything : Take::fitting;
      Outcome got{0, Code::timeout};
      for (int64_t limit = 1; got.code == Code::timeout || got.code == Code::cancelled;) {
        got = messages.start_recv(0, envelope(3, kSize), in.data(), nullptr, take);
        if (got.number == 0) break;
        const uint64_t number = got.number;
        assert(messages.number_of(in.data()) == number);
        got = messages.wait(number, limit);
        if (got.code != Code::timeout) break;
        assert(messages.number_of(in.data()) == number);
        got = messages.cancel(number);
        std::fill(in.begin(), in.end(), 0);
        limit *= 2;
      }
      if (take == Take::fitting) {
        got.memory.reset(new char[kSize]);
        std::copy(in.begin(), in.end(), got.memory.get());
      }
      check(got, 3, out);
    }
  });
}

void test_ends() {
  World world(3);
  Messages& here = world[1];
  const auto start = [&](int from, Take take) {
    const Outcome begun = here.start_recv(from, kAny, nullptr, all(), take);
    assert(begun.number != 0);
    return begun.number;
  };
  for (const Take take : {Take::anything, Take::nothing}) {
    const uint64_t number = start(0, take);
    assert(here.wait(number, 0).code == Code::timeout);
    assert(here.cancel(number).code == Code::cancelled);
  }
  // A context that is broken after some run of a program.
  const uint64_t waits = start(-1, Take::nothing), takes = start(0, Take::anything);
  here.fail_context(7, 5);
  assert(here.wait(waits, kMinute).code == Code::aborted);
  assert(here.wait(takes, kMinute).code == Code::aborted);
  assert(look(here, -1, kAny).code == Code::aborted);
  here.forget_context(7);
  // A rank is gone; what it has sent is still found.
  const std::vector<char> out = pattern(100, 3);
  send(world[0], 6, out);
  if (ways == kRings) {
    const uint64_t probe = start(2, Take::nothing);
    here.peer_down(0, Code::lost);
    here.peer_down(2, Code::left);
    const Outcome gone = here.wait(probe, kMinute);
    assert(gone.code == Code::left && gone.source == 2);
    assert(look(here, 0, kAny).tag == 6 && look(here, -1, envelope(6, 0)).source == 0);
    check(receive(here, -1, kAny), 6, out);
    const Outcome lost = look(here, -1, kAny);
    assert(lost.code == Code::lost && lost.source == 0);
  }
  const uint64_t last = here.start_recv(1, kAny, nullptr, nullptr, Take::nothing).number;
  World::end(here, 0);
  assert(here.wait(last, kMinute).code == Code::closed);
}

}  // namespace

int main() {
  for (const auto& [each, wires] : {std::pair(kRings, 0), {kWires, 1}, {kWires, 3}, {kBoth, 2}}) {
    ways = each;
    channels = wires;
    test_sizes(true);
    test_sizes(false);
    test_order_of_any_tag();
    test_threads();
    test_cancelled_halfway();
    test_ends();
  }
  std::puts("ok");
  return 0;
}
