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

Job Prepared::job(const Arrays& arrays, char* scratch) const {
  const Argument &input = arrays.input, &output = arrays.output;
  const auto list_of = [this](const Argument& argument) -> ArrayList {
    const auto count = static_cast<int64_t>(argument.parts.size());
    if (count == 0) return {};
    return {argument.parts.data(), argument.nbytes / itemsize_ / count};
  };
  return {nb::inst_ptr<Runner>(runner_),
          program().view(),
          {input.data, input.nbytes / itemsize_, output.data, output.nbytes / itemsize_,
           output.is_readonly, scratch, program().scratch_count, itemsize_, list_of(input),
           list_of(output)},
          reduce_,
          words_};
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
