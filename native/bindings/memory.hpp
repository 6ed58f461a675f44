// Holds the memory of Python's arrays during a call.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "bindings/calls.hpp"

namespace unisono {

// The memory of an array, or of a list of arrays of equal size, held until the destructor. Empty
// for None.
class Memory {
 public:
  // Delegates, so that the destructor runs if this constructor throws.
  explicit Memory(nanobind::handle given) : Memory() {
    if (given.is_none()) return;
    if (!nanobind::isinstance<nanobind::list>(given)) {
      span_.data = hold(given);
      return;
    }
    for (nanobind::handle each : nanobind::borrow<nanobind::list>(given)) {
      span_.parts.push_back(hold(each));
      if (views_.back().len != views_.front().len) {
        throw nanobind::value_error("parts of different size");
      }
    }
  }
  ~Memory() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  const Span& span() const { return span_; }

 private:
  Memory() = default;

  char* hold(nanobind::handle array) {
    Py_buffer view{};
    if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_SIMPLE) != 0) throw nanobind::python_error();
    views_.push_back(view);
    span_.nbytes += view.len;
    span_.is_readonly |= view.readonly != 0;
    return static_cast<char*>(view.buf);
  }

  std::vector<Py_buffer> views_;
  Span span_;
};

}  // namespace unisono
