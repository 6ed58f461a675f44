// The arrays of a call as C++ sees them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "bindings/tensors.hpp"
#include "core/program.hpp"
#include "core/strided.hpp"
#include "kernels/kernels.hpp"

namespace unisono {

// Stands for an array in a call. Filled when the call has its turn, because earlier calls may still
// write the array.
struct Copy {
  Strided layout;  // of `array`
  char* packed;
  nanobind::object array, made;  // the caller's array or tensor; NumPy's array that is the copy
  nanobind::object memory;       // of a tensor, which may get other memory
};

// The factor of PREMUL_SUM.
struct Scale {
  ScaleFn function = nullptr;  // nullptr: there is no factor
  double factor = 1;
};

// The memory of an argument: an array, or a list of arrays of equal size.
struct Argument {
  char* data = nullptr;       // of an array
  std::vector<char*> parts;   // of a list
  int64_t nbytes = 0;         // of all arrays together
  bool is_readonly = false;   // for example the array of a broadcast's root
  PyObject* array = nullptr;  // or tensor; borrowed: the caller keeps it alive
  // Owned, because a list can change while the interpreter lock is released.
  std::vector<nanobind::object> listed;
  std::vector<Copy> copies;  // of the arrays that the call does not use in place
  Scale scale;               // of the values in the copies

  // Use copies of all arrays. False: Python must make them.
  bool make_private();
  // Copy the caller's values into the copies, and results back; by the threads of `runner`.
  void fill(const Runner* runner = nullptr) const {
    if (!copies.empty()) fill_copies(team_of(runner));
  }
  void write_back(const Runner* runner = nullptr) const {
    for (const Copy& copy : copies) copy.layout.unpack(copy.packed, team_of(runner));
  }

  // Return what the caller gave: an array, a list of arrays, or None.
  nanobind::object owner() const;
  // Return the same with an array of bytes, which keeps the memory, in place of each tensor, and
  // with copies in place of what they stand for.
  nanobind::object memory() const;

 private:
  // The threads that share the copies; nullptr: one thread makes them.
  ThreadTeam* team_of(const Runner* runner) const {
    return runner == nullptr ? nullptr : runner->team_for(nbytes);
  }
  void fill_copies(ThreadTeam* team) const;
};

// The arrays of a call. An empty argument is a buffer that the program does not have.
struct Arrays {
  Argument input, output;
};

// Return a copy in C order that stands for an array that is not plain; it is not filled yet. nullptr:
// Python must handle the array.
PyObject* packed(PyObject* object, bool writes, Argument* into);

// Return the same for a tensor with these elements.
PyObject* copy_of(const Elements& elements, nanobind::handle tensor, bool writes, Argument* into);

// Whether memory that is written belongs to another array as well.
bool overlap(const Argument& input, const Argument& output);

// Take what Python has checked: a contiguous array, a list of such arrays, or None.
Argument argument_of(nanobind::handle given);

// Return an array over the memory of a tensor, which it keeps. None: C++ cannot use the elements in
// place, or NumPy lacks their dtype.
nanobind::object array_of(nanobind::handle tensor);

// Must run before the first use of an array. Not when the extension is loaded, because
// the launcher loads it for the store's server and must stay without NumPy.
void import_numpy();

}  // namespace unisono
