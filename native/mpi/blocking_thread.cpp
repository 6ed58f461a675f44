#include "mpi/blocking_thread.hpp"

#include <csignal>

#include <pthread.h>

#include "core/clock.hpp"
#include "core/finally.hpp"
#include "core/futex.hpp"

namespace unisono {

namespace {

constexpr int64_t kForeverNs = 3'600'000'000'000;

}  // namespace

void BlockingThread::begin(const MPICall& call) {
  if (!thread_.joinable()) {
    // Signals must reach Python's main thread: taken here, they would not interrupt its wait.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const Finally unblock([&before] { pthread_sigmask(SIG_SETMASK, &before, nullptr); });
    thread_ = std::thread(&BlockingThread::serve, state_);
  }
  state_->call = call;
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
  // In the child of a fork the thread does not exist.
  is_stuck || fork_guard_.is_forked() ? thread_.detach() : thread_.join();
}

void BlockingThread::serve(const std::shared_ptr<State>& state) {
  // The thread holds a copy of the pointer until this function ends.
  while (true) {
    const uint64_t ended = state->ended.load();
    while (state->begun.load() == ended) futex_wait(state->begun, ended, kForeverNs);
    if (state->is_closed) break;
    state->error = state->call.make();
    change_and_wake(state->ended);
  }
  state->is_over = true;
}

}  // namespace unisono
