// A call in a group's queue, with what it works on. Python keeps it until it is over.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "clock.hpp"
#include "memory.hpp"
#include "queue.hpp"

namespace unisono {

struct Flight {
  Flight() = default;  // one that Python runs
  Flight(nanobind::object runner, nanobind::object program, const Known& known, int64_t timeout_ns)
      : runner_(std::move(runner)), program_(std::move(program)) {
    scratch_.resize(static_cast<size_t>(known.program->scratch_count * known.itemsize));
    job.runner = known.runner;
    job.program = known.program->view();
    job.buffers.itemsize = known.itemsize;
    job.reduce = reduce_fn(static_cast<DType>(known.dtype), static_cast<RedOp>(known.op));
    job.words = {known.fingerprint, known.even};
    job.deadline_ns = now_ns() + timeout_ns;
  }
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;

  void work_on(const Span& input, const Span& output, bool output_is_readonly) {
    job.buffers = buffers_of(input, output, job.buffers.itemsize, scratch_);
    job.buffers.output_is_readonly = output_is_readonly;
  }

  Job job;
  // Who keeps the memory: what Python gave, or the arguments of a call that is repeated.
  std::unique_ptr<Memory> memory, result;
  Arrays arrays;
  std::vector<nanobind::object> owners;

 private:
  nanobind::object runner_;
  nanobind::object program_;
  std::vector<char> scratch_;
};

}  // namespace unisono
