// Signals and exceptions of Python during waits in C++.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>

#include "bindings/interpreter_lock.hpp"
#include "core/program.hpp"

namespace unisono {

int64_t nanoseconds(double seconds);

// Whether a signal handler has raised an exception, for example because of Ctrl-C. The exception
// ends the wait.
bool signal_raised();

// Marks its thread as a server, during its lifetime: signals end waits of other threads only.
class Serving {
 public:
  Serving();
  ~Serving();
  Serving(const Serving&) = delete;
  Serving& operator=(const Serving&) = delete;
};

// Above this many bytes a call releases the interpreter lock at once, because other threads would
// wait too long for it. Below, a call releases the lock only if it waits.
constexpr int64_t kHoldBytes = 16 * 1024;

// Releases the interpreter lock when a run waits; the destructor acquires the lock again.
class Unlocker final : public Idler {
 public:
  explicit Unlocker(Recorder* recorder, bool postpones = false)
      : Idler(postpones), recorder_(recorder) {}
  void idle() override {
    if (unlock_) return;
    // The site of the call is found with the lock. The record is written when the run waits.
    if (recorder_ != nullptr) recorder_->find_site();
    unlock_.emplace();
  }

 private:
  Recorder* recorder_;
  std::optional<InterpreterUnlock> unlock_;
};

// Whether the calling thread is one of unisono's own, which may serve what it would wait for.
extern thread_local bool is_worker;

// Report an exception of a callback and continue. An exception that ends programs, such as
// KeyboardInterrupt, ends the wait that made the call, because signal_raised() returns true.
// Otherwise it is raised soon after the wait.
void callback_raised(nanobind::python_error& error, const char* where);

}  // namespace unisono
