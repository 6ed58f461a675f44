#include "bindings/sites.hpp"

#include <Python.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "bindings/bindings.hpp"
#include "core/clock.hpp"

// A frame object costs some 50 ns, a tenth of a small call. So the frame of the interpreter is read
// directly: with unstable functions of the API from 3.12 on. 3.11 has its layout in a header only.
#if PY_VERSION_HEX < 0x030c0000
#define Py_BUILD_CORE
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#endif

namespace nb = nanobind;

namespace unisono {

namespace {

// A program that makes code objects without end must not fill the memory: its later calls get no
// site.
constexpr size_t kMostCodes = 4096;

struct Known {
  PyObject* code = nullptr;
  uint32_t number = 0;
  bool is_own = false;  // belongs to this library
};

// The code objects that made calls. Guarded by the interpreter lock. Never freed: records refer to
// them until the process ends.
struct Codes {
  std::vector<std::string> own_folders;
  std::array<Known, 256> recent{};
  std::unordered_map<PyObject*, Known> all;
  std::vector<PyObject*> by_number{nullptr};
};
Codes& codes() {
  static auto* const made = new Codes;
  return *made;
}

bool is_own(const Codes& codes, PyObject* code) {
  const char* const file = PyUnicode_AsUTF8(reinterpret_cast<PyCodeObject*>(code)->co_filename);
  if (file == nullptr) PyErr_Clear();
  const std::string name = file == nullptr ? "" : file;
  return std::any_of(codes.own_folders.begin(), codes.own_folders.end(),
                     [&](const std::string& folder) { return name.rfind(folder, 0) == 0; });
}

Known add_code(Codes& codes, PyObject* code) {
  if (const auto found = codes.all.find(code); found != codes.all.end()) return found->second;
  Known known{code};
  if (codes.by_number.size() >= kMostCodes) return {};
  known.is_own = is_own(codes, code);
  known.number = static_cast<uint32_t>(codes.by_number.size());
  codes.by_number.push_back(Py_NewRef(code));
  codes.all.emplace(code, known);
  return known;
}

// Code objects that are known already may lie in the folder, too.
void add_own_folder(std::string folder) {
  Codes& all = codes();
  all.own_folders.push_back(std::move(folder));
  all.recent = {};
  for (auto& [code, known] : all.all) known.is_own = is_own(all, code);
}

Known find_code(PyObject* code) {
  Known& place = codes().recent[reinterpret_cast<uintptr_t>(code) / 64 % 256];
  if (place.code == code) return place;
  try {
    place = add_code(codes(), code);
  } catch (const std::bad_alloc&) {
    // The call under way matters more than its site: an exception would end it on this rank alone.
    return {};
  }
  return place;
}

// Walk to the first frame outside this library.
Site find_outside() {
  Site site;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame != nullptr) {
    PyCodeObject* const code = PyFrame_GetCode(frame);
    const Known known = find_code(reinterpret_cast<PyObject*>(code));
    Py_DECREF(code);
    if (!known.is_own) site = {known.number, PyFrame_GetLasti(frame)};
    PyFrameObject* const back = known.is_own ? PyFrame_GetBack(frame) : nullptr;
    Py_DECREF(frame);
    frame = back;
  }
  return site;
}

}  // namespace

Site caller_site() {
  PyThreadState* const thread = PyThreadState_Get();
#if PY_VERSION_HEX < 0x030c0000
  const _PyInterpreterFrame* const frame = thread->cframe->current_frame;
  if (frame == nullptr) return {};
  const Known known = find_code(reinterpret_cast<PyObject*>(frame->f_code));
  const int offset = _PyInterpreterFrame_LASTI(frame) * static_cast<int>(sizeof(_Py_CODEUNIT));
#else
#if PY_VERSION_HEX < 0x030d0000
  _PyInterpreterFrame* const frame = thread->cframe->current_frame;
#else
  _PyInterpreterFrame* const frame = thread->current_frame;
#endif
  if (frame == nullptr) return {};
  PyObject* const code = PyUnstable_InterpreterFrame_GetCode(frame);
  const Known known = find_code(code);
  Py_DECREF(code);
  const int offset = PyUnstable_InterpreterFrame_GetLasti(frame);
#endif
  return known.is_own ? find_outside() : Site{known.number, offset};
}

}  // namespace unisono

