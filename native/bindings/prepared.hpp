// A prepared call, and a prepared call with its memory in a group's queue.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "bindings/arrays.hpp"
#include "bindings/owned_program.hpp"
#include "core/clock.hpp"
#include "core/program.hpp"
#include "core/queue.hpp"

namespace unisono {

// A call without its memory. Python works it out once for each kind of call.
class Prepared {
 public:
  // `dtype`, `op`: codes. `fingerprint`, `even`: see Runner::run(). `kind`, `count`: see Record.
  // `members`: ranks that contribute to this rank's result; 0: its OUTPUT is no result. `copies`:
  // the program writes into it nevertheless, so it must be a copy. `factor`: of PREMUL_SUM.
  Prepared(nanobind::handle_t<Runner> runner, nanobind::handle_t<OwnedProgram> program,
           int64_t itemsize, int dtype, int op, uint64_t fingerprint, uint64_t even, uint32_t kind,
           int64_t count, int members, bool copies, double factor)
      : runner_ref_(nanobind::borrow(runner)),
        program_ref_(nanobind::borrow(program)),
        runner_(nanobind::inst_ptr<Runner>(runner)),
        program_(nanobind::inst_ptr<OwnedProgram>(program)),
        itemsize_(itemsize),
        reduce_(reduce_fns(static_cast<DType>(dtype), static_cast<RedOp>(op))),
        divide_(op == static_cast<int>(RedOp::avg) && members > 1
                  ? divide_fn(static_cast<DType>(dtype))
                  : nullptr),
        members_(members),
        copies_(copies),
        scale_{
          op == static_cast<int>(RedOp::premul_sum) ? scale_fn(static_cast<DType>(dtype)) : nullptr,
          factor},
        words_{fingerprint, even},
        recorded_{kind, fingerprint, count},
        can_move_(fingerprint != 0 && runner_->can_postpone(program_->view())) {}

  const nanobind::object& runner() const { return runner_ref_; }
  bool is_aborted() const { return runner_->is_aborted(); }
  // See Runner::can_postpone().
  bool can_move() const { return can_move_; }
  const Recorded& recorded() const { return recorded_; }
  bool keeps_output() const { return members_ == 0; }
  // Have copies stand for arrays that the call must not use in place. False: Python must.
  bool make_copies(Arrays* arrays) const {
    if (scale_.function != nullptr) {
      const bool has_input = arrays->input.data != nullptr || !arrays->input.parts.empty();
      Argument& scaled = has_input ? arrays->input : arrays->output;
      if (!scaled.make_private()) return false;
      scaled.scale = scale_;
    }
    return !copies_ || arrays->output.make_private();
  }
  size_t scratch_bytes() const { return static_cast<size_t>(program_->scratch_count * itemsize_); }
  // Return the task of a call on these arrays. `scratch` has scratch_bytes() bytes.
  Task task(const Arrays& arrays, char* scratch) const {
    const Argument &input = arrays.input, &output = arrays.output;
    Task task{runner_,
              program_->view(),
              {input.data, input.nbytes / itemsize_, output.data, output.nbytes / itemsize_,
               output.is_readonly, scratch, program_->scratch_count, itemsize_, list_of(input),
               list_of(output)},
              reduce_,
              words_};
    task.divide = divide_;
    task.divisor = members_;
    task.program.is_checked = checked_input_ == task.buffers.input_count &&
                              checked_output_ == task.buffers.output_count && !output.is_readonly;
    return task;
  }
  // A run has found that the program fits these buffers; see Program::is_checked. To check it again
  // in each call costs a twentieth of a small call.
  void remember_checked(const Buffers& buffers) const {
    if (buffers.output_is_readonly) return;
    checked_input_ = buffers.input_count;
    checked_output_ = buffers.output_count;
  }

 private:
  ArrayList list_of(const Argument& argument) const {
    if (argument.parts.empty()) return {};
    const auto count = static_cast<int64_t>(argument.parts.size());
    return {argument.parts.data(), argument.nbytes / itemsize_ / count};
  }

  nanobind::object runner_ref_, program_ref_;
  Runner* runner_;
  const OwnedProgram* program_;
  int64_t itemsize_;
  ReduceFns reduce_;
  DivideFn divide_;
  int members_;
  bool copies_;
  Scale scale_;
  AgreementWords words_;
  Recorded recorded_;
  bool can_move_;
  // Elements; -1: no run has checked the program. Guarded by the interpreter lock.
  mutable int64_t checked_input_ = -1, checked_output_ = -1;
};

// A call in a group's queue. Python keeps the object until the call is over.
class QueuedCall final : public TaskCopies {
 public:
  QueuedCall() = default;  // a call that Python runs when it has the turn

  QueuedCall(nanobind::handle_t<Prepared> prepared, nanobind::object input, nanobind::object output,
             double time_s, nanobind::object recorder);
  // Have the copies of `arrays` stand for the caller's arrays.
  void take_copies(Arrays* arrays);
  void fill() const override;
  void write_back() const override;
  // Begin the record and queue the task. Returns its number; 0: the queue is closed.
  uint64_t push(CallQueue& queue);
  // The caller waits from now on.
  void note_wait() const {
    if (task.record != 0) task.recorder->note_wait(task.record);
  }
  QueuedCall(const QueuedCall&) = delete;
  QueuedCall& operator=(const QueuedCall&) = delete;

  const nanobind::object& input() const { return input_; }
  const nanobind::object& output() const { return output_; }

  Task task;
  double timeout_s = 0;
  nanobind::object result;  // of a call that C++ has queued: its output as the caller gave it

 private:
  void begin(uint64_t seq);
  void drop_record();

  AgreementWords words_{};  // without the number of the call
  nanobind::object prepared_, input_, output_;
  nanobind::object recorder_;
  Arrays arrays_;
  std::vector<char> scratch_;
};

}  // namespace unisono
