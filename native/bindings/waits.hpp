// Signals and exceptions of Python during waits in C++.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

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

// Whether the calling thread is one of unisono's own, which may serve what it would wait for.
extern thread_local bool is_worker;

// Report an exception of a callback and continue. An exception that ends programs, such as
// KeyboardInterrupt, ends the wait that made the call, because signal_raised() returns true.
// Otherwise it is raised soon after the wait.
void callback_raised(nanobind::python_error& error, const char* where);

}  // namespace unisono
