#include "bindings/prepared.hpp"

#include "bindings/waits.hpp"

namespace nb = nanobind;

namespace unisono {

nb::object Argument::owner() const {
  if (listed.empty()) return array == nullptr ? nb::none() : nb::borrow(array);
  nb::list arrays;
  for (const nb::object& each : listed) arrays.append(each);
  return arrays;
}

QueuedCall::QueuedCall(nb::handle_t<Prepared> prepared, nb::object input, nb::object output,
                       double timeout_s)
    : prepared_(nb::borrow(prepared)),
      input_(std::move(input)),
      output_(std::move(output)),
      arrays_{argument_of(input_), argument_of(output_)} {
  const Prepared& what = *nb::inst_ptr<Prepared>(prepared);
  scratch_.resize(what.scratch_bytes());
  job = what.job(arrays_, scratch_.data());
  job.deadline_ns = now_ns() + nanoseconds(timeout_s);
}

}  // namespace unisono
