// Objects of Python's classes with __slots__, made without code of Python. Setting an attribute by
// name takes several times as long.
#pragma once

#include <nanobind/nanobind.h>
#include <structmember.h>

#include <array>
#include <cstddef>
#include <utility>

namespace unisono {

inline Py_ssize_t offset_of_slot(nanobind::handle type, const char* name) {
  const nanobind::object slot = type.attr(name);
  if (Py_TYPE(slot.ptr()) != &PyMemberDescr_Type) throw nanobind::type_error("not a slot");
  return reinterpret_cast<PyMemberDescrObject*>(slot.ptr())->d_member->offset;
}

// Makes objects of a class whose slots are known by name.
template <size_t kCount>
class SlottedType {
 public:
  SlottedType() = default;
  SlottedType(nanobind::object type, const std::array<const char*, kCount>& names)
      : type_(std::move(type)) {
    for (size_t i = 0; i < kCount; ++i) offsets_[i] = offset_of_slot(type_, names[i]);
  }

  // Return a new object with these values, in the order of the names.
  nanobind::object make(const std::array<nanobind::handle, kCount>& values) const {
    auto* const plain = reinterpret_cast<PyTypeObject*>(type_.ptr());
    PyObject* const object = plain->tp_alloc(plain, 0);
    if (object == nullptr) throw nanobind::python_error();
    for (size_t i = 0; i < kCount; ++i) {
      auto* const place = reinterpret_cast<char*>(object) + offsets_[i];
      *reinterpret_cast<PyObject**>(place) = Py_NewRef(values[i].ptr());
    }
    return nanobind::steal(object);
  }

  nanobind::object& type() { return type_; }
  const nanobind::object& type() const { return type_; }

 private:
  nanobind::object type_;
  std::array<Py_ssize_t, kCount> offsets_{};
};

}  // namespace unisono
