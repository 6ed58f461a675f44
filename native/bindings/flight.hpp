// A call with everything that it needs to run: here and now, or in a group's queue, where Python
// keeps it until it is over.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/calls.hpp"
#include "core/clock.hpp"
#include "bindings/memory.hpp"
#include "core/queue.hpp"

namespace unisono {

class Flight {
 public:
  Flight() = default;  // one that Python runs when its turn has come

  // On what Python gives: an array, a list of arrays, or None. `calls`: where to note the call, so
  // that it can be repeated; nullptr: nowhere.
  Flight(Recipe recipe, nanobind::handle input, nanobind::handle output, int64_t timeout_ns,
         Calls* calls)
      : recipe_(std::move(recipe)),
        input_(std::in_place, input),
        output_(std::in_place, output),
        calls_(calls) {
    prepare(input_->span(), output_->span(), timeout_ns);
  }

  // On the arguments of a call that is repeated.
  Flight(Recipe recipe, Arrays&& arrays, int64_t timeout_ns)
      : recipe_(std::move(recipe)), arrays_(std::move(arrays)) {
    for (const Argument* each : {&arrays_.input, &arrays_.output}) {
      if (each->array != nullptr) owners_.push_back(nanobind::borrow(each->array));
    }
    prepare(arrays_.input.span, arrays_.output.span, timeout_ns);
  }

  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;

  // Run it, unlocked; afterwards the memory is the caller's again.
  Status run() {
    Status status;
    {
      nanobind::gil_scoped_release unlocked;
      status = job.run();
    }
    if (status.is_ok()) note();
    input_.reset();
    output_.reset();
    return status;
  }

  // Have the call repeated when the same arguments come.
  void note() {
    Calls* const calls = std::exchange(calls_, nullptr);
    if (calls != nullptr) calls->note(recipe_, input_->span(), output_->span());
  }

  Job job;

 private:
  void prepare(const Span& input, const Span& output, int64_t timeout_ns) {
    scratch_.resize(scratch_bytes(recipe_.spec));
    job = job_of(recipe_.spec, input, output, scratch_);
    job.deadline_ns = now_ns() + timeout_ns;
  }

  Recipe recipe_;
  // Who keeps the memory: what Python gave, or the arguments of a call that is repeated.
  std::optional<Memory> input_, output_;
  Arrays arrays_;
  std::vector<nanobind::object> owners_;
  std::vector<char> scratch_;
  Calls* calls_ = nullptr;
};

}  // namespace unisono
