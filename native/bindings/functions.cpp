#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <structmember.h>

#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arguments.hpp"
#include "bindings/bindings.hpp"
#include "bindings/collected.hpp"
#include "bindings/waits.hpp"

namespace nb = nanobind;

namespace unisono {

namespace {

struct Function {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* dict;
  PyObject* function;
  Signature signature;
};

nb::object checked(PyObject* result) {
  if (result == nullptr) throw nb::python_error();
  return nb::steal(result);
}

// Keeps the prepared call of new arguments, which Python passes to it in the call. Later it does
// nothing: the traceback of an error may keep it, and must not keep the group.
struct Learner {
  const Arguments* known;
  bool takes_one_array;

  void learn(nb::handle found) const {
    if (known == nullptr) return;
    known->calls->keep(known->key, known->op, known->algorithm, found);
    if (takes_one_array) {
      known->calls->keep(known->key.without_shape(), known->op, known->algorithm, found);
    }
  }
};

// Ends the learner of a call in its destructor.
class Lesson {
 public:
  Lesson(const Arguments& known, const Signature& f)
      : learner_(nb::cast(Learner{&known, f.takes_one_array})) {}
  ~Lesson() { nb::inst_ptr<Learner>(learner_)->known = nullptr; }
  Lesson(const Lesson&) = delete;
  Lesson& operator=(const Lesson&) = delete;
  PyObject* learner() const { return learner_.ptr(); }

