// Classes of C++ that Python's garbage collector visits, because they refer to objects of Python.
#pragma once

#include <nanobind/nanobind.h>

namespace unisono {

// The type slots of a class that has visit() and clear().
template <class T>
struct Collected {
  static int visit(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    return nanobind::inst_ready(self) ? nanobind::inst_ptr<T>(self)->visit(visit, arg) : 0;
  }

  static int clear(PyObject* self) {
    if (nanobind::inst_ready(self)) nanobind::inst_ptr<T>(self)->clear();
    return 0;
  }

  static inline PyType_Slot slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(&Collected::visit)},
    {Py_tp_clear, reinterpret_cast<void*>(&Collected::clear)},
    {0, nullptr},
  };
};

}  // namespace unisono
