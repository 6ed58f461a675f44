// Posts of all sizes about the thresholds of lines, slots and copies, in slots that move on.
#include "kernels/copy_out.hpp"
#include "shared/group.hpp"

#include <cassert>
#include <cstdio>
#include <cstring>
#include <functional>
#include <set>
#include <thread>
#include <vector>

#include <unistd.h>

using namespace unisono;

namespace {

constexpr int64_t kMinute = 60'000'000'000;
constexpr int64_t kSlot = 96 * 1024;

char byte_of(int rank, int64_t call, int64_t at) {
  return static_cast<char>((rank * 89 + call * 31 + at * 7 + at / 4096) % 251);
}

void on_ranks(const std::shared_ptr<Segment>& segment,
              const std::function<void(Group&, int)>& body) {
  std::vector<std::thread> threads;
  const std::vector<int> pids(static_cast<size_t>(segment->ranks()), getpid());
  std::vector<std::unique_ptr<Group>> groups;
  for (int rank = 0; rank < segment->ranks(); ++rank) {
    groups.push_back(std::make_unique<Group>(segment, rank, pids, true));
  }
  for (int rank = 0; rank < segment->ranks(); ++rank) {
    threads.emplace_back([&, rank] { body(*groups[static_cast<size_t>(rank)], rank); });
  }
  for (std::thread& thread : threads) thread.join();
}

std::shared_ptr<Segment> make_segment(int ranks) {
  auto segment = std::make_shared<Segment>();
  const unsigned char nonce[kNonceBytes] = {4};
  assert(segment->create(ranks, kSlot, nonce) == 0);
  return segment;
}

// Each rank posts `nbytes` of its own and reads those of all others, in one piece.
void exchange(Group& group, int ranks, int rank, int64_t call, int64_t nbytes) {
  std::vector<Step> steps{{kPost, -1, kInput, 0, -1, -1, nbytes, rank, 0, 1}};
  for (int i = 1; i < ranks; ++i) {
    const int from = (rank + i) % ranks;
    steps.push_back({kRead, from, -1, -1, kOutput, from * nbytes, nbytes, from, 0, 1});
  }
  const Loop once{0, ranks, 1, 0, 0};
  std::vector<char> input(static_cast<size_t>(nbytes)), output(static_cast<size_t>(ranks * nbytes));
  for (int64_t at = 0; at < nbytes; ++at) {
    input[static_cast<size_t>(at)] = byte_of(rank, call, at);
  }
  const Program program{steps.data(), steps.size(), &once, 1};
  const Buffers buffers{input.data(), nbytes, output.data(), ranks * nbytes, false, nullptr, 0, 1};
  assert(group.run(program, buffers, nullptr, {7, 1}, kMinute).is_ok());
  // The group may read no more from the array.
  std::memset(input.data(), 0, input.size());
  for (int64_t at = 0; at < ranks * nbytes; ++at) {
    const int from = static_cast<int>(at / nbytes);
    if (from == rank) continue;
    assert(output[static_cast<size_t>(at)] == byte_of(from, call, at % nbytes));
  }
}

void test_sizes_about_thresholds(int ranks) {
  std::vector<int64_t> sizes;
  for (const int64_t middle : {int64_t{64}, kLinePostBytes, kStayBytes / 2, kStayBytes,
                               2 * kStayBytes, int64_t{40'000}, kSlot - 1}) {
    for (int64_t nbytes = middle - 1; nbytes <= middle + 1; ++nbytes) sizes.push_back(nbytes);
  }
  on_ranks(make_segment(ranks), [&](Group& group, int rank) {
    for (int64_t call = 0; call < 105; ++call) {
      exchange(group, ranks, rank, call, sizes[static_cast<size_t>(call * 5) % sizes.size()]);
    }
  });
}

// A slot moves on after a large call and stays where it is after a small one.
void test_slots_move_after_large_calls() {
  for (const int64_t nbytes : {int64_t{4000}, int64_t{20'000}}) {
    const auto segment = make_segment(2);
    on_ranks(segment, [&](Group& group, int rank) {
      std::set<uint32_t> places;
      for (int64_t call = 0; call < 90; ++call) {
        const uint64_t epoch = static_cast<uint64_t>(call) + 1;
        exchange(group, 2, rank, call, nbytes);
        const uint32_t at = segment->words(rank).line(epoch).agreement.slot_at;
        assert(at % kLineBytes == 0 && at <= segment->turn_bytes());
        places.insert(at);
      }
      const auto laps = static_cast<int64_t>(segment->turn_bytes()) / (nbytes / kLineBytes + 1);
      const size_t expected =
        2 * nbytes > kStayBytes ? static_cast<size_t>(laps / kLineBytes) + 1 : 1;
      assert(places.size() == expected);
    });
  }
}

// Slow copies bypass the cache until a later copy is fast. A few slow ones prove nothing.
void test_distance() {
  CopyOut copy;
  const auto note = [&](int times, int64_t ns) {
    for (int i = 0; i < times; ++i) copy.note(16384, ns);
  };
  note(3, 8000);
  note(1, 500);
  note(3, 8000);
  assert(!copy.is_far());
  note(1, 8000);
  assert(copy.is_far());
  note(1, 8000);
  assert(copy.is_far());
  note(1, 500);
  assert(!copy.is_far());
}

void test_copies(bool is_far) {
  CopyOut copy;
  for (size_t nbytes : {0u, 1u, 63u, 8191u, 8192u, 8193u, 70'001u}) {
    for (size_t shift : {0u, 1u, 17u}) {
      for (int i = 0; is_far && i < 8; ++i) copy.note(16384, 8000);
      std::vector<char> from(nbytes + 64), to(nbytes + 64, 'x');
      for (size_t i = 0; i < from.size(); ++i) from[i] = byte_of(1, 2, static_cast<int64_t>(i));
      copy.copy(to.data() + shift, from.data() + 3, nbytes);
      assert(std::memcmp(to.data() + shift, from.data() + 3, nbytes) == 0);
      for (size_t i = 0; i < to.size(); ++i) {
        if (i < shift || i >= shift + nbytes) assert(to[i] == 'x');
      }
    }
  }
}

}  // namespace

int main() {
  for (int ranks : {2, 3}) test_sizes_about_thresholds(ranks);
  test_slots_move_after_large_calls();
  test_distance();
  test_copies(false);
  test_copies(true);
  std::puts("ok");
}
