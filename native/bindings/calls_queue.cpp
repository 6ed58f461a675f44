// Asynchronous calls that C++ queues, and how a thread waits for them.
#include "bindings/arguments.hpp"
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

}  // namespace

void Calls::open_queue(nb::object engine, nb::object type, nb::object calls, nb::object discards,
                       nb::object is_locked) {
  engine_ = std::move(engine);
  queued_type_ = SlottedType<4>(std::move(type), {"native", "engine", "prepared", "watcher"});
  queued_ = std::move(calls);
  discards_ = std::move(discards);
  is_locked_ = std::move(is_locked);
}

// A deque keeps the call: otherwise its memory could be freed while C++ uses it.
nb::object Calls::queue(const CachedCall& what, Arrays& arrays) {
  if (!queued_.is_valid() || !what.prepared->make_copies(&arrays)) return {};
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
    call->take_copies(&arrays);
    QueuedCall& native = *call;
    queued = queued_type_.make(
      {nb::cast(call.release(), nb::rv_policy::take_ownership), engine_, prepared, nb::none()});
    // The garbage collector visits it only after track(). Otherwise thousands of calls in flight
    // make it visit all objects of the program again and again, which takes longer than the calls.
    // Until then the object refers to nothing of the caller but arrays.
    PyObject_GC_UnTrack(queued.ptr());
    queued_calls.attr("append")(queued);
    bool is_pushed = false;
    try {
      is_pushed = native.push(*queue_) != 0;
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch)
    }
    if (!is_pushed) {
      queued_calls.attr("remove")(queued);
      return {};
    }
  } catch (const std::bad_alloc&) {
    return {};
  } catch (nb::python_error& error) {
    // No memory. Python makes the call, or refuses it on all ranks.
    if (!error.matches(PyExc_Exception)) throw;
    return {};
  }
  const nb::object work = global.works->make({queued, name, nb::none(), output});
  kept_bytes_ += arrays.input.nbytes + arrays.output.nbytes;
  if (++kept_ >= kKeptCalls || kept_bytes_ > kKeptBytes) {
    kept_ = 0;
    kept_bytes_ = 0;
    const nb::object discards = discards_;
    discards();
  }
  return work;
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
  call.note_wait();
  while (!queue_->is_over(seq)) {
    // Python raises an error if the group has gone or the calling thread would wait for itself.
    if (closed_ || fork_guard_.is_forked() || is_worker || queue_->is_mine() ||
        caller_ == PyThread_get_thread_ident() || !is_locked_.is_valid() ||
        nb::cast<bool>(nb::object(is_locked_)())) {
      return false;
    }
    run_here(*queue_, call);
    if (!queue_->is_over(seq)) {
      InterpreterUnlock unlocked;
      queue_->wait(seq, kSliceNs);
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
  return !call.task.handed;
}

}  // namespace unisono
