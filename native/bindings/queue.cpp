// A group's queue for Python. Its tasks run without the interpreter lock.
#include "core/queue.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <tuple>
#include <utility>

#include "bindings/bindings.hpp"
#include "bindings/prepared.hpp"
#include "bindings/waits.hpp"
#include "core/clock.hpp"

namespace nb = nanobind;

namespace unisono {

namespace {

// (reason, number of the task, status code, peer)
std::tuple<int, uint64_t, int, int> serve(CallQueue& queue) {
  CallQueue::Served served;
  {
    InterpreterUnlock unlocked;
    const Serving serving;
    served = queue.serve();
  }
  return {static_cast<int>(served.reason), served.seq, static_cast<int>(served.status.code),
          served.status.peer};
}

// False: the time-out came first. A signal handler that raises ends the wait, and the task
// continues.
bool wait(CallQueue& queue, uint64_t seq, double timeout_s) {
  const int64_t deadline_ns = now_ns() + nanoseconds(timeout_s);
  while (!queue.is_over(seq)) {
    const int64_t left_ns = deadline_ns - now_ns();
    if (left_ns <= 0) return false;
    {
      InterpreterUnlock unlocked;
      queue.wait(seq, left_ns < kSliceNs ? left_ns : kSliceNs);
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
  return true;
}

bool wait_until_still(CallQueue& queue, double timeout_s) {
  InterpreterUnlock unlocked;
  return queue.wait_until_still(nanoseconds(timeout_s));
}

}  // namespace

}  // namespace unisono

void bind_queue(nb::module_& m) {
  using unisono::CallQueue;
  using unisono::QueuedCall;
  nb::class_<QueuedCall>(m, "QueuedCall")
    .def(nb::init<>(), "A call that Python runs when it has the turn.")
    .def(nb::init<nb::handle_t<unisono::Prepared>, nb::object, nb::object, double, nb::object>(),
         nb::arg("prepared"), nb::arg("input").none(), nb::arg("output").none(),
         nb::arg("timeout_s"), nb::arg("recorder").none(), "A prepared call with its memory.")
    .def_prop_ro(
      "record", [](const QueuedCall& call) { return call.task.record; },
      "The number of its record; 0: Python records it.")
    .def_prop_ro(
      "memory",
      [](const QueuedCall& call) -> nb::typed<nb::tuple, nb::object, nb::object> {
        return nb::make_tuple(call.input(), call.output());
      },
      "Input and output.")
    .def("write_back", &QueuedCall::write_back, "Copy results from the copies of C++.")
    .def_ro("result", &QueuedCall::result, "The output of a call that C++ has queued.")
    .def_prop_ro(
      "timeout_s", [](const QueuedCall& call) { return call.timeout_s; }, "The whole time-out.")
    .def_prop_ro(
      "left_s",
      [](const QueuedCall& call) {
        return static_cast<double>(call.task.deadline_ns - unisono::now_ns()) * 1e-9;
      },
      "Seconds until its deadline, which may be negative.")
    .def_prop_ro(
      "seq", [](const QueuedCall& call) { return call.task.seq; },
      "Its number; 0 before it is queued.")
    .def_prop_ro(
      "is_handed", [](const QueuedCall& call) { return call.task.handed; },
      "Once it is over: whether serve() reports its end.");

  nb::class_<CallQueue> queue(m, "CallQueue");
  queue.attr("CLOSED") = static_cast<int>(CallQueue::kClosed);
  queue.attr("IDLE") = static_cast<int>(CallQueue::kIdle);
  queue.attr("FOREIGN") = static_cast<int>(CallQueue::kForeign);
  queue.attr("FAILED") = static_cast<int>(CallQueue::kFailed);
  queue.attr("ENDED") = static_cast<int>(CallQueue::kEnded);
  queue.def(nb::init<>())
    .def("take", nb::overload_cast<>(&CallQueue::take),
         "Take the turn and return the next number; 0 if it is not free.")
    .def("give", &CallQueue::give, "Give the turn back.")
    .def("is_free", &CallQueue::is_free)
    .def("is_mine", &CallQueue::is_mine, "Whether the calling thread has the turn.")
    .def("runs", &CallQueue::runs, "Whether a call runs.")
    .def(
      "push", [](CallQueue& queue, QueuedCall& call) { return call.push(queue); }, nb::arg("call"),
      "Queue a call, to be kept until its end; return its number, or 0.")
    .def("serve", &unisono::serve, "Run queued calls; return (reason, number, code, peer).")
    .def("finish", &CallQueue::finish, nb::arg("seq"), "End the call with which serve() returned.")
    .def("is_over", &CallQueue::is_over, nb::arg("seq"))
    .def(
      "watch", [](CallQueue& queue, QueuedCall& call) { return queue.watch(&call.task); },
      nb::arg("call"), "Have serve() report its end; False: it has ended well already.")
    .def("wait", &unisono::wait, nb::arg("seq"), nb::arg("timeout_s"),
         "Wait until a call is over; return whether it is.")
    .def("wait_until_still", &unisono::wait_until_still, nb::arg("timeout_s"),
         "Wait until no call runs.")
    .def("close", &CallQueue::close,
         "Drop the calls that have not begun; return the first number, or 0.")
    .def_prop_ro("last", &CallQueue::last, "Number of the last call, queued or not.")
    .def_prop_ro("begun", &CallQueue::begun, "Number of the last queued call that began.");
}
