// The parts of unisono._engine that have a file of their own.
#pragma once

#include <nanobind/nanobind.h>

void bind_store(nanobind::module_& m);
void bind_store_link(nanobind::module_& m);
