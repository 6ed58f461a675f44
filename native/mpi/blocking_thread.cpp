#include "mpi/blocking_thread.hpp"

#include <csignal>
#include <cstdio>
#include <cstdlib>

#include <pthread.h>
#include <unistd.h>

#include "core/clock.hpp"
#include "core/finally.hpp"
#include "core/futex.hpp"

namespace unisono {

namespace {

constexpr int64_t kForeverNs = 3'600'000'000'000;

}  // namespace

void BlockingThread::begin(std::function<int()> call) {
  if (!thread_.joinable()) {
    // Signals must reach Python's main thread: taken here, they would not interrupt its wait.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const Finally unblock([&before] { pthread_sigmask(SIG_SETMASK, &before, nullptr); });
    thread_ = std::thread(&BlockingThread::serve, state_);
  }
  state_->call = std::move(call);
  change_and_wake(state_->begun);
}

bool BlockingThread::wait(int64_t timeout_ns) const {
  const int64_t end_ns = now_ns() + timeout_ns;
  while (is_busy()) {
    const uint64_t seen = state_->ended.load();
    const int64_t left_ns = end_ns - now_ns();
    if (left_ns <= 0) return false;
    if (is_busy()) futex_wait(state_->ended, seen, left_ns);
  }
  return true;
}

void BlockingThread::close() {
  if (!thread_.joinable()) return;
  const bool is_stuck = is_busy();
  state_->is_closed = true;
  change_and_wake(state_->begun);
#ifdef __GLIBC__
  if (is_stuck) on_exit(&end_at_once, new std::shared_ptr<State>(state_));
#endif
  // In the child of a fork the thread does not exist.
  is_stuck || fork_guard_.is_forked() ? thread_.detach() : thread_.join();
}

// The exit handlers of a library crash while a thread is in the library.
void BlockingThread::end_at_once(int status, void* state) {
  if ((*static_cast<std::shared_ptr<State>*>(state))->is_over) return;
  std::fflush(nullptr);
  _exit(status);
}

void BlockingThread::serve(const std::shared_ptr<State>& state) {
  // The thread holds a copy of the pointer until this function ends.
  while (true) {
    const uint64_t ended = state->ended.load();
    while (state->begun.load() == ended) futex_wait(state->begun, ended, kForeverNs);
    if (state->is_closed) break;
    state->error = state->call();
    change_and_wake(state->ended);
  }
  state->is_over = true;
}

}  // namespace unisono