namespace {

using unisono::Recorder;

uint64_t begin(Recorder& recorder, uint32_t kind, uint64_t seq, uint64_t word, int64_t count,
               int peer) {
  return recorder.begin({kind, word, count, peer}, seq, unisono::caller_site());
}

void end(Recorder& recorder, uint64_t number, uint32_t outcome) {
  recorder.end(number, outcome, recorder.waits);
}

nb::bytes snapshot(const Recorder& recorder) {
  std::vector<unisono::Record> records(Recorder::kRecords);
  recorder.copy(records.data());
  return nb::bytes(records.data(), records.size() * sizeof(unisono::Record));
}

nb::bytes totals(const Recorder& recorder) {
  return nb::bytes(recorder.totals(), Recorder::kKinds * sizeof(unisono::Total));
}

nb::typed<nb::list, nb::int_> waited(const Recorder& recorder) {
  nb::typed<nb::list, nb::int_> ticks;
  // If the server ends the wait meanwhile, this reading counts it twice.
  const int open = recorder.waits.waiting_for;
  const uint64_t from = recorder.waits.from, now = unisono::ticks();
  for (size_t rank = 0; rank < recorder.message_waits().size(); ++rank) {
    const bool waits = open >= 0 && static_cast<size_t>(open) == rank && from < now;
    ticks.append(recorder.waits.by_rank[rank] + recorder.message_waits()[rank] +
                 (waits ? now - from : 0));
  }
  return ticks;
}

nb::object code_of(uint32_t number) {
  const auto& all = unisono::codes().by_number;
  if (number == 0 || number >= all.size()) return nb::none();
  return nb::borrow(all[number]);
}

}  // namespace

void bind_recorder(nb::module_& m) {
  nb::class_<Recorder>(m, "Recorder")
    .def(nb::init<int>(), nb::arg("ranks"))
    .def("begin", &begin, nb::arg("kind"), nb::arg("seq"), nb::arg("word"), nb::arg("count"),
         nb::arg("peer"), "Begin a record of a call of the calling thread; return its number.")
    .def("start", &Recorder::start, nb::arg("number"))
    .def("note_wait", &Recorder::note_wait, nb::arg("number"))
    .def("end", &end, nb::arg("number"), nb::arg("outcome"))
    .def("end_message", &Recorder::end_message, nb::arg("number"), nb::arg("outcome"),
         nb::arg("peer"))
    .def("count_message", &Recorder::count_message, "Return the number for the next message.")
    .def(
      "begin_wait", [](Recorder& recorder, int rank) { recorder.waits.begin(rank); },
      nb::arg("rank"), "Begin a wait of the collective that runs.")
    .def(
      "end_wait", [](Recorder& recorder) { recorder.waits.end(); },
      "End the wait, if one was begun.")
    .def("snapshot", &snapshot, "Return the bytes of the ring.")
    .def("totals", &totals, "Return the bytes of the totals by kind.")
    .def("waited", &waited, "Return the ticks that this rank has waited for each rank, up to now.")
    .def_prop_ro(
      "waiting_for", [](const Recorder& recorder) { return recorder.waits.waiting_for; },
      "The rank for which the running collective waits; -1: none.")
    .def_prop_ro("last", &Recorder::last, "Number of the last record.");
  m.def(
    "ticks", [] { return unisono::at_one_moment(unisono::ticks, unisono::now_ns); },
    "Return the time in ticks and on the monotonic clock.");
  m.def("code_of", &code_of, nb::arg("number"), "Return the code object of a site, or None.");
  m.def("add_own_folder", &unisono::add_own_folder, nb::arg("folder"),
        "Skip the frames of a library when the site of a call is found.");
}
