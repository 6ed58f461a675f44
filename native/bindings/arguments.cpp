#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL unisono_numpy
#define NO_IMPORT_ARRAY
#include "bindings/arguments.hpp"

#include <numpy/arrayobject.h>

#include <cstring>
#include <utility>
#include <vector>

#include "bindings/tensors.hpp"

namespace nb = nanobind;

namespace unisono {

Global global;

namespace {

constexpr int64_t kMostCopied = 1 << 20;

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

bool is_plain(PyObject* object, bool writes) {
  if (object == nullptr || !PyArray_CheckExact(object)) return false;
  auto* array = reinterpret_cast<PyArrayObject*>(object);
  const int needed = writes ? NPY_ARRAY_CARRAY : NPY_ARRAY_CARRAY_RO;
  return PyArray_CHKFLAGS(array, needed) && PyArray_ISNOTSWAPPED(array);
}

// Return what stands for an array in a call: the array itself, or a copy. nullptr: Python must
// handle it.
PyObject* usable(PyObject* object, bool writes, Argument* into) {
  return is_plain(object, writes) ? object : packed(object, writes, into);
}

PyObject* usable(const Elements& elements, PyObject* tensor, bool writes, Argument* into) {
  return elements.strides == nullptr ? tensor : copy_of(elements, tensor, writes, into);
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
  if (!add_kind(elements, &into->key)) return false;
  argument.nbytes = elements.nbytes;
  argument.array = usable(elements, object, writes, &argument);
  argument.data = argument.copies.empty() ? elements.data : argument.copies.back().packed;
  return argument.array != nullptr;
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
    argument.nbytes += elements.nbytes;
    PyObject* const used = usable(elements, item.ptr(), writes, &argument);
    if (used == nullptr) return false;
    argument.parts.push_back(used == item.ptr() ? elements.data : argument.copies.back().packed);
    argument.listed.push_back(nb::borrow(used));
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

// Take the array whose elements the output gets, or None; both must be plain, of one dtype and
// shape. Python copies large ones, without the interpreter lock.
bool take_source(PyObject* object, Arguments* into) {
  const Argument& out = into->arrays.output;
  if (!is_plain(out.array, true) || !out.copies.empty()) return false;
  if (object == nullptr || object == Py_None) return true;
  if (!is_plain(object, false) || out.nbytes > kMostCopied) return false;
  auto* from = reinterpret_cast<PyArrayObject*>(object);
  auto* to = reinterpret_cast<PyArrayObject*>(out.array);
  if (PyArray_TYPE(from) != PyArray_TYPE(to) || !PyArray_SAMESHAPE(from, to)) return false;
  into->source = object;
  return true;
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
  argument.parts.reserve(static_cast<size_t>(count));
  argument.listed.reserve(static_cast<size_t>(count));
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
  PyObject* const found =
    *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(group) + global.calls_offset);
  if (found == nullptr || Py_TYPE(found) != global.calls_type) return false;
  into->calls_ref = nb::borrow(found);
  into->calls = nb::inst_ptr<Calls>(found);
  return true;
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

void Arguments::copy_source() const {
  if (source == nullptr) return;
  const auto bytes = static_cast<size_t>(arrays.output.nbytes);
  const char* from = PyArray_BYTES(reinterpret_cast<PyArrayObject*>(source));
  std::memmove(arrays.output.data, from, bytes);
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
      case kSource:
        if (!take_source(value, into)) return false;
        break;
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

}  // namespace unisono
