// The parts of unisono._engine that have a file of their own.
#pragma once

#include <nanobind/nanobind.h>

void bind_interface(nanobind::module_& m);
void bind_store(nanobind::module_& m);
void bind_store_link(nanobind::module_& m);
void bind_tls(nanobind::module_& m);
void bind_p2p(nanobind::module_& m);
void bind_receive(nanobind::module_& m);
void bind_mpi(nanobind::module_& m);
void bind_windows(nanobind::module_& m);

// The queue of a group's calls (core/queue.hpp), and the jobs in it.
void bind_queue(nanobind::module_& m);

// Public functions that run prepared calls: from Python's arguments to the engine without Python
// code.
//
// The function looks in the group's cache (Calls) for its arguments: the same function, dtypes,
// shapes, root, op and group, by position or by name. If the arguments are new, it asks Python for
// the prepared call: Python checks the arguments, selects an algorithm and lowers it. Other
// arguments, such as strided arrays, are passed to Python. Tensors of torch are arrays.
void bind_calls(nanobind::module_& m);

// The records of a group's calls (core/recorder.hpp), and the places where calls were made.
void bind_recorder(nanobind::module_& m);
