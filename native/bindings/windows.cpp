// The parts of windows (windows/part.hpp), for Python. Arrays are NumPy's.
#define NO_IMPORT_ARRAY
#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL unisono_numpy
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>
#include <numpy/arrayobject.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/arrays.hpp"
#include "bindings/bindings.hpp"
#include "bindings/sites.hpp"
#include "bindings/waits.hpp"
#include "core/recorder.hpp"
#include "windows/part.hpp"

namespace nb = nanobind;

namespace unisono {

namespace {

PyArrayObject* numpy(nb::handle array) { return reinterpret_cast<PyArrayObject*>(array.ptr()); }
void* memory(nb::handle array) { return PyArray_DATA(numpy(array)); }
size_t count_of(nb::handle array) { return static_cast<size_t>(PyArray_SIZE(numpy(array))); }

// Releases the interpreter lock for long copies.
class Unlocked {
 public:
  explicit Unlocked(nb::handle array) {
    if (PyArray_NBYTES(numpy(array)) > kHoldBytes) unlock_.emplace();
  }

 private:
  std::optional<InterpreterUnlock> unlock_;
};

// A part, and the type that its arrays must have.
struct Part : WindowPart {
  Part(const nb::object& lines, const nb::object& data, int dtype)
      : WindowPart(memory(lines), memory(data), count_of(data),
                   static_cast<size_t>(PyArray_ITEMSIZE(numpy(data))), dtype),
        lines(lines),
        data(data),
        is_plain(dtype >= 0 && dtype != static_cast<int>(DType::bf16)),
        is_int64(dtype == static_cast<int>(DType::i64)) {}

  // Whether the elements of an array can be moved from or to a place as they are.
  bool fits(nb::handle given, int64_t offset, bool writes) const {
    PyArrayObject* const array = numpy(given);
    return PyArray_CheckExact(given.ptr()) && PyArray_IS_C_CONTIGUOUS(array) &&
           PyArray_ISALIGNED(array) && PyArray_ISNOTSWAPPED(array) &&
           PyArray_TYPE(array) == PyArray_TYPE(numpy(data)) &&
           PyArray_ITEMSIZE(array) == PyArray_ITEMSIZE(numpy(data)) &&
           (!writes || PyArray_ISWRITEABLE(array)) && has(offset, count_of(given)) && !is_closed();
  }

  // Run a call at once and record it, unless there is no recorder. It returns false if Python must
  // make the call, which is then not recorded here.
  template <class Function>
  bool record(int kind, int64_t offset, int64_t count, int peer, Function call) {
    if (recorder == nullptr) return call();
    const Recorded words{kinds[static_cast<size_t>(kind)], static_cast<uint64_t>(offset), count,
                         peer};
    const uint64_t number = recorder->begin(words, recorder->count_message(), caller_site());
    const bool done = call();
    recorder->end_message(number, done ? 1 : Recorder::kDropped, peer);
    return done;
  }

