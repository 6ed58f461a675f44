// Detects the child of a fork. The memory shared with other ranks belongs to the parent: the child
// must not write to it. Nor may the child wait for a lock that a thread of the parent holds.
//
// core/base/threads/completion.py has a counter of its own, because it must work without this module, and to ask
// here would cost each work 0.2 us. This counter also counts the forks of C libraries, which Python
// does not see.
#pragma once

#include <atomic>

namespace unisono {

// The number of forks between the first process that loaded this module and this process.
extern std::atomic<int> fork_count;

// Remembers in which process it was constructed.
class ForkGuard {
 public:
  ForkGuard();
  bool is_forked() const { return fork_count.load(std::memory_order_relaxed) != forks_; }

 private:
  int forks_;
};

}  // namespace unisono
