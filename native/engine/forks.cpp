#include "forks.hpp"

#include <atomic>

#include <pthread.h>

namespace unisono {

namespace {

// Between this process and the first one that loaded this.
std::atomic<int> forks{0};

}  // namespace

Origin::Origin() {
  static const int registered =
    pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  forks_ = forks.load(std::memory_order_relaxed);
}

bool Origin::is_forked() const { return forks.load(std::memory_order_relaxed) != forks_; }

}  // namespace unisono