 private:
  nb::object learner_;
};

// Pass a call to Python, with a learner as one more keyword.
nb::object call_and_learn(const Function& f, const Arguments& known, PyObject* const* args,
                          size_t nargsf, PyObject* keywords) {
  static PyObject* const name = PyUnicode_InternFromString("_learn");
  const size_t named = keywords == nullptr ? 0 : static_cast<size_t>(PyTuple_GET_SIZE(keywords));
  const size_t count = static_cast<size_t>(PyVectorcall_NARGS(nargsf)) + named;
  const Lesson lesson(known, f.signature);
  std::vector<PyObject*> given(args, args + count);
  given.push_back(lesson.learner());
  const nb::object names = checked(PyTuple_New(static_cast<Py_ssize_t>(named + 1)));
  for (size_t i = 0; i <= named; ++i) {
    const auto at = static_cast<Py_ssize_t>(i);
    PyTuple_SET_ITEM(names.ptr(), at, Py_NewRef(i < named ? PyTuple_GET_ITEM(keywords, at) : name));
  }
  return checked(PyObject_Vectorcall(f.function, given.data(), count - named, names.ptr()));
}

// Run or queue a collective. No object: Python must run it.
nb::object call_prepared(Arguments& known, const CachedCall& what) {
  if (what.prepared == nullptr) return {};
  known.copy_source();
  if (known.is_async) {
    return known.calls->queue(what, known.arrays);
  }
  return known.calls->run_now(what, known.arrays, known.timeout_s) ? nb::none() : nb::object();
}

// Find the call that a known call on an array of another shape becomes. nullptr: there is none.
const CachedCall* find_resized(const Signature& f, const Arguments& known) {
  if (!f.takes_one_array) return nullptr;
  const CachedCall* like = known.calls->find(known.key.without_shape());
  return like == nullptr ? nullptr
                         : known.calls->find_resized(known.key, *like, known.arrays.output.array);
}

nb::object call_function(const Function& f, PyObject* const* args, size_t nargsf,
                         PyObject* keywords) {
  Arguments known;
  nb::object result;
  if (parse_arguments(f.signature, args, static_cast<size_t>(PyVectorcall_NARGS(nargsf)), keywords,
                      &known)) {
    if (known.message.array != nullptr) {
      result = known.calls->run_message(known.message, known.arrays.output, known.group);
    } else if (const CachedCall* what = known.calls->find(known.key)) {
      result = call_prepared(known, *what);
    } else if (known.calls->accepts()) {
      what = find_resized(f.signature, known);
      if (what == nullptr) return call_and_learn(f, known, args, nargsf, keywords);
      result = call_prepared(known, *what);
    }
  }
  return result.is_valid() ? result
                           : checked(PyObject_Vectorcall(f.function, args, nargsf, keywords));
}

// Called by the interpreter. No C++ exception may pass through the interpreter's frames.
PyObject* call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* keywords) try {
  return call_function(*reinterpret_cast<Function*>(self), args, nargsf, keywords).release().ptr();
} catch (nb::python_error& error) {
  error.restore();
  return nullptr;
} catch (const std::bad_alloc&) {
  return PyErr_NoMemory();
} catch (const std::exception& error) {
  PyErr_SetString(PyExc_RuntimeError, error.what());
  return nullptr;
}

int visit_function(PyObject* self, visitproc visit, void* arg) {
  auto* f = reinterpret_cast<Function*>(self);
  Py_VISIT(f->dict);
  Py_VISIT(f->function);
  Py_VISIT(f->signature.names);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int clear_function(PyObject* self) {
  auto* f = reinterpret_cast<Function*>(self);
  Py_CLEAR(f->dict);
  Py_CLEAR(f->function);
  Py_CLEAR(f->signature.names);
  return 0;
}

void delete_function(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear_function(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// Pickled by name, as functions are.
PyObject* reduce_function(PyObject* self, PyObject*) {
  return PyObject_GetAttrString(self, "__qualname__");
}

// Bind to an object as functions do, for classes that have such a method and for signatures in
// help().
PyObject* bind_function(PyObject* self, PyObject* object, PyObject*) {
  if (object == nullptr || object == Py_None) return Py_NewRef(self);
  return PyMethod_New(self, object);
}

PyObject* represent_function(PyObject* self) {
  return PyObject_Repr(reinterpret_cast<Function*>(self)->function);
}

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
  {Py_tp_descr_get, reinterpret_cast<void*>(&bind_function)},
  {Py_tp_members, members},
  {Py_tp_getset, getset},
  {Py_tp_methods, methods},
  {0, nullptr},
};

PyType_Spec spec{"unisono._engine.Function", sizeof(Function), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};

PyTypeObject* function_type = nullptr;

nb::object make_function(nb::object function, const std::vector<nb::str>& names,
                         const std::string& kinds, size_t positional) {
  if (kinds.size() > kMaxParameters || kinds.size() != names.size()) {
    throw nb::value_error("one kind per parameter, twelve at most");
  }
  if (kinds.find(kGroup) == std::string::npos) throw nb::value_error("one parameter is the group");
  import_numpy();
  nb::object interned = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(names.size())));
  for (size_t i = 0; i < names.size(); ++i) {
    // The interpreter interns names of keywords, so comparing addresses is enough.
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
  f->signature.names = interned.release().ptr();
  f->signature.number = ++made;
  f->signature.count = kinds.size();
  std::memcpy(f->signature.kinds, kinds.data(), kinds.size());
  f->signature.group = kinds.find(kGroup);
  f->signature.positional = positional;
  f->signature.takes_one_array =
    kinds[0] == kWrites && kinds.find_first_of("rwRW", 1) == std::string::npos;
  PyObject_GC_Track(f);
  return nb::steal(reinterpret_cast<PyObject*>(f));
}

void set_world(nb::object world, nb::object stream, nb::object group_type, nb::object work_type) {
  global.world = world.release().ptr();
  global.stream = stream.release().ptr();
  global.calls_offset = offset_of_slot(group_type, "calls");
  global.group_type = group_type.release().ptr();
  delete global.works;
  global.works = new SlottedType<4>(std::move(work_type), {"_end", "_op", "_group", "_output"});
}

// (status code, peer)
std::pair<int, int> run(Calls& calls, nb::handle_t<Prepared> prepared, nb::handle input,
                        nb::handle output, double timeout_s, uint64_t seq) {
  const Arrays arrays{argument_of(input), argument_of(output)};
  const Status status =
    calls.run(*nb::inst_ptr<Prepared>(prepared), arrays, nanoseconds(timeout_s), seq);
  if (status.code == Code::interrupted) throw nb::python_error();
  return {static_cast<int>(status.code), status.peer};
}

void set_default(nb::object group) {
  PyObject* old = global.default_group;
  global.default_group = group.is_none() ? nullptr : group.release().ptr();
  Py_XDECREF(old);
}

}  // namespace

}  // namespace unisono

