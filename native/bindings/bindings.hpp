// The parts of unisono._engine that have a file of their own.
#pragma once

#include <nanobind/nanobind.h>

void bind_interface(nanobind::module_& m);
void bind_store(nanobind::module_& m);
void bind_store_link(nanobind::module_& m);
void bind_p2p(nanobind::module_& m);

// The queue of a group's calls (core/queue.hpp), and the jobs in it.
void bind_queue(nanobind::module_& m);

// Repeats earlier calls: from Python's arguments to the engine without Python code.
//
// The first call of a public function with certain arguments runs in Python. Python checks the
// call, selects an algorithm, lowers it and notes the program that it ran. C++ runs the noted
// program again if the same arguments come: the same function, dtypes, shapes, root, op and group.
// Lists and keywords are included. Other arguments, such as strided arrays and tensors of torch,
// are passed to Python.
void bind_quick(nanobind::module_& m);
