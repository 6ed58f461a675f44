// The parts of unisono._engine that have a file of their own.
#pragma once

#include <nanobind/nanobind.h>

void bind_interface(nanobind::module_& m);
void bind_store(nanobind::module_& m);
void bind_store_link(nanobind::module_& m);
void bind_p2p(nanobind::module_& m);

// The queue of a group's calls (core/queue.hpp) and the jobs in it.
void bind_queue(nanobind::module_& m);

// Calls that repeat an earlier one, from Python's arguments to the engine without Python code.
//
// The first time a public function is called with certain arguments it runs in Python, which
// checks, selects an algorithm, lowers it and notes what it has run. What is noted here is run
// again when the same arguments come: same function, dtypes, shapes, root, op and group. Whatever
// is unusual (a list, a strided array, a tensor of torch, a keyword) is left to Python.
void bind_quick(nanobind::module_& m);
