#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL unisono_numpy
#include "bindings/arrays.hpp"

#include <numpy/arrayobject.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "bindings/tensors.hpp"

namespace nb = nanobind;

namespace unisono {

namespace {

// Keep a new array as the copy that stands for an array or tensor; it is not filled yet. nullptr:
// there was no memory.
PyObject* keep_copy(const Strided& layout, nb::object made, nb::handle owner, Argument* into) {
  if (!made.is_valid()) {
    PyErr_Clear();
    return nullptr;
  }
  char* const packed = PyArray_BYTES(reinterpret_cast<PyArrayObject*>(made.ptr()));
  into->copies.push_back({layout, packed, nb::borrow(owner), std::move(made), {}});
  return into->copies.back().made.ptr();
}

// Return a copy in C order that stands for an array. nullptr: Python must handle it.
PyObject* copy_of(PyArrayObject* array, bool writes, Argument* into) {
  // Objects are counted, and a copy of their addresses is not.
  if (PyDataType_REFCHK(PyArray_DESCR(array))) return nullptr;
  Strided layout(PyArray_BYTES(array), PyArray_ITEMSIZE(array));
  for (int i = 0; i < PyArray_NDIM(array); ++i) {
    if (!layout.add(PyArray_DIM(array, i), PyArray_STRIDE(array, i))) return nullptr;
  }
  if (writes && layout.overlaps_itself()) return nullptr;
  PyArray_Descr* const dtype = PyArray_DESCR(array);
  Py_INCREF(dtype);  // taken by the next line
  nb::object made = nb::steal(PyArray_NewFromDescr(
    &PyArray_Type, dtype, PyArray_NDIM(array), PyArray_DIMS(array), nullptr, nullptr, 0, nullptr));
  return keep_copy(layout, std::move(made), reinterpret_cast<PyObject*>(array), into);
}

// Return an array over elements of a tensor, which keeps the tensor's memory.
nb::object array_over(const Elements& elements, nb::handle tensor) {
  const nb::object made =
    nb::steal(PyArray_New(&PyArray_Type, elements.dimensions, elements.shape, elements.numpy_type,
                          nullptr, elements.data, 0, NPY_ARRAY_CARRAY, nullptr));
  if (!made.is_valid() || PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(made.ptr()),
                                                storage_of(tensor.ptr()).release().ptr()) != 0) {
    throw nb::python_error();
  }
  return made;
}

}  // namespace

PyObject* copy_of(const Elements& elements, nb::handle tensor, bool writes, Argument* into) {
  import_numpy();
  Strided layout(elements.data, elements.itemsize);
  int64_t inner = 1;
  std::vector<int64_t> strides(static_cast<size_t>(elements.dimensions));
  for (int i = elements.dimensions; i-- > 0; inner *= elements.shape[i]) {
    strides[static_cast<size_t>(i)] = elements.strides == nullptr ? inner : elements.strides[i];
  }
  for (int i = 0; i < elements.dimensions; ++i) {
    const int64_t stride = strides[static_cast<size_t>(i)] * elements.itemsize;
    if (!layout.add(elements.shape[i], stride)) return nullptr;
  }
  if (writes && layout.overlaps_itself()) return nullptr;
  // Only the size of an element counts here.
  const int other = elements.itemsize == 1 ? NPY_UINT8 : NPY_UINT16;
  const int type = elements.numpy_type < 0 ? other : elements.numpy_type;
  nb::object made = nb::steal(PyArray_New(&PyArray_Type, elements.dimensions, elements.shape, type,
                                          nullptr, nullptr, 0, 0, nullptr));
  PyObject* const kept = keep_copy(layout, std::move(made), tensor, into);
  if (kept != nullptr) into->copies.back().memory = storage_of(tensor.ptr());
  return kept;
}

PyObject* packed(PyObject* object, bool writes, Argument* into) {
  if (object == nullptr || !PyArray_CheckExact(object)) return nullptr;
  auto* array = reinterpret_cast<PyArrayObject*>(object);
  if (PyArray_ISBYTESWAPPED(array) || (writes && !PyArray_ISWRITEABLE(array))) return nullptr;
  return copy_of(array, writes, into);
}

