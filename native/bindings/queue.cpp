// A group's queue for Python. Its jobs run without the interpreter lock.
#include "core/queue.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <new>
#include <tuple>
#include <utility>

#include "bindings/bindings.hpp"
#include "bindings/flight.hpp"
#include "bindings/waits.hpp"
#include "core/clock.hpp"

namespace nb = nanobind;

namespace unisono {

namespace {

void make_flight(Flight* self, nb::handle_t<Runner> runner, nb::handle_t<OwnedProgram> program,
                 nb::handle source, nb::handle target, int64_t itemsize, int dtype, int op,
                 uint64_t fingerprint, uint64_t even, double timeout_s, Calls* calls,
                 nb::object call) {
  const CallSpec spec{nb::cast<Runner*>(runner),
                      nb::cast<const OwnedProgram*>(program),
                      itemsize,
                      dtype,
                      op,
                      fingerprint,
                      even};
  new (self) Flight({spec, nb::borrow(runner), nb::borrow(program), std::move(call)}, source,
                    target, nanoseconds(timeout_s), calls);
}

// (status code, peer)
std::pair<int, int> run(Flight& flight) {
  const Status status = flight.run();
  if (status.code == Code::interrupted) throw nb::python_error();
  return {static_cast<int>(status.code), status.peer};
}

uint64_t push(Turn& turn, Flight& flight) {
  flight.note();
  return turn.push(&flight.job);
}

// (reason, number of the job, status code, peer)
std::tuple<int, uint64_t, int, int> serve(Turn& turn) {
  Turn::Served served;
  {
    nb::gil_scoped_release unlocked;
    const Serving serving;
    served = turn.serve();
  }
  return {static_cast<int>(served.reason), served.seq, static_cast<int>(served.status.code),
          served.status.peer};
}

// False: the time-out came first. A signal handler that raises ends the wait, and the job
// continues.
bool wait(Turn& turn, uint64_t seq, double timeout_s) {
  const int64_t deadline_ns = now_ns() + nanoseconds(timeout_s);
  while (!turn.is_over(seq)) {
    const int64_t left_ns = deadline_ns - now_ns();
    if (left_ns <= 0) return false;
    {
      nb::gil_scoped_release unlocked;
      turn.wait(seq, left_ns < kSliceNs ? left_ns : kSliceNs);
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
  return true;
}

bool wait_until_still(Turn& turn, double timeout_s) {
  nb::gil_scoped_release unlocked;
  return turn.wait_until_still(nanoseconds(timeout_s));
}

}  // namespace

}  // namespace unisono

void bind_queue(nb::module_& m) {
  using unisono::Flight;
  using unisono::Turn;
  nb::class_<Flight>(m, "Flight")
    .def(nb::init<>(), "A call that Python runs when it has the turn.")
    .def("__init__", &unisono::make_flight, nb::arg("runner"), nb::arg("program"),
         nb::arg("input").none(), nb::arg("output").none(), nb::arg("itemsize"), nb::arg("dtype"),
         nb::arg("op"), nb::arg("fingerprint"), nb::arg("even"), nb::arg("timeout_s"),
         nb::arg("calls").none(), nb::arg("call").none(),
         "A call to run or queue; `calls`, if any, notes it to be repeated.")
    .def("run", &unisono::run, "Run it here, once; return (code, peer).")
    .def_prop_ro(
      "seq", [](const Flight& flight) { return flight.job.seq; },
      "Its number; 0 before it is queued.")
    .def_prop_ro(
      "is_handed", [](const Flight& flight) { return flight.job.handed; },
      "Once it is over: whether serve() reports its end.");

  nb::class_<Turn> turn(m, "Turn");
  turn.attr("CLOSED") = static_cast<int>(Turn::kClosed);
  turn.attr("IDLE") = static_cast<int>(Turn::kIdle);
  turn.attr("FOREIGN") = static_cast<int>(Turn::kForeign);
  turn.attr("FAILED") = static_cast<int>(Turn::kFailed);
  turn.attr("ENDED") = static_cast<int>(Turn::kEnded);
  turn.def(nb::init<>())
    .def("take", &Turn::take, "Take the turn and return the next number; 0 if it is not free.")
    .def("give", &Turn::give, "Give the turn back.")
    .def("is_free", &Turn::is_free)
    .def("runs", &Turn::runs, "Whether a call runs.")
    .def("push", &unisono::push, nb::arg("flight"),
         "Queue a call, to be kept until it is over; return its number.")
    .def("serve", &unisono::serve, "Run queued calls; return (reason, number, code, peer).")
    .def("finish", &Turn::finish, nb::arg("seq"), "End the call with which serve() returned.")
    .def("is_over", &Turn::is_over, nb::arg("seq"))
    .def(
      "watch", [](Turn& turn, Flight& flight) { return turn.watch(&flight.job); },
      nb::arg("flight"), "Have serve() report its end; False: it has ended well already.")
    .def("wait", &unisono::wait, nb::arg("seq"), nb::arg("timeout_s"),
         "Wait until a call is over; return whether it is.")
    .def("wait_until_still", &unisono::wait_until_still, nb::arg("timeout_s"),
         "Wait until no call runs.")
    .def("close", &Turn::close,
         "Drop the calls that have not begun; return the first number, or 0.")
    .def_prop_ro("last", &Turn::last, "Number of the last call, queued or not.")
    .def_prop_ro("begun", &Turn::begun, "Number of the last queued call that began.");
}
