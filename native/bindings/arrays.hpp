// The arrays of a call as C++ sees them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

namespace unisono {

// The memory of an argument: an array, or a list of arrays of equal size.
struct Argument {
  char* data = nullptr;       // of an array
  std::vector<char*> parts;   // of a list
  int64_t nbytes = 0;         // of all arrays together
  bool is_readonly = false;   // for example the array of a broadcast's root
  PyObject* array = nullptr;  // or tensor; borrowed: the caller keeps it alive
  // Owned, because a list can change while the interpreter lock is released.
  std::vector<nanobind::object> listed;

  // Return what the caller gave: an array, a list of arrays, or None.
  nanobind::object owner() const;
  // Return the same with an array of bytes, which keeps the memory, in place of each tensor.
  nanobind::object memory() const;
};

// The arrays of a call. An empty argument is a buffer that the program does not have.
struct Arrays {
  Argument input, output;
};

// Take what Python has checked: a contiguous array, a list of such arrays, or None.
Argument argument_of(nanobind::handle given);

}  // namespace unisono