bool overlap(const Argument& input, const Argument& output) {
  struct Piece {
    const char* begin;
    const char* end;
    bool written;
  };
  std::vector<Piece> pieces;
  pieces.reserve(input.parts.size() + output.parts.size() + output.copies.size() + 2);
  auto add = [&pieces](const Argument& from, bool written) {
    if (from.data != nullptr) pieces.push_back({from.data, from.data + from.nbytes, written});
    const int64_t size =
      from.parts.empty() ? 0 : from.nbytes / static_cast<int64_t>(from.parts.size());
    for (const char* part : from.parts) pieces.push_back({part, part + size, written});
    if (!written) return;
    for (const Copy& copy : from.copies) {
      pieces.push_back({copy.layout.begin(), copy.layout.end(), written});
    }
  };
  add(input, false);
  add(output, true);
  std::sort(pieces.begin(), pieces.end(),
            [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
  const char *read = nullptr, *written = nullptr;  // the highest end so far
  for (const Piece& piece : pieces) {
    if (piece.begin < written || (piece.written && piece.begin < read)) return true;
    (piece.written ? written : read) = std::max(piece.written ? written : read, piece.end);
  }
  return false;
}

bool Argument::make_private() {
  if (!copies.empty()) return copies.size() == std::max<size_t>(listed.size(), 1);
  const auto replace = [this](PyObject* object) -> PyObject* {
    if (PyArray_Check(object)) {
      return copy_of(reinterpret_cast<PyArrayObject*>(object), false, this);
    }
    Elements elements;
    return read_tensor(object, &elements) ? copy_of(elements, object, false, this) : nullptr;
  };
  if (array != nullptr) {
    array = replace(array);
    if (array == nullptr) return false;
    data = copies.back().packed;
  }
  for (size_t i = 0; i < listed.size(); ++i) {
    PyObject* const made = replace(listed[i].ptr());
    if (made == nullptr) return false;
    listed[i] = nb::borrow(made);
    parts[i] = copies.back().packed;
  }
  return true;
}

Argument argument_of(nb::handle given) {
  import_numpy();
  Argument made;
  const auto take = [&made](nb::handle object) {
    auto* array = reinterpret_cast<PyArrayObject*>(object.ptr());
    if (!PyArray_Check(object.ptr()) || !PyArray_IS_C_CONTIGUOUS(array)) {
      throw nb::value_error("not a contiguous array");
    }
    made.nbytes += PyArray_NBYTES(array);
    made.is_readonly |= !PyArray_ISWRITEABLE(array);
    return PyArray_BYTES(array);
  };
  if (given.is_none()) return made;
  if (!nb::isinstance<nb::list>(given)) {
    made.data = take(given);
    made.array = given.ptr();
    return made;
  }
  for (nb::handle each : nb::borrow<nb::list>(given)) {
    const int64_t before = made.nbytes;
    made.parts.push_back(take(each));
    made.listed.push_back(nb::borrow(each));
    if (made.nbytes != static_cast<int64_t>(made.parts.size()) * (made.nbytes - before)) {
      throw nb::value_error("arrays of different size");
    }
  }
  return made;
}

nb::object array_of(nb::handle tensor) {
  import_numpy();
  Elements elements;
  if (!is_tensor(tensor.ptr()) || !read_tensor(tensor.ptr(), &elements) ||
      elements.numpy_type < 0 || elements.strides != nullptr) {
    return nb::none();
  }
  return array_over(elements, tensor);
}

void Argument::fill_copies(ThreadTeam* team) const {
  for (const Copy& copy : copies) {
    copy.layout.pack(copy.packed, team);
    if (scale.function == nullptr) continue;
    auto* made = reinterpret_cast<PyArrayObject*>(copy.made.ptr());
    const auto itemsize = static_cast<size_t>(PyArray_ITEMSIZE(made));
    share(team, static_cast<size_t>(PyArray_SIZE(made)), itemsize, [&](size_t begin, size_t end) {
      scale.function(copy.packed + begin * itemsize, end - begin, scale.factor);
    });
  }
}

nb::object Argument::owner() const {
  auto copy = copies.begin();  // in the order of the arrays
  const auto given = [&](nb::handle used) {
    const bool is_copy = copy != copies.end() && copy->made.is(used);
    return is_copy ? (copy++)->array : nb::borrow(used);
  };
  if (listed.empty()) return array == nullptr ? nb::none() : given(array);
  nb::list arrays;
  for (const nb::object& each : listed) arrays.append(given(each));
  return arrays;
}

nb::object Argument::memory() const {
  const auto of = [](const nb::handle& object, char* bytes, int64_t nbytes) {
    if (PyArray_CheckExact(object.ptr())) return nb::borrow(object);
    return array_over({bytes, nbytes, 1, 0, NPY_UINT8, 1, &nbytes}, object);
  };
  if (listed.empty()) return array == nullptr ? nb::none() : of(array, data, nbytes);
  nb::list arrays;
  const auto count = static_cast<int64_t>(listed.size());
  for (size_t i = 0; i < listed.size(); ++i) arrays.append(of(listed[i], parts[i], nbytes / count));
  return arrays;
}

void import_numpy() {
  if (PyArray_API == nullptr && _import_array() < 0) throw nb::python_error();
}

}  // namespace unisono
