// A call with everything that is needed to run it. It runs at once, or in a group's queue: Python
// keeps a queued flight alive until it is over.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/calls.hpp"
#include "bindings/memory.hpp"
#include "core/clock.hpp"
#include "core/queue.hpp"

namespace unisono {

class Flight {
 public:
  Flight() = default;  // a call that Python runs when it has the turn

  // Make a call on Python's arguments: an array, a list of arrays, or None. `calls`: where to note
  // the call for repetition; nullptr: do not note it.
  Flight(Recipe recipe, nanobind::handle input, nanobind::handle output, int64_t timeout_ns,
         Calls* calls)
      : recipe_(std::move(recipe)),
        input_(std::in_place, input),
        output_(std::in_place, output),
        calls_(calls) {
    prepare(input_->span(), output_->span(), timeout_ns);
  }

  // Make a repetition of a call on new arrays.
  Flight(Recipe recipe, Arrays&& arrays, int64_t timeout_ns)
      : recipe_(std::move(recipe)), arrays_(std::move(arrays)) {
    for (const Argument* each : {&arrays_.input, &arrays_.output}) {
      if (each->array != nullptr) owners_.push_back(nanobind::borrow(each->array));
    }
    prepare(arrays_.input.span, arrays_.output.span, timeout_ns);
  }

  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;

  // Run the call without the interpreter lock. The caller then has its memory back.
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

  // Note the call, so that the same arguments repeat it.
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
  // The owners of the memory: Python's arguments, or the arrays of a repeated call.
  std::optional<Memory> input_, output_;
  Arrays arrays_;
  std::vector<nanobind::object> owners_;
  std::vector<char> scratch_;
  Calls* calls_ = nullptr;
};

}  // namespace unisono