void bind_calls(nb::module_& m) {
  unisono::global.default_attribute = PyUnicode_InternFromString("default");
  unisono::function_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&unisono::spec));
  if (unisono::function_type == nullptr) throw nb::python_error();

  // A script may end without destroying its groups, and its threads may then hold objects.
  nb::set_leak_warnings(false);

  using unisono::Calls;
  using unisono::Prepared;
  nb::class_<Prepared>(m, "Prepared")
    .def(nb::init<nb::handle_t<unisono::Runner>, nb::handle_t<unisono::OwnedProgram>, int64_t, int,
                  int, uint64_t, uint64_t, uint32_t, int64_t, int, bool, double>(),
         nb::arg("runner"), nb::arg("program"), nb::arg("itemsize"), nb::arg("dtype"),
         nb::arg("op"), nb::arg("fingerprint"), nb::arg("even"), nb::arg("kind") = 0,
         nb::arg("count") = 0, nb::arg("members") = 1, nb::arg("copies") = false,
         nb::arg("factor") = 1.0,
         "A call without its memory; fingerprint 0: the ranks have agreed.");

  nb::class_<Calls> calls(m, "Calls", nb::type_slots(unisono::Collected<Calls>::slots));
  unisono::global.calls_type = reinterpret_cast<PyTypeObject*>(calls.ptr());
  calls.def(nb::init<nb::object, nb::object>(), nb::arg("queue"), nb::arg("continues"))
    .def("close", &Calls::close, "Pass every call to Python from now on.")
    .def_prop_rw("caller", &Calls::caller, &Calls::set_caller,
                 "The thread that is in a collective call, or 0.")
    .def("set_timeout", &Calls::set_timeout, nb::arg("timeout_s"))
    .def("set_recorder", &Calls::set_recorder, nb::arg("recorder"), "Record calls from now on.")
    .def("open_queue", &Calls::open_queue, nb::arg("engine"), nb::arg("type"), nb::arg("calls"),
         nb::arg("discards"), nb::arg("is_locked"), "Queue asynchronous calls from now on.")
    .def("wait_well", &Calls::wait_well, nb::arg("call"),
         "Wait for a queued call; False: it has failed, or Python must wait.")
    .def("set_resized", &Calls::set_resized, nb::arg("resized"),
         "Have `resized(call, shape)` make the prepared calls of new shapes.")
    .def("set_messenger", &Calls::set_messenger, nb::arg("messenger").none(), nb::arg("failed"),
         nb::arg("receives"), nb::arg("sent"), "Send and receive plain messages through a Port.")
    .def("run", &unisono::run, nb::arg("prepared"), nb::arg("input").none(),
         nb::arg("output").none(), nb::arg("timeout_s"), nb::arg("seq"),
         "Run a call on this thread, which has the turn; return (code, peer).")
    .def("last", &Calls::last, "Return (seq, call) of the last call without Python, or None.");

  nb::class_<unisono::Learner>(m, "Learner")
    .def("__call__", &unisono::Learner::learn, nb::arg("found").none(),
         "Keep what `Engine.prepare` has returned for the call.");

  m.def("make_function", &unisono::make_function, nb::arg("function"), nb::arg("names"),
        nb::arg("kinds"), nb::arg("positional"),
        "Return a callable that passes only some calls to `function`.");
  m.def("set_world", &unisono::set_world, nb::arg("world"), nb::arg("stream"),
        nb::arg("group_type"), nb::arg("work_type"));
  m.def("set_default", &unisono::set_default, nb::arg("group").none());
  m.def("array_of", &unisono::array_of, nb::arg("tensor"),
        "Return an array over a plain torch tensor, or None.");
  m.def(
    "track",
    [](nb::handle call) {
      if (PyObject_GC_IsTracked(call.ptr()) == 0) PyObject_GC_Track(call.ptr());
    },
    nb::arg("call"), "Have the garbage collector visit a queued call that C++ made.");
  m.def(
    "mark_worker", [] { unisono::is_worker = true; },
    "Mark the calling thread as one of unisono's own.");
  m.def("suspend_calls", [] { ++unisono::suspended; }, "Pass every call to Python.");
  m.def("resume_calls", [] { --unisono::suspended; }, "Undo one suspend_calls().");
}
