// Threads that share the loops of a rank's large calls.
//
// A loop is cut into parts, and each thread takes the next part that nobody has. The caller takes
// parts, too, until none is left, and then waits only for parts that are being done. So a thread
// that sleeps, or has no core, delays nothing. Each element is computed as by one thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "core/fork_guard.hpp"

namespace unisono {

class ThreadTeam {
 public:
  // Calls of more bytes are shared. In smaller calls threads wake too late.
  static constexpr int64_t kCallBytes = 1024 * 1024;
  static constexpr int kMostThreads = 1024;

  // `threads`: with the caller's, at most kMostThreads. They begin with the first loop, on the
  // cores that its thread may use.
  explicit ThreadTeam(int threads);
  ~ThreadTeam() { close(); }
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  // Call `part(first, end)` for ranges that make up [0, count), maybe in several threads at once.
  // An element has `itemsize` bytes. While another thread's loop is shared, the caller works alone.
  template <class Part>
  void share(size_t count, size_t itemsize, const Part& part) {
    run({[](const void* context, size_t first, size_t end) {
           (*static_cast<const Part*>(context))(first, end);
         },
         &part, count},
        itemsize);
  }

  // End the threads; later calls work alone.
  void close();
  int threads() const { return threads_; }

 private:
  struct Loop {
    void (*part)(const void* context, size_t first, size_t end) = nullptr;
    const void* context = nullptr;
    size_t count = 0;
    size_t size = 0;  // elements of a part
  };

  void run(Loop loop, size_t itemsize);
  bool begin();
  void give_back();
  void start_threads();
  bool do_part();
  void finish_part();
  void wait_for_parts(uint64_t parts);
  void change(uint64_t value);
  bool sleep();
  void serve();

  // The number of the loop above kPartBits, and how many of its parts nobody has taken.
  static constexpr int kPartBits = 16;
  static constexpr uint64_t kPartMask = (uint64_t{1} << kPartBits) - 1;
  // In a half of its own, too, because a futex compares only the low half.
  static constexpr uint64_t kClosed = ~uint64_t{0};
  enum : int { kFree, kTaken, kEnded };

  const ForkGuard fork_guard_;
  const int threads_;
  bool has_started_ = false;
  std::vector<std::thread> helpers_;
  // Own lines: all threads poll the first, and each writes the second once per part.
  alignas(64) std::atomic<uint64_t> open_{0};
  alignas(64) std::atomic<uint64_t> done_{0};  // parts of the current loop that helpers have done
  alignas(64) std::atomic<uint64_t> sleepers_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<int> use_{kFree};
  Loop loop_;  // written before `open_`
};

// As ThreadTeam::share(), or alone without a team.
template <class Part>
void share(ThreadTeam* team, size_t count, size_t itemsize, const Part& part) {
  if (team == nullptr) return part(size_t{0}, count);
  team->share(count, itemsize, part);
}

}  // namespace unisono
