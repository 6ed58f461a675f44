#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <structmember.h>

#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#include <numpy/arrayobject.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "calls.hpp"

namespace nb = nanobind;

namespace unisono {

namespace {

// How a call without a group finds the default one; under the interpreter lock.
struct {
  PyObject* world = nullptr;  // context variable of the current world; None: the process's
  PyObject* stream = nullptr;  // context variable of the current stream; None: no explicit one
  PyObject* group_type = nullptr;
  PyObject* default_group = nullptr;
  PyObject* attribute = nullptr;  // name of a group's attribute that holds its Calls
  PyObject* default_attribute = nullptr;
} global;

// What a parameter of a function is, by a letter from Python.
enum Kind : char {
  kReads = 'r',   // an array that is only read
  kWrites = 'w',  // an array that is written, or both
  kOp = 'o',
  kRoot = 'n',
  kGroup = 'g',
  kFlag = 'f',    // async_op: only False is ours
  kAbsent = '-',  // only None is ours
};

constexpr size_t kMaxParameters = 8;

struct Function {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* dict;
  PyObject* function;
  PyObject* names;  // tuple of interned strings
  int64_t number;
  size_t count;
  char kinds[kMaxParameters];
};

struct Arguments {
  Calls* calls = nullptr;
  nb::object calls_ref;
  Key key;
  PyObject* op = nullptr;
  Arrays arrays;
};

// Put every argument in its parameter's place; false if there is one that we do not know.
bool place_arguments(const Function& f, PyObject* const* args, size_t count, PyObject* keywords,
                     PyObject** places) {
  if (count > f.count) return false;
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

bool take_array(PyObject* object, bool writes, Arguments* into) {
  if (object == nullptr || !PyArray_CheckExact(object)) return false;
  auto* array = reinterpret_cast<PyArrayObject*>(object);
  const int needed = writes ? NPY_ARRAY_CARRAY : NPY_ARRAY_CARRAY_RO;
  if (!PyArray_CHKFLAGS(array, needed) || !PyArray_ISNOTSWAPPED(array)) return false;
  Span& span = writes ? into->arrays.output : into->arrays.input;
  (writes ? into->arrays.output_owner : into->arrays.input_owner) = object;
  span = {PyArray_BYTES(array), static_cast<int64_t>(PyArray_NBYTES(array))};
  const int dimensions = PyArray_NDIM(array);
  bool fits = into->key.add(PyArray_TYPE(array)) && into->key.add(dimensions);
  for (int i = 0; i < dimensions && fits; ++i) fits = into->key.add(PyArray_DIM(array, i));
  return fits;
}

// The value of a context variable; None if it has none.
nb::object value_of(PyObject* variable) {
  PyObject* value = nullptr;
  if (variable == nullptr || PyContextVar_Get(variable, Py_None, &value) != 0) {
    PyErr_Clear();
    return nb::none();
  }
  return nb::steal(value);
}

// Find the Calls of a group object; false if it has none.
bool take_group(PyObject* group, Arguments* into) {
  nb::object found;
  if (group == nullptr || group == Py_None) {
    group = global.default_group;
    if (nb::object world = value_of(global.world); !world.is_none()) {
      // A thread that acts as a rank.
      found = nb::steal(PyObject_GetAttr(world.ptr(), global.default_attribute));
      group = found.ptr();
    }
  }
  if (group == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(group)) != global.group_type) {
    PyErr_Clear();
    return false;
  }
  into->calls_ref = nb::steal(PyObject_GetAttr(group, global.attribute));
  if (!into->calls_ref.is_valid()) {
    PyErr_Clear();
    return false;
  }
  return nb::try_cast<Calls*>(into->calls_ref, into->calls, false) && into->calls != nullptr;
}

// Whether the call is of the plain kind that can be repeated; `into` then says which call it is.
bool understand(const Function& f, PyObject* const* args, size_t count, PyObject* keywords,
                Arguments* into) {
  PyObject* places[kMaxParameters] = {};
  if (!place_arguments(f, args, count, keywords, places)) return false;
  into->key.add(f.number);
  PyObject* group = nullptr;
  for (size_t i = 0; i < f.count; ++i) {
    PyObject* value = places[i];
    switch (f.kinds[i]) {
      case kReads:
      case kWrites:
        if (!take_array(value, f.kinds[i] == kWrites, into)) return false;
        break;
      case kOp:
        into->op = value;
        if (!into->key.add(reinterpret_cast<int64_t>(value))) return false;
        break;
      case kRoot: {
        if (value == nullptr || !PyLong_CheckExact(value)) return false;
        const long root = PyLong_AsLong(value);
        if (root < 0 || !into->key.add(root)) {
          PyErr_Clear();
          return false;
        }
        break;
      }
      case kGroup:
        group = value;
        break;
      case kFlag:
        if (value != nullptr && value != Py_False) return false;
        break;
      default:
        if (value != nullptr && value != Py_None) return false;
    }
  }
  const Span &in = into->arrays.input, &out = into->arrays.output;
  if (in.data != nullptr && out.data != nullptr && in.data < out.data + out.nbytes &&
      out.data < in.data + in.nbytes) {
    return false;
  }
  return value_of(global.stream).is_none() && take_group(group, into);
}

PyObject* call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  const auto& f = *reinterpret_cast<Function*>(self);
  Arguments known;
  if (!understand(f, args, static_cast<size_t>(PyVectorcall_NARGS(nargsf)), keywords, &known)) {
    return PyObject_Vectorcall(f.function, args, nargsf, keywords);
  }
  if (const Remembered* what = known.calls->find(known.key)) {
    bool failed = false;
    if (known.calls->run(*what, known.arrays, &failed)) {
      if (failed) return nullptr;
      Py_RETURN_NONE;
    }
  }
  known.calls->forget_note();
  PyObject* result = PyObject_Vectorcall(f.function, args, nargsf, keywords);
  if (result == Py_None) known.calls->remember(known.key, known.op, known.arrays);
  return result;
}

int visit_function(PyObject* self, visitproc visit, void* arg) {
  auto* f = reinterpret_cast<Function*>(self);
  Py_VISIT(f->dict);
  Py_VISIT(f->function);
  Py_VISIT(f->names);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int clear_function(PyObject* self) {
  auto* f = reinterpret_cast<Function*>(self);
  Py_CLEAR(f->dict);
  Py_CLEAR(f->function);
  Py_CLEAR(f->names);
  return 0;
}

void delete_function(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear_function(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// Pickled as functions are: by name.
PyObject* reduce_function(PyObject* self, PyObject*) {
  return PyObject_GetAttrString(self, "__qualname__");
}

PyObject* represent_function(PyObject* self) {
  return PyObject_Repr(reinterpret_cast<Function*>(self)->function);
}

int visit_calls(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<Calls>(self)->visit(visit, arg) : 0;
}

int clear_calls(PyObject* self) {
  nb::inst_ptr<Calls>(self)->clear();
  return 0;
}

PyType_Slot calls_slots[] = {
  {Py_tp_traverse, reinterpret_cast<void*>(&visit_calls)},
  {Py_tp_clear, reinterpret_cast<void*>(&clear_calls)},
  {0, nullptr},
};

PyMemberDef members[] = {
  {"__vectorcalloffset__", T_PYSSIZET, offsetof(Function, vectorcall), READONLY, nullptr},
  {"__dictoffset__", T_PYSSIZET, offsetof(Function, dict), READONLY, nullptr},
  {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef getset[] = {
  {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
  {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef methods[] = {
  {"__reduce__", &reduce_function, METH_NOARGS, nullptr},
  {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
  {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
  {Py_tp_traverse, reinterpret_cast<void*>(&visit_function)},
  {Py_tp_clear, reinterpret_cast<void*>(&clear_function)},
  {Py_tp_dealloc, reinterpret_cast<void*>(&delete_function)},
  {Py_tp_repr, reinterpret_cast<void*>(&represent_function)},
  {Py_tp_members, members},
  {Py_tp_getset, getset},
  {Py_tp_methods, methods},
  {0, nullptr},
};

PyType_Spec spec{"unisono._engine.Function", sizeof(Function), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};

PyTypeObject* function_type = nullptr;

nb::object quick(nb::object function, const std::vector<nb::str>& names, const std::string& kinds) {
  if (kinds.size() > kMaxParameters || kinds.size() != names.size()) {
    throw nb::value_error("one kind per parameter, eight at most");
  }
  // Here, where somebody wants to repeat calls: the launcher, which loads this extension for its
  // store's server, shall stay without NumPy.
  if (PyArray_API == nullptr && _import_array() < 0) throw nb::python_error();
  nb::object interned = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(names.size())));
  for (size_t i = 0; i < names.size(); ++i) {
    // Keywords arrive interned, so that comparing addresses will do.
    PyObject* name = nb::borrow(names[i]).release().ptr();
    PyUnicode_InternInPlace(&name);
    PyTuple_SET_ITEM(interned.ptr(), static_cast<Py_ssize_t>(i), name);
  }
  static int64_t made = 0;
  auto* f = PyObject_GC_New(Function, function_type);
  if (f == nullptr) throw nb::python_error();
  f->vectorcall = &call;
  f->dict = nullptr;
  f->function = function.release().ptr();
  f->names = interned.release().ptr();
  f->number = ++made;
  f->count = kinds.size();
  std::memcpy(f->kinds, kinds.data(), kinds.size());
  PyObject_GC_Track(f);
  return nb::steal(reinterpret_cast<PyObject*>(f));
}

void set_world(nb::object world, nb::object stream, nb::object group_type) {
  global.world = world.release().ptr();
  global.stream = stream.release().ptr();
  global.group_type = group_type.release().ptr();
}

void set_default(nb::object group) {
  PyObject* old = global.default_group;
  global.default_group = group.is_none() ? nullptr : group.release().ptr();
  Py_XDECREF(old);
}

}  // namespace

}  // namespace unisono

void bind_quick(nb::module_& m) {
  unisono::global.attribute = PyUnicode_InternFromString("calls");
  unisono::global.default_attribute = PyUnicode_InternFromString("default");
  unisono::function_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&unisono::spec));
  if (unisono::function_type == nullptr) throw nb::python_error();

  // A script may end without destroying its groups; what threads hold then is no news to anybody.
  nb::set_leak_warnings(false);

  nb::class_<unisono::Turn>(m, "Turn")
    .def(nb::init<>())
    .def_ro("busy", &unisono::Turn::busy)
    .def_rw("wanted", &unisono::Turn::wanted)
    .def("count", &unisono::Turn::count, "Return the next number.")
    .def("take", &unisono::Turn::take, "Take the turn and return the next number; 0 if not free.")
    .def("seize", &unisono::Turn::seize, "Take the turn if it is free, wanted or not.")
    .def("give", &unisono::Turn::give, "Give the turn back.");

  nb::class_<unisono::Calls>(m, "Calls", nb::type_slots(unisono::calls_slots))
    .def(nb::init<nb::object, nb::object, nb::object>(), nb::arg("turn"), nb::arg("failed"),
         nb::arg("waiting"))
    .def("open", &unisono::Calls::open, nb::arg("group"), nb::arg("timeout_s"))
    .def("close", &unisono::Calls::close, "Leave every call to Python from now on.")
    .def_prop_ro("caller", &unisono::Calls::caller, "The thread whose call is repeated now, or 0.")
    .def("set_timeout", &unisono::Calls::set_timeout, nb::arg("timeout_s"))
    .def("last", &unisono::Calls::last, "Return (seq, call) of the last call that was repeated, or None.");

  m.def("quick", &unisono::quick, nb::arg("function"), nb::arg("names"), nb::arg("kinds"),
        "Return a callable that repeats calls, and leaves others to `function`.");
  m.def("set_world", &unisono::set_world, nb::arg("world"), nb::arg("stream"), nb::arg("group_type"));
  m.def("set_default", &unisono::set_default, nb::arg("group").none());
  m.def("suspend_quick", [] { ++unisono::process.suspended; }, "Leave every call to Python.");
  m.def("resume_quick", [] { --unisono::process.suspended; }, "Undo one suspend_quick().");
  m.def("forked", [] { ++unisono::process.forks; }, "Forget the groups of this process, a child.");
}
