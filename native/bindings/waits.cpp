#include "waits.hpp"

#include <utility>

#include "clock.hpp"

namespace unisono {

namespace {

thread_local PyObject* kept_exception = nullptr;

}  // namespace

int64_t nanoseconds(double seconds) {
  // Longer than a century is for ever, and does not fit.
  return seconds < 3e9 ? static_cast<int64_t>(seconds * 1e9) : int64_t{3'000'000'000'000'000'000};
}

bool signal_raised() {
  if (is_server) return false;
  nanobind::gil_scoped_acquire locked;
  if (PyObject* const kept = std::exchange(kept_exception, nullptr)) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(kept)), kept);
    Py_DECREF(kept);
    return true;
  }
  return PyErr_CheckSignals() != 0;
}

void callback_raised(nanobind::python_error& error, const char* where) {
  if (is_server || kept_exception != nullptr || error.matches(PyExc_Exception)) {
    return error.discard_as_unraisable(where);
  }
  kept_exception = nanobind::borrow(error.value()).release().ptr();
}

Serving::Serving() { is_server = true; }
Serving::~Serving() { is_server = false; }

}  // namespace unisono
