// Accumulations of 16-bit floats in float32, with messages.
#include <algorithm>
#include <vector>

#include "steps/steps.hpp"

namespace unisono {

// The step after the last one of the accumulation that step `at` begins.
size_t Steps::end_of_sum(size_t at) const {
  if (!reduce_.is_wide()) return at + 1;
  while (steps_[at].goes_on != 0) ++at;
  return at + 1;
}

// Whether the operands of an accumulation are received piece by piece in turns. Not if a rank sends
// two of them: all pieces of its first message come before those of the second.
bool Steps::takes_turns(size_t first, size_t end) const {
  if (end == first + 1) return true;
  std::vector<int64_t> peers;
  for (size_t i = first; i < end; ++i) {
    if (steps_[i].op != kReduce) peers.push_back(steps_[i].peer);
  }
  std::sort(peers.begin(), peers.end());
  return std::adjacent_find(peers.begin(), peers.end()) == peers.end();
}

// Run the steps of the accumulation that begins at the current step, which becomes its last one.
Status Steps::run_sum() {
  const size_t first = at_, end = end_of_sum(at_), whole = bytes(steps_[at_]);
  const bool in_turns = takes_turns(first, end);
  sum_.resize((in_turns ? std::min(whole, kChunkBytes) : whole) / static_cast<size_t>(itemsize_));
  const size_t outer = in_turns ? whole : kChunkBytes;
  const size_t inner = in_turns ? kChunkBytes : whole;
  for (size_t done = 0; done < outer; done += kChunkBytes) {
    for (at_ = first; at_ < end; ++at_) {
      for (size_t further = 0; further < inner; further += kChunkBytes) {
        float* sum = sum_.data() + further / static_cast<size_t>(itemsize_);
        const Status status = add_operand(at_, done + further, sum);
        if (!status.is_ok()) return status;
      }
    }
  }
  at_ = end - 1;
  return {};
}

// Add a piece of an operand, `done` bytes after its begin, to a sum.
Status Steps::add_operand(size_t at, size_t done, float* sum) {
  const Step& step = steps_[at];
  const size_t nbytes = std::min(kChunkBytes, bytes(step) - done);
  const size_t count = nbytes / static_cast<size_t>(itemsize_);
  char* into = address_of(step.dst_buf, step.dst_off) + done;
  const char* operand = nullptr;
  Receiving receiving{};
  if (step.op == kReduce) {
    operand = address_of(step.src_buf, step.src_off) + done;
  } else {
    post_ahead();
    receiving = receives_.front();
    const Status status = wait(*receiving.op);
    if (!status.is_ok()) return status;
    receives_.pop_front();
    expected_bytes_ -= receiving.nbytes;
    operand = receiving.staging;
  }
  const bool is_last = is_in_sum(at) && step.goes_on == 0;
  const Status status = is_last ? wait_for_sends(into, into + nbytes) : Status{};
  if (status.is_ok()) add_elements(at, sum, into, operand, count);
  if (receiving.op != nullptr) recycle(receiving);
  post_ahead();
  messages_->programs().try_progress();
  return status;
}

// Add the elements of an operand, of which all and those of the result are there.
void Steps::add_elements(size_t at, float* sum, char* into, const char* operand,
                         size_t count) const {
  const auto itemsize = static_cast<size_t>(itemsize_);
  const Step& step = steps_[at];
  const bool swaps = step.op == kRecvReduce && step.peer < rank_;  // as in reduce()
  share(shared_by_, count, itemsize, [&](size_t begin, size_t end) {
    char* const here = into + begin * itemsize;
    const char* const other = operand + begin * itemsize;
    const size_t n = end - begin;
    if (!is_in_sum(at)) {
      reduce_.wide.begin(sum + begin, swaps ? other : here, swaps ? here : other, n);
    } else if (step.goes_on != 0) {
      reduce_.wide.add(sum + begin, other, n);
    } else {
      reduce_.wide.end(here, sum + begin, other, n);
    }
  });
}

}  // namespace unisono
