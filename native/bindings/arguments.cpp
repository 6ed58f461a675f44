#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#include "bindings/arguments.hpp"

#include <numpy/arrayobject.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "bindings/tensors.hpp"

namespace nb = nanobind;

namespace unisono {

Global global;

namespace {

// Put every argument in its parameter's place. False: an argument has no known parameter.
bool place_arguments(const Signature& f, PyObject* const* args, size_t count, PyObject* keywords,
                     PyObject** places) {
  if (count > f.positional) return false;
  for (size_t i = 0; i < count; ++i) places[i] = args[i];
  const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t k = 0; k < named; ++k) {
    PyObject* name = PyTuple_GET_ITEM(keywords, k);
    size_t i = 0;
    while (i < f.count && PyTuple_GET_ITEM(f.names, static_cast<Py_ssize_t>(i)) != name) ++i;
    if (i == f.count || places[i] != nullptr) return false;
    places[i] = args[count + static_cast<size_t>(k)];
  }
  return true;
}

// Return a copy in C order that stands for an array; it is not filled yet. nullptr: Python must.
[[gnu::noinline]] PyObject* copy_of(PyArrayObject* array, bool writes, Argument* into) {
  Strided layout(PyArray_BYTES(array), PyArray_ITEMSIZE(array));
  for (int i = 0; i < PyArray_NDIM(array); ++i) {
    if (!layout.add(PyArray_DIM(array, i), PyArray_STRIDE(array, i))) return nullptr;
  }
  if (writes && layout.overlaps_itself()) return nullptr;
  PyArray_Descr* const dtype = PyArray_DESCR(array);
  // Copies of references are not counted. Python refuses such arrays.
  if (PyDataType_REFCHK(dtype)) return nullptr;
  Py_INCREF(dtype);  // taken by the next line
  const nb::object made = nb::steal(PyArray_NewFromDescr(
    &PyArray_Type, dtype, PyArray_NDIM(array), PyArray_DIMS(array), nullptr, nullptr, 0, nullptr));
  if (!made.is_valid()) {
    PyErr_Clear();  // no memory
    return nullptr;
  }
  char* const packed = PyArray_BYTES(reinterpret_cast<PyArrayObject*>(made.ptr()));
  into->copies.push_back({layout, packed, nb::borrow(reinterpret_cast<PyObject*>(array)), made});
  return made.ptr();
}

bool is_plain(PyObject* object, bool writes) {
  if (object == nullptr || !PyArray_CheckExact(object)) return false;
  auto* array = reinterpret_cast<PyArrayObject*>(object);
  const int needed = writes ? NPY_ARRAY_CARRAY : NPY_ARRAY_CARRAY_RO;
  return PyArray_CHKFLAGS(array, needed) && PyArray_ISNOTSWAPPED(array);
}

// Apart from usable(), because a longer function is slower also for plain arrays.
[[gnu::noinline]] PyObject* packed(PyObject* object, bool writes, Argument* into) {
  if (object == nullptr || !PyArray_CheckExact(object)) return nullptr;
  auto* array = reinterpret_cast<PyArrayObject*>(object);
  if (PyArray_ISBYTESWAPPED(array) || (writes && !PyArray_ISWRITEABLE(array))) return nullptr;
  return copy_of(array, writes, into);
}

// Return what stands for an array in a call: the array itself, or a copy. nullptr: Python must
// handle it.
PyObject* usable(PyObject* object, bool writes, Argument* into) {
  return is_plain(object, writes) ? object : packed(object, writes, into);
}

// Add dtype and shape to the key. False: many dtypes share the number of its dtype, for example the
// texts of all lengths.
bool add_kind(PyArrayObject* array, Key* key) {
  const int dimensions = PyArray_NDIM(array);
  const int type = PyArray_TYPE(array);
  bool fits = (type < NPY_STRING || type > NPY_TIMEDELTA) && key->add(type) && key->add(dimensions);
  for (int i = 0; i < dimensions && fits; ++i) fits = key->add(PyArray_DIM(array, i));
  return fits;
}

// As is_tensor(), which is slow if torch is not loaded.
bool is_torch(PyObject* object) {
  return object != nullptr && !PyArray_CheckExact(object) && is_tensor(object);
}

// Add dtype and shape of a tensor to the key, with the numbers that arrays have.
bool add_kind(const Elements& elements, Key* key) {
  bool fits = key->add(elements.dtype) && key->add(elements.dimensions);
  for (int i = 0; i < elements.dimensions && fits; ++i) fits = key->add(elements.shape[i]);
  return fits;
}

bool take_tensor(PyObject* object, bool writes, Arguments* into) {
  Elements elements;
  if (!read_tensor(object, &elements)) return false;
  Argument& argument = writes ? into->arrays.output : into->arrays.input;
  argument.array = object;
  argument.data = elements.data;
  argument.nbytes = elements.nbytes;
  return add_kind(elements, &into->key);
}

// Take a list of tensors of one dtype and shape.
bool take_tensors(PyObject* list, bool writes, Arguments* into) {
  Argument& argument = writes ? into->arrays.output : into->arrays.input;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(list);
  Key first;
  // Reading a tensor may release the interpreter lock, and the list may change meanwhile.
  for (Py_ssize_t i = 0; i < count && i < PySequence_Fast_GET_SIZE(list); ++i) {
    nb::object item = nb::borrow(PySequence_Fast_GET_ITEM(list, i));
    Elements elements;
    Key kind;
    if (!is_tensor(item.ptr()) || !read_tensor(item.ptr(), &elements) ||
        !add_kind(elements, &kind)) {
      return false;
    }
    if (i == 0) first = kind;
    if (i == 0 ? !add_kind(elements, &into->key) : !(kind == first)) return false;
    argument.parts.push_back(elements.data);
    argument.nbytes += elements.nbytes;
    argument.listed.push_back(std::move(item));
  }
  return static_cast<Py_ssize_t>(argument.listed.size()) == count;
}

bool take_array(PyObject* object, bool writes, Arguments* into) {
  if (is_torch(object)) return take_tensor(object, writes, into);
  Argument& argument = writes ? into->arrays.output : into->arrays.input;
  argument.array = usable(object, writes, &argument);
  if (argument.array == nullptr) return false;
  auto* array = reinterpret_cast<PyArrayObject*>(argument.array);
  argument.data = PyArray_BYTES(array);
  argument.nbytes = PyArray_NBYTES(array);
  return add_kind(array, &into->key);
}

// Take a list of arrays of one dtype and shape. None and an empty list are allowed.
bool take_list(PyObject* object, bool writes, Arguments* into) {
  if (object == nullptr || object == Py_None) return into->key.add(-1);
  if (!PyList_CheckExact(object) && !PyTuple_CheckExact(object)) return false;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(object);
  PyObject** items = PySequence_Fast_ITEMS(object);
  if (!into->key.add(count)) return false;
  if (count > 0 && is_torch(items[0])) return take_tensors(object, writes, into);
  Argument& argument = writes ? into->arrays.output : into->arrays.input;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const item = usable(items[i], writes, &argument);
    if (item == nullptr) return false;
    auto* array = reinterpret_cast<PyArrayObject*>(item);
    auto* first = reinterpret_cast<PyArrayObject*>(items[0]);
    if (i == 0 ? !add_kind(array, &into->key)
               : PyArray_TYPE(array) != PyArray_TYPE(first) || !PyArray_SAMESHAPE(array, first)) {
      return false;
    }
    argument.parts.push_back(PyArray_BYTES(array));
    argument.nbytes += PyArray_NBYTES(array);
    argument.listed.push_back(nb::borrow(item));
  }
  return true;
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

// Whether memory that is written belongs to another array as well.
bool overlap(const Argument& input, const Argument& output) {
  struct Piece {
    const char* begin;
    const char* end;
    bool written;
  };
  std::vector<Piece> pieces;
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

// Return the value of a context variable, or None if it has no value.
nb::object value_of(PyObject* variable) {
  PyObject* value = nullptr;
  if (variable == nullptr || PyContextVar_Get(variable, Py_None, &value) != 0) {
    PyErr_Clear();
    return nb::none();
  }
  return nb::steal(value);
}

// Find the Calls of a group object. False: it has none.
bool take_group(PyObject* group, Arguments* into) {
  if (group == nullptr || group == Py_None) {
    group = global.default_group;
    if (nb::object world = value_of(global.world); !world.is_none()) {
      // This thread acts as a rank.
      into->world_group = nb::steal(PyObject_GetAttr(world.ptr(), global.default_attribute));
      group = into->world_group.ptr();
    }
  }
  if (group == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(group)) != global.group_type) {
    PyErr_Clear();
    return false;
  }
  into->group = group;
  into->calls_ref = nb::steal(PyObject_GetAttr(group, global.attribute));
  if (!into->calls_ref.is_valid()) {
    PyErr_Clear();
    return false;
  }
  return nb::try_cast<Calls*>(into->calls_ref, into->calls, false) && into->calls != nullptr;
}

// Take a number of seconds. Python checks every other time-out.
bool take_timeout(PyObject* value, double* into) {
  if (value == nullptr || value == Py_None) return true;
  if (!PyFloat_CheckExact(value) && !PyLong_CheckExact(value)) return false;
  *into = PyFloat_AsDouble(value);
  if (PyErr_Occurred() == nullptr) return *into > 0;
  PyErr_Clear();
  return false;
}

bool take_message(const Signature& f, PyObject* const* places, Arguments* into) {
  Message& message = into->message;
  for (size_t i = 0; i < f.count; ++i) {
    PyObject* value = places[i];
    switch (f.kinds[i]) {
      case kSent:
      case kReceived:
      case kSentSoon:
      case kReceivedSoon:
        message.array = message.owner = value;
        message.is_sent = f.kinds[i] == kSent || f.kinds[i] == kSentSoon;
        message.is_started = f.kinds[i] == kSentSoon || f.kinds[i] == kReceivedSoon;
        if (is_torch(value)) {
          into->message_array = array_of(value);
          if (into->message_array.is_none()) return false;
          message.array = into->message_array.ptr();
        } else if (f.kinds[i] != kReceivedSoon && value != nullptr && PyArray_CheckExact(value) &&
                   !PyArray_IS_C_CONTIGUOUS(reinterpret_cast<PyArrayObject*>(value))) {
          message.array = usable(value, !message.is_sent, &into->arrays.output);
        }
        break;
      case kShorter:
        message.is_partial = value == Py_True;
        if (value != nullptr && !PyBool_Check(value)) return false;
        break;
      case kPeer: message.peer = value; break;
      case kTag: message.tag = value; break;
      case kTimeout:
        if (!take_timeout(value, &message.timeout_s)) return false;
        break;
      case kGroup: break;
      default:
        if (value != nullptr && value != Py_None) return false;
    }
  }
  return message.array != nullptr && !(message.is_started && message.is_partial);
}

}  // namespace

