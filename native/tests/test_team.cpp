// Threads that share loops: each element once, whoever does it, and every way to begin and to end.
#include "core/team.hpp"

#include "core/strided.hpp"
#include "shared/group.hpp"

#include <cassert>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <dirent.h>
#include <sys/wait.h>
#include <unistd.h>

using namespace unisono;

namespace {

constexpr int64_t kMinute = 60'000'000'000;

// The values after `key` in the status of each helper of this process.
std::vector<std::string> helpers(const std::string& key = "State") {
  std::vector<std::string> found;
  DIR* tasks = opendir("/proc/self/task");
  assert(tasks != nullptr);
  while (const dirent* task = readdir(tasks)) {
    std::ifstream status(std::string("/proc/self/task/") + task->d_name + "/status");
    std::string line, value;
    bool is_helper = false;
    while (std::getline(status, line)) {
      is_helper |= line == "Name:\tunisono-team";
      if (line.rfind(key + ":\t", 0) == 0) value = line.substr(key.size() + 2);
    }
    if (is_helper) found.push_back(value);
  }
  closedir(tasks);
  return found;
}

// Until so many helpers have begun, and wait for a loop.
void wait_until_asleep(size_t count) {
  while (true) {
    const auto states = helpers();
    size_t asleep = 0;
    for (const std::string& state : states) asleep += state[0] == 'S';
    if (asleep == count) return;
    std::this_thread::yield();
  }
}

void wait_until_gone() {
  while (!helpers().empty()) std::this_thread::yield();  // a joined thread leaves /proc later
}

// Add 1 to each element. Parts share no cache line if the array begins with one.
void test_elements(ThreadTeam& team, size_t itemsize, size_t count, size_t offset) {
  std::vector<char> memory((count + 1) * itemsize + 128, 0);
  const size_t past = reinterpret_cast<uintptr_t>(memory.data()) % 64;
  char* const first = memory.data() + (64 - past) % 64 + offset;
  std::atomic<size_t> done{0};
  team.share(count, itemsize, [&](size_t begin, size_t end) {
    assert(begin <= end && end <= count);
    for (char* at = first + begin * itemsize; at < first + end * itemsize; ++at) ++*at;
    const auto address = reinterpret_cast<uintptr_t>(first + begin * itemsize);
    assert(offset != 0 || itemsize > 16 || address % 64 == 0);
    done += end - begin;
  });
  assert(done == count);
  for (size_t i = 0; i < count * itemsize; ++i) assert(first[i] == 1);
  assert(first[count * itemsize] == 0);
}

void test_every_size() {
  ThreadTeam team(3);
  assert(helpers().empty());  // until the first loop
  for (const size_t itemsize : {1, 2, 3, 4, 8, 16, 64, 80, 5000}) {
    for (const size_t nbytes : {0, 1, 65535, 65536, 131072 + 70, 262144, 1'000'001}) {
      for (const size_t offset : {0, 1, 8, 63}) {
        test_elements(team, itemsize, nbytes / itemsize, offset);
      }
    }
  }
  wait_until_asleep(2);
  for (const std::string& blocked : helpers("SigBlk")) assert(blocked[0] == 'f');
  // Loops that come late wake the threads.
  for (int i = 0; i < 50; ++i) {
    wait_until_asleep(2);
    test_elements(team, 4, 100'000, 4);
  }
  team.close();
  team.close();
  wait_until_gone();
  test_elements(team, 4, 100'000, 4);  // alone
}

// Several callers, of which each works alone while another has the team, until it ends.
void test_callers() {
  ThreadTeam team(3);
  std::vector<std::thread> callers;
  std::atomic<int> rounds{0};
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round, ++rounds) test_elements(team, 8, 20'000, 8);
    });
  }
  while (rounds < 300) std::this_thread::yield();
  team.close();
  for (std::thread& caller : callers) caller.join();
  wait_until_gone();
}

void test_one_thread() {
  ThreadTeam team(1);
  test_elements(team, 4, 1'000'000, 0);
  assert(helpers().empty());
  share(nullptr, 1'000'000, 1,
        [](size_t begin, size_t end) { assert(begin == 0 && end == 1'000'000); });
}

