// The kernels of IntraNodeComm on a CPU: a thread of C++ for each thread of CUDA.
//
// `launch` is for fake_cuda.py. With -DMAIN this is a program of RANKS ranks for ThreadSanitizer,
// which sees every access of the kernels; -DRELAXED plants flags that order nothing.

#include <sched.h>

#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define ON_A_CPU
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)

#ifdef RELAXED
#define RELEASED __ATOMIC_RELAXED
#define ACQUIRED __ATOMIC_RELAXED
#else
#define RELEASED __ATOMIC_RELEASE
#define ACQUIRED __ATOMIC_ACQUIRE
#endif

struct Dimension {
  unsigned x;
};

// Nothing but the kernels' flags may order the ranks, or ThreadSanitizer would miss races. All
// std::barrier of a process share memory.
struct Block {
  explicit Block(unsigned threads) : threads(threads) {}
  const unsigned threads;
  unsigned arrived = 0, turn = 0;
  bool any = false;
  std::mutex mutex;
  std::condition_variable changed;
};

thread_local Dimension threadIdx, blockIdx, blockDim, gridDim;
thread_local Block* block;

static void __syncthreads() {
  std::unique_lock lock(block->mutex);
  unsigned turn = block->turn;
  if (++block->arrived == block->threads) {
    block->arrived = 0, block->turn++;
    block->changed.notify_all();
  }
  block->changed.wait(lock, [=] { return block->turn != turn; });
}

static bool __syncthreads_or(bool mine) {
  if (mine) {
    std::lock_guard lock(block->mutex);
    block->any = true;  // for good: the kernel ends then
  }
  __syncthreads();
  bool any = block->any;
  __syncthreads();
  return any;
}

static float widened(unsigned half) {
  unsigned short bits = (unsigned short)half;
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return (float)value;
}

static unsigned narrowed(float value) {
  _Float16 half = (_Float16)value;
  unsigned short bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

static void raise_flag(unsigned long long* flag, unsigned long long meeting) {
  __atomic_store_n(flag, meeting, RELEASED);
}

static unsigned long long flag_of(const unsigned long long* flag) {
  sched_yield();
  return __atomic_load_n(flag, ACQUIRED);
}

static unsigned stop_of(const unsigned* stop) { return __atomic_load_n(stop, __ATOMIC_RELAXED); }

#include "intra_node.cu"

extern "C" unsigned call_bytes() { return sizeof(Call); }

extern "C" void launch(void (*kernel)(const Call), const Call* call, unsigned blocks, unsigned threads) {
  std::vector<std::unique_ptr<Block>> made;
  std::vector<std::thread> running;
  for (unsigned b = 0; b < blocks; b++) {
    made.push_back(std::make_unique<Block>(threads));
    for (unsigned t = 0; t < threads; t++)
      running.emplace_back([=, own = made.back().get()] {
        threadIdx = {t}, blockIdx = {b}, blockDim = {threads}, gridDim = {blocks};
        block = own;
        kernel(*call);
      });
  }
  for (auto& each : running) each.join();
}

#ifdef MAIN
// Calls in a row without anything between them but the meetings, of sizes that change the blocks.
// At the end a rank overwrites its memory, as if it were freed.
constexpr Index CALLS = 8, BYTES = PARTIAL + 4096;

static void rank_thread(unsigned rank, std::vector<unsigned char*> memory, int* wrong) {
  unsigned stop = 0;
  std::vector<float> values(200);
  for (unsigned turn = 1; turn <= CALLS; turn++) {
    unsigned count = turn % 3 ? 200 : 37, threads = RANKS < 4 ? 4 : RANKS;
    for (unsigned i = 0; i < count; i++) values[i] = (float)(rank + i % 7 + turn);
    Call call{};
    std::memcpy(call.memory, memory.data(), sizeof call.memory);
    call.input = call.output = (unsigned char*)values.data();
    call.stop = &stop, call.nbytes = 4 * count, call.meeting = 3 * turn, call.rank = rank;
    call.quad = 0xfu << rank / 4 * 4, call.relay = rank ^ 4;
    auto kernel = RANKS == 8 ? cube_mesh_float32 : turn % 2 ? one_shot_float32 : two_shot_float32;
    launch(kernel, &call, count > 100 ? 2 : 1, threads);
    for (unsigned i = 0; i < count; i++)
      *wrong += values[i] != (float)(RANKS * (RANKS - 1) / 2 + RANKS * (i % 7 + turn));
  }
  std::memset(memory[rank], 0xdd, BYTES);
}

int main() {
  std::vector<std::vector<Pack>> room(RANKS, std::vector<Pack>(BYTES / 16));
  std::vector<unsigned char*> memory;
  for (auto& each : room) memory.push_back((unsigned char*)each.data());
  int wrong[RANKS] = {}, all = 0;
  std::vector<std::thread> ranks;
  for (unsigned r = 0; r < RANKS; r++) ranks.emplace_back(rank_thread, r, memory, &wrong[r]);
  for (auto& each : ranks) each.join();
  for (int each : wrong) all += each;
  std::printf("%d wrong\n", all);
  return all != 0;
}
#endif
