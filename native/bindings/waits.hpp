// What waits in C++ have to do with Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace unisono {

int64_t nanoseconds(double seconds);

// Whether a signal handler raised, Ctrl-C above all; it ends a wait with that exception.
bool signal_raised();

// While it lives, its thread serves others: signals are the business of those who wait.
class Serving {
 public:
  Serving();
  ~Serving();
  Serving(const Serving&) = delete;
  Serving& operator=(const Serving&) = delete;
};

// Report what a callback raised, and go on; but what ends programs (Ctrl-C came while it ran) ends
// the wait that it was called from (signal_raised() says so), or is raised soon after it.
void callback_raised(nanobind::python_error& error, const char* where);

}  // namespace unisono
