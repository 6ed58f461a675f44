// Counters that pass 2^32, at which the kernel's half of a word wraps around. A group gets there
// after a million calls, a ring after 4 GiB, a bell after 4 * 10^9 rings.
#include "shared/group.hpp"
#include "tests/world.hpp"

#include <cstdlib>

namespace {

constexpr uint64_t kWrap = uint64_t{1} << 32;

void test_ring() {
  void* const memory = std::aligned_alloc(kPageBytes, kRingStride);
  std::memset(memory, 0, kRingStride);
  Ring out(static_cast<char*>(memory)), in(static_cast<char*>(memory));
  const size_t before = kWrap - 3 * kRingBytes;
  out.skip(before);
  in.skip(before);
  out.publish();
  in.release();
  for (unsigned round = 0; round < 100; ++round) {
    const std::vector<char> frame = pattern(kRingBytes / 7 + 64 * round, round);
    std::vector<char> got(frame.size());
    assert(out.room() >= frame.size());
    out.write(frame.data(), frame.size());
    // Every third frame is aborted after these bytes.
    if (round % 3 == 0) {
      out.abort_frame();
      assert(out.room() == 0);
    }
    out.pad();
    out.publish();
    assert(in.available() >= frame.size() && in.before_abort(frame.size()) == frame.size());
    in.read(got.data(), got.size());
    assert(got == frame && (in.before_abort(1) == 0) == (round % 3 == 0));
    if (round % 3 == 0) in.skip(1);
    in.pad();
    assert(in.available() == 0);
    in.release();
  }
  assert(out.room() == kRingBytes);
  std::free(memory);
}

// Both ranks sleep in most of these calls, because the ranks are late by turns.
void test_group() {
  auto segment = std::make_shared<Segment>();
  const unsigned char nonce[kNonceBytes] = {1};
  assert(segment->create(2, 4096, nonce) == 0);
  const uint64_t before = kWrap / kStages - 20;
  for (int rank : {0, 1}) segment->words(rank).line(before).flag.store(before * kStages);
  std::vector<std::unique_ptr<Group>> groups;
  for (int rank : {0, 1}) {
    groups.push_back(std::make_unique<Group>(segment, rank, std::vector<int>(2, getpid()), true));
  }
  std::vector<std::thread> threads;
  for (int rank : {0, 1}) {
    threads.emplace_back([&, rank] {
      for (uint64_t call = 1; call <= 40; ++call) {
        uint64_t even = 5;
        if (call % 2 == static_cast<uint64_t>(rank)) {
          while (segment->words(rank).sleepers.load() == 0) std::this_thread::yield();
        }
        assert(groups[static_cast<size_t>(rank)]->agree(call, &even, kMinute).is_ok() && even == 5);
      }
    });
  }
  for (auto& each : threads) each.join();
  assert(segment->words(0).line(before).flag.load() == (before + 40) * kStages);
}

// The bells of both ranks pass the end of their halves while the ranks sleep.
void test_bells() {
  World world(2);
  for (int rank : {0, 1}) {
    const Address& address = world.addresses[static_cast<size_t>(rank)];
    Outbox outbox;
    assert(outbox.attach(address.pid, address.fd, address.nonce, rank, kRingBytes) == 0);
    for (auto* word : {&outbox.head().bells.waiters, &outbox.head().bells.server}) {
      word->store(kWrap - 5);
    }
  }
  world.run([](Messages& messages, int rank) {
    for (unsigned round = 0; round < 20; ++round) {
      const std::vector<char> out = pattern(1'000'000, round);
      std::vector<char> in(out.size());
      const uint64_t number =
        messages.start_send(1 - rank, envelope(1, out.size()), out.data()).number;
      const Outcome got =
        messages.recv(1 - rank, envelope(1, in.size()), in.data(), nullptr, kMinute);
      assert(got.code == Code::ok && in == out);
      const Code sent = number == 0 ? Code::ok : messages.wait(number, kMinute).code;
      assert(sent == Code::ok || sent == Code::unknown);
    }
  });
}

}  // namespace

int main() {
  test_ring();
  test_group();
  test_bells();
  std::puts("ok");
}
