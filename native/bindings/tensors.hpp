// Reads torch's tensors as NumPy's arrays are read. Needs no library of torch: DLPack defines a
// table of functions, which torch's class has as a capsule.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace unisono {

// Elements of a tensor: aligned, and in this machine's byte order.
struct Elements {
  char* data = nullptr;
  int64_t nbytes = 0;
  int64_t itemsize = 0;
  int dtype = 0;        // no other dtype has this number
  int numpy_type = -1;  // NumPy's number of the dtype; -1: NumPy has no such dtype
  int dimensions = 0;
  // Valid until other code of Python runs; `strides` in elements, nullptr: C order.
  const int64_t* shape = nullptr;
  const int64_t* strides = nullptr;
};

// Whether an object is a tensor or parameter of torch; not of a sub-class, which may mean another
// thing by its memory.
bool is_tensor(PyObject* object);

// Read a tensor on the CPU. False: its values are not the elements in its memory, as those of a
// sparse, negated or freed tensor. The function may release the interpreter lock.
bool read_tensor(PyObject* tensor, Elements* into);

// Return what keeps the memory of a tensor alive, also when the tensor gets other memory.
nanobind::object storage_of(PyObject* tensor);

}  // namespace unisono
