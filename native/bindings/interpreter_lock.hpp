// The interpreter lock, for threads that may still run when the interpreter ends.
//
// Before 3.14, Python ends a thread that asks for the lock when the interpreter ends. glibc then
// unwinds the thread's stack. A noexcept function on it, such as a destructor of nanobind's guards,
// would call std::terminate(), which ends the process with SIGABRT. The guards of this file stop
// such a thread until the process ends, as later Pythons do.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <thread>

namespace unisono {

template <class Function>
auto take_interpreter_lock(Function function) noexcept {
  try {
    return function();
  } catch (...) {
    while (true) std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

// Releases the lock; the destructor acquires it again.
class InterpreterUnlock {
 public:
  InterpreterUnlock() : state_(PyEval_SaveThread()) {}
  ~InterpreterUnlock() {
    take_interpreter_lock([this] { PyEval_RestoreThread(state_); });
  }
  InterpreterUnlock(const InterpreterUnlock&) = delete;
  InterpreterUnlock& operator=(const InterpreterUnlock&) = delete;

 private:
  PyThreadState* const state_;
};

// Acquires the lock, also where the thread has it; the destructor releases it.
class InterpreterLock {
 public:
  InterpreterLock() : state_(take_interpreter_lock(&PyGILState_Ensure)) {}
  ~InterpreterLock() { PyGILState_Release(state_); }
  InterpreterLock(const InterpreterLock&) = delete;
  InterpreterLock& operator=(const InterpreterLock&) = delete;

 private:
  const PyGILState_STATE state_;
};

}  // namespace unisono