bool Argument::make_private() {
  if (!copies.empty()) return false;
  const auto replace = [this](PyObject* object) -> PyObject* {
    const bool is_array = PyArray_Check(object);
    return is_array ? copy_of(reinterpret_cast<PyArrayObject*>(object), false, this) : nullptr;
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

bool parse_arguments(const Signature& f, PyObject* const* args, size_t count, PyObject* keywords,
                     Arguments* into) {
  PyObject** const places = into->places;
  if (!place_arguments(f, args, count, keywords, places)) return false;
  if (!value_of(global.stream).is_none() || !take_group(places[f.group], into)) return false;
  switch (f.kinds[0]) {
    case kSent:
    case kReceived:
    case kSentSoon:
    case kReceivedSoon: return take_message(f, places, into);
    default: break;
  }
  into->calls->wake_waiters();
  into->key.add(f.number);
  for (size_t i = 0; i < f.count; ++i) {
    PyObject* value = places[i];
    switch (f.kinds[i]) {
      case kReads:
      case kWrites:
        if (!take_array(value, f.kinds[i] == kWrites, into)) return false;
        break;
      case kReadsList:
      case kWritesList:
        if (!take_list(value, f.kinds[i] == kWritesList, into)) return false;
        break;
      case kOp:
        into->op = value;
        if (!into->key.add(reinterpret_cast<int64_t>(value))) return false;
        break;
      case kRoot: {
        // In each call of a group, None means the same root.
        if (value == nullptr || value == Py_None) {
          if (!into->key.add(-1)) return false;
          break;
        }
        if (!PyLong_CheckExact(value)) return false;
        const long root = PyLong_AsLong(value);
        if (root < 0 || !into->key.add(root)) {
          PyErr_Clear();
          return false;
        }
        break;
      }
      case kGroup: break;
      case kFlag:
        if (value != nullptr && value != Py_False && value != Py_True) return false;
        into->is_async = value == Py_True;
        break;
      case kAlgorithm:
        // By address: a literal has the same address in each round of a loop.
        if (value == nullptr || value == Py_None) break;
        into->algorithm = value;
        if (!PyUnicode_CheckExact(value) || !into->key.add(reinterpret_cast<int64_t>(value))) {
          return false;
        }
        break;
      case kOrdered:
        // No algorithm has this address.
        if (value == nullptr || value == Py_None || value == Py_False) break;
        if (value != Py_True || !into->key.add(1)) return false;
        break;
      case kTimeout:
        if (!take_timeout(value, &into->timeout_s)) return false;
        break;
      default:
        if (value != nullptr && value != Py_None) return false;
    }
  }
  // A queued call has the time-out of the group.
  if (into->is_async && into->timeout_s >= 0) return false;
  Argument &in = into->arrays.input, &out = into->arrays.output;
  if (in.parts.empty() && out.parts.empty()) {
    const bool apart = in.data == nullptr || out.data == nullptr ||
                       in.data >= out.data + out.nbytes || out.data >= in.data + in.nbytes;
    return apart || in.make_private();
  }
  return !overlap(in, out) || (in.make_private() && !overlap(in, out));
}

nb::object array_of(nb::handle tensor) {
  import_numpy();
  Elements elements;
  if (!is_tensor(tensor.ptr()) || !read_tensor(tensor.ptr(), &elements) ||
      elements.numpy_type < 0) {
    return nb::none();
  }
  return array_over(elements, tensor);
}

nb::object Argument::memory() const {
  const auto of = [](const nb::handle& object, char* bytes, int64_t nbytes) {
    if (PyArray_CheckExact(object.ptr())) return nb::borrow(object);
    return array_over({bytes, nbytes, 0, NPY_UINT8, 1, &nbytes}, object);
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
