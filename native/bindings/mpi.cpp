// Calls of an MPI library, for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/interpreter_lock.hpp"
#include "mpi/group.hpp"
#include "mpi/own_ops.hpp"

namespace nb = nanobind;

namespace unisono {

namespace {

void make_call(MPICall* call, std::uintptr_t function, const std::vector<std::intptr_t>& arguments,
               int input_at, int output_at, int request_at, const nb::object& /*kept*/) {
  const int count = static_cast<int>(arguments.size());
  if (arguments.size() > MPICall::kArguments || input_at >= count || output_at >= count ||
      request_at >= count) {
    throw nb::value_error("at most ten arguments");
  }
  new (call) MPICall{function, {}, input_at, output_at, request_at};
  std::copy(arguments.begin(), arguments.end(), call->arguments.begin());
}

// (status code, MPI's error)
std::pair<int, int> go_on(MPIGroup& group) {
  InterpreterUnlock unlocked;
  const Status status = group.go_on();
  return {static_cast<int>(status.code), status.peer};
}

std::uintptr_t address_of_op(int dtype, int op) {
  return reinterpret_cast<std::uintptr_t>(
    own_op(static_cast<DType>(dtype), static_cast<RedOp>(op)));
}

}  // namespace

}  // namespace unisono

void bind_mpi(nb::module_& m) {
  using unisono::Doubling;
  using unisono::MPICall;
  using unisono::MPIGroup;
  using unisono::MPIRunner;
  using unisono::SharedAgreement;
  nb::class_<MPICall>(m, "MPICall")
    .def("__init__", &unisono::make_call, nb::arg("function"), nb::arg("arguments"),
         nb::arg("input_at"), nb::arg("output_at"), nb::arg("request_at"), nb::arg("kept").none(),
         nb::keep_alive<1, 7>(), "A function's address and its arguments. Keeps `kept`.")
    .def_rw("ends_together", &MPICall::ends_together,
            "Whether the call ends when it has ended on all ranks.");
  nb::class_<Doubling>(m, "MPIDoubling")
    .def(nb::init<const MPICall&, const MPICall&, const MPICall&, int, int, std::size_t>(),
         nb::arg("send"), nb::arg("receive"), nb::arg("reduce"), nb::arg("rank"), nb::arg("ranks"),
         nb::arg("nbytes"), "An all_reduce of messages.");
  nb::class_<SharedAgreement>(m, "SharedAgreement")
    .def(nb::init<std::shared_ptr<unisono::Segment>, int, const MPICall&>(), nb::arg("segment"),
         nb::arg("rank"), nb::arg("probe"), "The agreement of one group, in shared memory.");
  nb::class_<MPIGroup>(m, "MPIGroup")
    .def(nb::init<std::uintptr_t, const MPICall&, bool, std::optional<SharedAgreement>>(),
         nb::arg("test"), nb::arg("agreement"), nb::arg("crowded"), nb::arg("shared").none())
    .def("go_on", &unisono::go_on,
         "Wait for the call that returned WAITING; return (code, MPI's error).")
    .def("is_moving", &MPIGroup::is_moving, "Whether MPI has the arrays of the call.")
    .def("give_up", &MPIGroup::give_up,
         "Give MPI no array any more; return whether MPI has them already.")
    .def("is_under_way", &MPIGroup::is_under_way,
         "Whether a call has begun and not ended: MPI may have memory of it.")
    .def("has_arrived", &MPIGroup::has_arrived,
         "Whether the data are there, and go_on() ends a call that took long.")
    .def("is_in_mpi", &MPIGroup::is_in_mpi, "Whether the thread for calls is in MPI.")
    .def("finished", &MPIGroup::finished, "Return the number of calls that have ended here.")
    .def("abort", &MPIGroup::abort, "Pass the next calls to Python.")
    .def("close", &MPIGroup::close, "End the thread for calls, if it is not in MPI.");
  nb::class_<MPIRunner, unisono::Runner>(m, "MPIRunner")
    .def(nb::init<std::shared_ptr<MPIGroup>, const MPICall&>(), nb::arg("group"), nb::arg("call"),
         nb::keep_alive<1, 3>(), "Makes one kind of call.")
    .def(nb::init<std::shared_ptr<MPIGroup>, std::shared_ptr<Doubling>>(), nb::arg("group"),
         nb::arg("doubling"), "Makes all_reduces of messages.");
  m.def("mpi_op", &unisono::address_of_op, nb::arg("dtype"), nb::arg("op"),
        "Return a function for MPI_Op_create; 0: the pair has no meaning.");
}
