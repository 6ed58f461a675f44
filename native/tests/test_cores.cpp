// A rank that waits for a rank on its core moves to another core, and keeps the mask of its cores.
#include "core/cores.hpp"

#include "world.hpp"

#include "shared/group.hpp"

#include <cerrno>

namespace {

cpu_set_t only(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  return set;
}

cpu_set_t allowed() {
  cpu_set_t set;
  assert(sched_getaffinity(0, sizeof(set), &set) == 0);
  return set;
}

// Run `body` in a thread that runs on `core` and may use all `cores`.
void on_core(int core, const cpu_set_t& cores, const std::function<void()>& body) {
  std::thread([&] {
    const cpu_set_t first = only(core);
    assert(sched_setaffinity(0, sizeof(first), &first) == 0);
    assert(sched_setaffinity(0, sizeof(cores), &cores) == 0);
    body();
    const cpu_set_t after = allowed();
    assert(CPU_EQUAL(&after, &cores));
  }).join();
}

void test_leave_core(int core, const cpu_set_t& cores) {
  std::atomic<uint32_t> recorded{0};
  on_core(core, cores, [&] {
    assert(!leave_core(cores, recorded) && recorded == 0);  // there is no other core
  });
  on_core(core, cores, [&] {
    assert(leave_core(only(core), recorded));
    const auto now = static_cast<int>(recorded.load()) - 1;
    assert(now >= 0 && now != core && CPU_ISSET(now, &cores));
  });
  // A thread that is bound to its core stays there.
  recorded = 7;
  on_core(core, only(core), [&] { assert(!leave_core(only(core), recorded) && recorded == 7); });
}

void test_threads_may_not_move(int core, const cpu_set_t& cores) {
  std::atomic<uint32_t> recorded{7};
  let_threads_move(false);
  on_core(core, cores, [&] { assert(!leave_core(only(core), recorded) && recorded == 7); });
  let_threads_move(true);
}

// Rank 1 has recorded the core on which rank 0 waits. It arrives when rank 0 has left that core.
void test_a_collective(int core, const cpu_set_t& cores) {
  const unsigned char nonce[16] = {1};
  auto segment = std::make_shared<Segment>();
  assert(segment->create(2, 4096, nonce) == 0);
  const std::vector<int> pids(2, getpid());
  Group here(segment, 0, pids, false), there(segment, 1, pids, false);
  const auto words = [&](int rank) -> std::atomic<uint32_t>& { return segment->words(rank).core; };
  words(0) = words(1) = static_cast<uint32_t>(core + 1);
  std::thread peer([&] {
    while (words(0) == 0 || words(0) == static_cast<uint32_t>(core + 1)) std::this_thread::yield();
    uint64_t even = 1;
    assert(there.agree(5, &even, kMinute).is_ok());
  });
  on_core(core, cores, [&] {
    uint64_t even = 1;
    assert(here.agree(5, &even, kMinute).is_ok());
  });
  peer.join();
}

}  // namespace

int main() {
  const cpu_set_t cores = allowed();
  if (CPU_COUNT(&cores) < 2) return std::puts("not run: there is one core") < 0;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &cores)) continue;
    test_leave_core(core, cores);
    test_threads_may_not_move(core, cores);
    test_a_collective(core, cores);
  }
  std::puts("ok");
}
