#include "bindings/receive.hpp"

#include <algorithm>
#include <utility>

#include "bindings/bindings.hpp"
#include "bindings/collected.hpp"
#include "bindings/outcomes.hpp"
#include "bindings/waits.hpp"
#include "core/clock.hpp"

namespace nb = nanobind;

namespace unisono {

// No code of Python runs before the entry, so no signal handler can come in between.
void Receive::begin(Outcome outcome, nb::handle self) {
  number = outcome.number;
  if (number == 0) {
    end(std::move(outcome));
    // The Message ends the record; the caller may never ask for it.
    if (outcome_.is_valid()) message(self);
    return;
  }
  const nb::int_ key(number);
  PyObject* const found = PyDict_SetDefault(open_.ptr(), key.ptr(), self.ptr());
  if (found == nullptr) {
    // No memory. Without the entry, the array could be freed while C++ writes to it.
    unlocked([&] { return messages_->cancel(number); });
    throw nb::python_error();
  }
  if (found == self.ptr()) return;
  // The server has put the end there first.
  outcome_ = nb::borrow(found);
  is_over_ = true;
  PyDict_DelItem(open_.ptr(), key.ptr());
  message(self);
}

void Receive::end(Outcome outcome) {
  if (outcome.code == Code::ok && !made_.is_valid()) {
    source_ = outcome.source;
    records_.end(record, Code::ok, source_);
    record = 0;
  } else {
    outcome_ = nb::cast(to_tuple(std::move(outcome)));
    if (made_.is_valid()) made_.attr("_outcomes").attr("append")(outcome_);
  }
  is_over_ = true;
}

bool Receive::wait_well() {
  if (is_over_ || made_.is_valid()) return has_ended_well();
  if (is_worker || is_server || messages_->is_forked()) return false;
  const int64_t left_ns = std::max<int64_t>(deadline_ns - now_ns(), 0);
  const std::shared_ptr<Messages> messages = messages_;
  const uint64_t its = number;
  Outcome outcome = unlocked([&] { return messages->wait(its, left_ns); });
  if (outcome.code == Code::interrupted) throw nb::python_error();
  // Another thread waits for it, or is about to end it.
  if (outcome.code == Code::timeout || outcome.code == Code::unknown) return has_ended_well();
  if (const nb::int_ key(its); PyDict_DelItem(open_.ptr(), key.ptr()) != 0) PyErr_Clear();
  end(std::move(outcome));
  return has_ended_well();
}

nb::object Receive::message(nb::handle self) {
  if (made_.is_valid()) return made_;
  nb::object made = makes_(self);
  // Another thread, or a signal handler, may have been here meanwhile.
  if (made_.is_valid()) return made_;
  // Only one of several Messages ends the record.
  made.attr("_record") = std::exchange(record, 0);
  if (!is_over_) return made_ = made;
  if (!outcome_.is_valid()) {
    Outcome ended{number};
    ended.source = source_;
    ended.nbytes = nb::cast<uint64_t>(array.attr("nbytes"));
    ended.tag = nb::cast<int64_t>(tag);
    outcome_ = nb::cast(to_tuple(std::move(ended)));
  }
  made.attr("_outcomes").attr("append")(outcome_);
  made.attr("done")();
  // Last, because other threads take it for ended.
  if (!made_.is_valid()) made_ = made;
  return made_;
}

int Receive::visit(visitproc visit, void* arg) const {
  for (const nb::object* each : {&array, &owner, &peer, &open_, &makes_, &made_, &outcome_}) {
    Py_VISIT(each->ptr());
  }
  return 0;
}

void Receive::clear() {
  // The memory stays: C++ may write to it.
  for (nb::object* each : {&makes_, &made_, &open_}) each->reset();
}

}  // namespace unisono

void bind_receive(nb::module_& m) {
  using unisono::Receive;
  nb::class_<Receive>(m, "Receive", nb::type_slots(unisono::Collected<Receive>::slots))
    .def_ro("array", &Receive::array, "The memory.")
    .def_ro("owner", &Receive::owner, "The caller's argument.")
    .def_ro("peer", &Receive::peer, "Global rank; None for any.")
    .def_ro("tag", &Receive::tag)
    .def_ro("number", &Receive::number, "As of Messages.start_recv.")
    .def_prop_ro("is_forked", &Receive::is_forked, "Whether a parent of this process started it.")
    .def_ro("timeout_s", &Receive::timeout_s, "The whole time-out.")
    .def_prop_ro(
      "left_s",
      [](const Receive& receive) {
        return static_cast<double>(receive.deadline_ns - unisono::now_ns()) * 1e-9;
      },
      "Seconds until its deadline, which may be negative.")
    .def("wait_well", &Receive::wait_well,
         "Wait for the end; False: it has failed, or `pending` must wait.")
    .def("has_ended_well", &Receive::has_ended_well, "False: `pending` knows.")
    .def(
      "pending",
      [](nb::pointer_and_handle<Receive> self, nb::handle) { return self.p->message(self.h); },
      nb::arg("output").none(), "Return its Message.")
    .def(
      "on_end", [](const Receive&, nb::handle) { return false; }, nb::arg("callback"),
      "False: `pending` must have the callback.");
}
