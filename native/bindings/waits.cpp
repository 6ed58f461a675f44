#include "bindings/waits.hpp"

#include <utility>

#include "core/clock.hpp"

namespace unisono {

namespace {

thread_local PyObject* kept_exception = nullptr;

// Raise the kept exception. False: there is none.
bool raise_kept() {
  PyObject* const kept = std::exchange(kept_exception, nullptr);
  if (kept == nullptr) return false;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(kept)), kept);
  Py_DECREF(kept);
  return true;
}

}  // namespace

thread_local bool is_worker = false;

int64_t nanoseconds(double seconds) {
  // More than a century does not fit and counts as unlimited.
  return seconds < 3e9 ? static_cast<int64_t>(seconds * 1e9) : int64_t{3'000'000'000'000'000'000};
}

bool signal_raised() {
  if (is_server) return false;
  InterpreterLock locked;
  return raise_kept() || PyErr_CheckSignals() != 0;
}

void callback_raised(nanobind::python_error& error, const char* where) {
  if (is_server || kept_exception != nullptr || error.matches(PyExc_Exception)) {
    return error.discard_as_unraisable(where);
  }
  kept_exception = nanobind::borrow(error.value()).release().ptr();
  // The interpreter raises the exception at its next check for signals, if no wait raises it
  // earlier. Signal handlers interrupt callbacks only on the main thread.
  Py_AddPendingCall([](void*) { return raise_kept() ? -1 : 0; }, nullptr);
}

Serving::Serving() { is_server = true; }
Serving::~Serving() { is_server = false; }

}  // namespace unisono