void test_fork() {
  auto team = std::make_unique<ThreadTeam>(2);
  test_elements(*team, 4, 100'000, 0);
  const pid_t child = fork();
  if (child == 0) {
    test_elements(*team, 4, 100'000, 0);  // alone
    assert(helpers().empty());
    team.reset();
#ifndef __SANITIZE_THREAD__  // it allows no threads here
    ThreadTeam own(2);
    test_elements(own, 4, 100'000, 0);
    wait_until_asleep(1);
    own.close();
#endif
    _exit(0);
  }
  int status = 0;
  assert(waitpid(child, &status, 0) == child && status == 0);
  test_elements(*team, 4, 100'000, 0);
  wait_until_asleep(1);
  team.reset();
  wait_until_gone();
}

void test_strided() {
  constexpr size_t kRows = 700, kColumns = 501;
  std::vector<int32_t> values(kRows * kColumns), packed(values.size()), back(values.size());
  std::iota(values.begin(), values.end(), 0);
  ThreadTeam team(3);
  const auto layout = [](std::vector<int32_t>& of) {
    Strided transposed(reinterpret_cast<char*>(of.data()), 4);
    assert(transposed.add(kColumns, 4) && transposed.add(kRows, 4 * kColumns));
    return transposed;
  };
  layout(values).pack(reinterpret_cast<char*>(packed.data()), &team);
  for (size_t i = 0; i < kColumns; ++i) {
    for (size_t j = 0; j < kRows; ++j) assert(packed[i * kRows + j] == values[j * kColumns + i]);
  }
  layout(back).unpack(reinterpret_cast<char*>(packed.data()), &team);
  assert(back == values);
}

// Two ranks, each with a team, that add vectors in pieces of a slot.
void test_group() {
  constexpr int64_t kPiece = 32 * 1024, kPieces = 20;
  const unsigned char nonce[16] = {1};
  auto segment = std::make_shared<Segment>();
  assert(segment->create(2, kPiece * 8, nonce) == 0);
  std::vector<std::unique_ptr<Group>> groups;
  for (int rank = 0; rank < 2; ++rank) {
    groups.push_back(
      std::make_unique<Group>(segment, rank, std::vector<int>{getpid(), getpid()}, true));
    groups.back()->set_team(std::make_shared<ThreadTeam>(3));
    assert(groups.back()->team_for(ThreadTeam::kCallBytes) == nullptr);
    assert(groups.back()->team_for(ThreadTeam::kCallBytes + 1) != nullptr);
  }
  const auto body = [&](int rank) {
    const int peer = 1 - rank;
    const std::vector<Step> steps{
      {kPost, -1, kOutput, 0, -1, -1, kPiece, rank, 0, 1},
      {kReadReduce, peer, -1, -1, kOutput, 0, kPiece, peer, 0, 1},
    };
    const std::vector<Loop> loops{{0, 2, kPieces, kPiece, kPiece}};
    std::vector<int64_t> output(kPiece * kPieces);
    for (int64_t call = 0; call < 20; ++call) {
      std::iota(output.begin(), output.end(), call + rank);
      auto* data = reinterpret_cast<char*>(output.data());
      const auto count = static_cast<int64_t>(output.size());
      const Buffers buffers{data, count, data, count, false, nullptr, 0, 8};
      const Program program{steps.data(), steps.size(), loops.data(), loops.size()};
      assert(groups[static_cast<size_t>(rank)]
               ->run(program, buffers, reduce_fn(DType::i64, RedOp::sum), {7, 1}, kMinute)
               .is_ok());
      for (int64_t i = 0; i < count; ++i) {
        assert(output[static_cast<size_t>(i)] == 2 * (i + call) + 1);
      }
    }
  };
  std::thread other(body, 1);
  body(0);
  other.join();
  wait_until_asleep(4);
  groups.clear();
  wait_until_gone();
}

}  // namespace

int main() {
  test_every_size();
  test_callers();
  test_one_thread();
  test_fork();
  test_strided();
  test_group();
  std::puts("ok");
}
