#include "core/fork_guard.hpp"

#include <pthread.h>

namespace unisono {

std::atomic<int> fork_count{0};

ForkGuard::ForkGuard() {
  static const int registered =
    pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  forks_ = fork_count.load(std::memory_order_relaxed);
}

}  // namespace unisono
