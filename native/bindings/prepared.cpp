#include "bindings/prepared.hpp"

#include "bindings/sites.hpp"
#include "bindings/waits.hpp"

#include <new>

namespace nb = nanobind;

namespace unisono {

QueuedCall::QueuedCall(nb::handle_t<Prepared> prepared, nb::object input, nb::object output,
                       double time_s, nb::object recorder)
    : timeout_s(time_s),
      prepared_(nb::borrow(prepared)),
      input_(std::move(input)),
      output_(std::move(output)),
      recorder_(std::move(recorder)),
      arrays_{argument_of(input_), argument_of(output_)} {
  const Prepared& what = *nb::inst_ptr<Prepared>(prepared);
  scratch_.resize(what.scratch_bytes());
  task = what.task(arrays_, scratch_.data());
  words_ = task.words;
  task.can_move = what.can_move() && arrays_.input.nbytes + arrays_.output.nbytes <= kHoldBytes;
  task.deadline_ns = now_ns() + nanoseconds(time_s);
  if (recorder_.is_valid() && !recorder_.is_none()) {
    task.recorder = nb::inst_ptr<Recorder>(recorder_);
  }
}

void QueuedCall::take_copies(Arrays* arrays) {
  arrays_.input.scale = arrays->input.scale;
  arrays_.output.scale = arrays->output.scale;
  arrays_.input.copies.swap(arrays->input.copies);
  arrays_.output.copies.swap(arrays->output.copies);
  if (!arrays_.input.copies.empty() || !arrays_.output.copies.empty()) task.copies = this;
}

void QueuedCall::fill() const {
  arrays_.input.fill(task.runner);
  arrays_.output.fill(task.runner);
}

void QueuedCall::write_back() const {
  if (prepared_.is_valid() && !nb::inst_ptr<Prepared>(prepared_)->keeps_output()) {
    arrays_.output.write_back(task.runner);
  }
}

uint64_t QueuedCall::push(CallQueue& queue) {
  // Before the push, because the server may begin the task at once. To find the caller may collect
  // garbage, and so run code that makes calls or closes the group.
  uint64_t seq = queue.last() + 1;
  for (begin(seq); queue.last() + 1 != seq; begin(seq)) {
    drop_record();
    seq = queue.last() + 1;
  }
  try {
    if (queue.push(&task) != 0) return seq;
  } catch (const std::bad_alloc&) {
    drop_record();
    throw;
  }
  drop_record();
  return 0;
}

// Otherwise the call would be shown as one that has not ended.
void QueuedCall::drop_record() {
  if (task.record != 0) task.recorder->end(task.record, Recorder::kDropped, {});
}

void QueuedCall::begin(uint64_t seq) {
  task.words = words_.of_call(seq);
  if (task.recorder == nullptr) return;
  Recorded recorded = nb::inst_ptr<Prepared>(prepared_)->recorded();
  recorded.peer = Recorder::kNoWait;
  task.record = task.recorder->begin(recorded, seq, caller_site());
}

}  // namespace unisono
