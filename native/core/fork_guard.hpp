// Who is in the child of a fork. What it shares with its parent's peers is the parent's alone: it
// must not write there, nor wait for a lock that a thread of its parent holds.
//
// base/completion.py counts for itself: it has to where this is not built, and to ask here would cost each
// work 0.2 us. Here is counted what Python does not hear of, the forks of C libraries.
#pragma once

#include <atomic>

namespace unisono {

// Between this process and the first one that loaded this.
extern std::atomic<int> fork_count;

// Remembers in which process it was made.
class ForkGuard {
 public:
  ForkGuard();
  bool is_forked() const { return fork_count.load(std::memory_order_relaxed) != forks_; }

 private:
  int forks_;
};

}  // namespace unisono