  nb::object lines, data;  // kept
  const bool is_plain;     // whether the type of an array tells its dtype
  const bool is_int64;
  Recorder* recorder = nullptr;
  int owner = 0;                // rank in the group
  std::vector<uint32_t> kinds;  // of put, signal, wait_signal, get and fetch_add
};

bool put(Part& part, nb::handle array, int64_t offset) {
  if (!part.fits(array, offset, false)) return false;
  const Unlocked unlocked(array);
  part.put(static_cast<size_t>(offset), memory(array), count_of(array));
  return true;
}

bool get(Part& part, nb::handle array, int64_t offset) {
  if (!part.fits(array, offset, true)) return false;
  const Unlocked unlocked(array);
  part.get(static_cast<size_t>(offset), memory(array), count_of(array));
  return true;
}

// Whether an object is an int of 64 bits, which goes to `number`.
bool is_number(nb::handle object, int64_t* number) {
  int overflow = 0;
  if (!PyLong_CheckExact(object.ptr())) return false;
  *number = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
  return overflow == 0;
}

// Put or get an array.
template <bool (*move)(Part&, nb::handle, int64_t), int kind>
bool move_now(Part& part, nb::handle array, nb::handle place) {
  int64_t offset = 0;
  if (!PyArray_CheckExact(array.ptr()) || !part.is_plain || !is_number(place, &offset)) {
    return false;
  }
  const auto count = static_cast<int64_t>(count_of(array));
  return part.record(kind, offset, count, part.owner, [&] { return move(part, array, offset); });
}

// Of int64 only.
std::optional<int64_t> fetch_add_now(Part& part, nb::handle value, nb::handle place) {
  int64_t offset = 0, added = 0, before = 0;
  const bool is_known = is_number(value, &added) && is_number(place, &offset) && part.is_int64;
  if (!is_known || !part.has(offset, 1) || part.is_closed()) return std::nullopt;
  part.record(4, offset, 1, part.owner, [&] {
    return part.apply(static_cast<size_t>(offset), &added, &before, 1, RedOp::sum);
  });
  return before;
}

bool signal_now(Part& part, int source) {
  if (part.is_closed()) return false;
  return part.record(1, -1, 0, part.owner, [&] {
    part.signal(source);
    return true;
  });
}

void set_recorder(Part& part, Recorder& recorder, int owner, std::vector<uint32_t> kinds) {
  part.recorder = &recorder;
  part.owner = owner;
  part.kinds = std::move(kinds);
}

bool apply(Part& part, nb::handle array, nb::handle old, int64_t offset, int op) {
  if (!part.fits(array, offset, false)) return false;
  if (!old.is_none() && !part.fits(old, offset, true)) return false;
  const Unlocked unlocked(array);
  return part.apply(static_cast<size_t>(offset), memory(array),
                    old.is_none() ? nullptr : memory(old), count_of(array), static_cast<RedOp>(op));
}

bool compare_and_swap(Part& part, nb::handle expected, nb::handle desired, int64_t offset) {
  if (!part.fits(expected, offset, true) || !part.fits(desired, offset, false)) return false;
  part.compare_and_swap(static_cast<size_t>(offset), memory(expected), memory(desired));
  return true;
}

uint64_t wait_signal(Part& part, int from, uint64_t taken, double timeout_s, bool is_crowded) {
  const uint64_t seen = part.signals(from);
  if (seen > taken || timeout_s <= 0) return seen;
  InterpreterUnlock unlocked;
  return part.wait_signal(from, taken, nanoseconds(timeout_s), is_crowded);
}

uint64_t wait_now(Part& part, int from, uint64_t taken, double timeout_s, bool is_crowded) {
  uint64_t seen = 0;
  part.record(2, -1, 0, from, [&] {
    seen = wait_signal(part, from, taken, timeout_s, is_crowded);
    return seen > taken;
  });
  return seen;
}

}  // namespace

}  // namespace unisono

void bind_windows(nb::module_& m) {
  using unisono::Part;
  nb::class_<Part>(m, "WindowPart")
    .def(
      "__init__",
      [](Part* part, const nb::object& lines, const nb::object& data, int dtype) {
        unisono::import_numpy();
        new (part) Part(lines, data, dtype);
      },
      nb::arg("lines"), nb::arg("data"), nb::arg("dtype"))
    .def("put", &unisono::put, nb::arg("array"), nb::arg("offset"),
         "Copy an array in; return False if Python must look at it.")
    .def("put_now", &unisono::move_now<unisono::put, 0>, nb::arg("array"), nb::arg("offset"),
         "As `put`, and record the call.")
    .def("get_now", &unisono::move_now<unisono::get, 3>, nb::arg("array"), nb::arg("offset"),
         "As `get`, and record the call.")
    .def("fetch_add_now", &unisono::fetch_add_now, nb::arg("value"), nb::arg("offset"),
         "Add to an int64 and record it; None: Python must do it.")
    .def("signal_now", &unisono::signal_now, nb::arg("source"),
         "Signal and record the call; False if the part is closed.")
    .def("set_recorder", &unisono::set_recorder, nb::arg("recorder"), nb::arg("owner"),
         nb::arg("kinds"), nb::keep_alive<1, 2>())
    .def("get", &unisono::get, nb::arg("array"), nb::arg("offset"),
         "Copy elements into an array; return False as `put` does.")
    .def("apply", &unisono::apply, nb::arg("array"), nb::arg("old").none(), nb::arg("offset"),
         nb::arg("op"), "Combine elements with an array's, atomically; False as `put`.")
    .def("compare_and_swap", &unisono::compare_and_swap, nb::arg("expected"), nb::arg("desired"),
         nb::arg("offset"), "Set an expected element; `expected` becomes what it was.")
    .def("signal", &Part::signal, nb::arg("source"))
    .def("signals", &Part::signals, nb::arg("source"))
    .def("wait_signal", &unisono::wait_signal, nb::arg("source"), nb::arg("taken"),
         nb::arg("timeout_s"), nb::arg("crowded"),
         "Wait for more signals than `taken`; return their number.")
    .def("wait_now", &unisono::wait_now, nb::arg("source"), nb::arg("taken"), nb::arg("timeout_s"),
         nb::arg("crowded"), "As `wait_signal`, and record the call.")
    .def("close", &Part::close)
    .def("is_closed", &Part::is_closed);
}
