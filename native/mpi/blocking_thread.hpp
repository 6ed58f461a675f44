// A thread for calls that block in MPI, or may, so that the wait for such a call has an end.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "core/fork_guard.hpp"

namespace unisono {

class BlockingThread {
 public:
  BlockingThread() = default;
  // If a call does not return, its thread stays.
  ~BlockingThread() { close(); }
  BlockingThread(const BlockingThread&) = delete;
  BlockingThread& operator=(const BlockingThread&) = delete;

  // Begin a call, which returns an error code. The last call must have returned. Throws
  // std::system_error without a thread.
  void begin(std::function<int()> call);
  // Wait until the call has returned. False: the time-out came first.
  bool wait(int64_t timeout_ns) const;
  // Whether a call has not returned.
  bool is_busy() const {
    // acquire: pairs with serve(), so that error() is that of the call
    const uint64_t ended = state_->ended.load(std::memory_order_acquire);
    // close() begins what is no call.
    return ended != state_->begun.load() && !state_->is_over;
  }
  // The error code of the last call, which has returned.
  int error() const { return state_->error; }
  // End the thread after its call. If it is still in the call at the end of the process, no exit
  // handlers of libraries run.
  void close();

 private:
  // The thread shares the state, because it may outlive the owner.
  struct State {
    std::atomic<uint64_t> begun{0};
    std::atomic<uint64_t> ended{0};
    std::atomic<bool> is_closed{false};
    std::atomic<bool> is_over{false};  // the thread makes no call any more
    std::function<int()> call;
    int error = 0;
  };
  static void end_at_once(int status, void* state);
  static void serve(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::thread thread_;
  const ForkGuard fork_guard_;
};

}  // namespace unisono
