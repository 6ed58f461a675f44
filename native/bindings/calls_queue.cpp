// Asynchronous calls that C++ queues, and how a thread waits for them.
#include "bindings/calls.hpp"
#include "bindings/waits.hpp"

#include <memory>
#include <new>
#include <utility>

namespace nb = nanobind;

namespace unisono {

namespace {

// As many calls and bytes may be over before their memory is given back. Fewer: the caller
// looks for them more often, which costs 1 us. More: memory is kept longer.
constexpr int kKeptCalls = 32;
constexpr int64_t kKeptBytes = 64 * 1024;

// Return an object of a class of Python. No code of Python runs, so no signal handler does.
//
// The garbage collector visits the object only after track(). Otherwise thousands of calls in
// flight make it visit all objects of the program again and again, which takes longer than the
// calls. Until then the object refers to nothing of the caller but arrays.
nb::object made(const nb::object& type) {
  auto* const plain = reinterpret_cast<PyTypeObject*>(type.ptr());
  PyObject* const object = plain->tp_alloc(plain, 0);
  if (object == nullptr) throw nb::python_error();
  PyObject_GC_UnTrack(object);
  return nb::steal(object);
}

// Set an attribute. A name that is made once saves a twentieth of an asynchronous call.
void set(const nb::object& object, PyObject* name, nb::handle value) {
  if (PyObject_SetAttr(object.ptr(), name, value.ptr()) != 0) throw nb::python_error();
}

}  // namespace

void Calls::open_queue(nb::object engine, nb::object type, nb::object calls, nb::object discards,
                       nb::object is_locked) {
  engine_ = std::move(engine);
  queued_type_ = std::move(type);
  queued_ = std::move(calls);
  discards_ = std::move(discards);
  is_locked_ = std::move(is_locked);
}

// A deque keeps the call: otherwise its memory could be freed while C++ uses it.
nb::object Calls::queue(const CachedCall& what, const Arrays& arrays) {
  // A queued call uses its arrays in place.
  const bool copies = !arrays.input.copies.empty() || !arrays.output.copies.empty();
  if (!queued_.is_valid() || copies || what.prepared->copies_output()) return nb::none();
  const Inside inside(*this, PyThread_get_thread_ident());
  const nb::object queued_calls = queued_;
  nb::object queued, output;
  // A collection of garbage below may make calls, and `what` may then be another entry.
  const nb::object prepared = what.call, name = what.name;
  const nb::object program = what.native;
  try {
    output = arrays.output.owner();
    auto call =
      std::make_unique<QueuedCall>(nb::handle_t<Prepared>(program.ptr()), arrays.input.memory(),
                                   arrays.output.memory(), timeout_s_, recorder_ref_);
    call->result = output;
    QueuedCall& native = *call;
    queued = made(queued_type_);
    static PyObject* const names[] = {
      PyUnicode_InternFromString("native"), PyUnicode_InternFromString("engine"),
      PyUnicode_InternFromString("prepared"), PyUnicode_InternFromString("watcher")};
    set(queued, names[0], nb::cast(call.release(), nb::rv_policy::take_ownership));
    set(queued, names[1], engine_);
    set(queued, names[2], prepared);
    set(queued, names[3], nb::none());
    queued_calls.attr("append")(queued);
    bool is_pushed = false;
    try {
      is_pushed = native.push(*queue_) != 0;
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch)
    }
    if (!is_pushed) {
      queued_calls.attr("remove")(queued);
      return nb::none();
    }
  } catch (const std::bad_alloc&) {
    return nb::none();
  } catch (nb::python_error& error) {
    // No memory. Python makes the call, or refuses it on all ranks.
    if (!error.matches(PyExc_Exception)) throw;
    return nb::none();
  }
  const nb::object arguments = nb::make_tuple(queued, name, nb::none(), output);
  kept_bytes_ += arrays.input.nbytes + arrays.output.nbytes;
  if (++kept_ >= kKeptCalls || kept_bytes_ > kKeptBytes) {
    kept_ = 0;
    kept_bytes_ = 0;
    const nb::object discards = discards_;
    discards();
  }
  return arguments;
}

// Run a call on the thread that waits for it, if it is next and small. No code of Python runs here,
// so a signal handler that raises still finds the call in the queue, where it goes on.
static void run_here(CallQueue& queue, QueuedCall& call) {
  if (!queue.claim(&call.task)) return;
  Unlocker unlocker(nullptr, true);
  // Without the interpreter lock if the run waited: later calls must not wait for that lock.
  queue.settle(&call.task, call.task.run(&unlocker));
}

bool Calls::wait_well(QueuedCall& call) const {
  const uint64_t seq = call.task.seq;
  while (!queue_->is_over(seq)) {
    // Python raises an error if the group has gone or the calling thread would wait for itself.
    if (closed_ || fork_guard_.is_forked() || is_worker || queue_->is_mine() ||
        caller_ == PyThread_get_thread_ident() || !is_locked_.is_valid() ||
        nb::cast<bool>(nb::object(is_locked_)())) {
      return false;
    }
    run_here(*queue_, call);
    if (!queue_->is_over(seq)) {
      nb::gil_scoped_release unlocked;
      queue_->wait(seq, kSliceNs);
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
  return !call.task.handed;
}

}  // namespace unisono
