// How a program's steps copy and reduce elements in shared memory.
#include <algorithm>

#include "shared/group.hpp"

namespace unisono {

namespace {

// Elements of an accumulation that are added at a time: few enough for the L1 cache.
constexpr int64_t kSumBlock = 1024;

}  // namespace

// Add the operands of an accumulation block by block, so that the sum stays in the L1 cache.
Status Group::run_sum(const Step* first, const Step* last, int index) {
  for (const Step* step = first; step <= last; ++step) {
    if (!reads(*step)) continue;
    const Status status = wait_for_post(*step, index + static_cast<int>(step - first));
    if (!status.is_ok()) return status;
    read_bytes_ += step->count * itemsize_;
  }
  share(shared_by_, static_cast<size_t>(first->count), static_cast<size_t>(itemsize_),
        [&](size_t begin, size_t end) {
          sum_part(first, last, static_cast<int64_t>(begin), static_cast<int64_t>(end));
        });
  return {};
}

// Add the elements [begin, end) of the operands.
void Group::sum_part(const Step* first, const Step* last, int64_t begin, int64_t end) const {
  float sum[kSumBlock];
  const bool swaps = first->op == kRecvReduce && first->peer < rank_;  // as in move()
  for (int64_t done = begin, count = 0; done < end; done += count) {
    count = std::min(end - done, kSumBlock);
    char* into = address_of(first->dst_buf, first->dst_off + done, &count);
    const char* left = into;
    if (joins(*first)) left = address_of(first->src_buf, first->src_off + done, &count);
    for (const Step* step = first; step <= last; ++step) {
      if (!reads(*step)) operand_of(*step, done, &count);  // a list may end a block early
    }
    const auto n = static_cast<size_t>(count);
    const char* right = operand_of(*first, done, &count);
    reduce_.wide.begin(sum, swaps ? right : left, swaps ? left : right, n);
    for (const Step* step = first + 1; step < last; ++step) {
      reduce_.wide.add(sum, operand_of(*step, done, &count), n);
    }
    reduce_.wide.end(into, sum, operand_of(*last, done, &count), n);
  }
}

// The right operand of a reduction, from its element `done` on; see address_of().
const char* Group::operand_of(const Step& step, int64_t done, int64_t* count) const {
  if (reads(step)) return place_of(step, step.peer) + done * itemsize_;
  return address_of(step.src_buf, step.src_off + done, count);
}

// Copy or reduce a step's elements: into `place`, out of `place`, or between buffers if `place` is
// nullptr.
void Group::apply(const Step& step, char* place) {
  if (shared_by_ != nullptr) return apply_shared(step, place);
  const int64_t whole = direct_ ? step.count * repeats_ : step.count;
  move(step, place, 0, whole,
       [this](char* into, const char* from, size_t nbytes) { copy_out_.copy(into, from, nbytes); });
}

// As apply(), by several threads.
void Group::apply_shared(const Step& step, char* place) {
  const int64_t whole = direct_ ? step.count * repeats_ : step.count;
  const bool fills_slot = sends(step.op) && !reuses_posts_;
  ThreadTeam* const team = fills_slot && copy_out_.is_measured_next() ? nullptr : shared_by_;
  share(team, static_cast<size_t>(whole), static_cast<size_t>(itemsize_),
        [&](size_t begin, size_t end) {
          move(step, place, static_cast<int64_t>(begin), static_cast<int64_t>(end),
               [&](char* into, const char* from, size_t nbytes) {
                 if (team == nullptr) return copy_out_.copy(into, from, nbytes);
                 copy_out_.copy_part(into, from, nbytes);
               });
        });
}

// Copy or reduce the elements [begin, end) of a step.
template <class CopyToSlot>
void Group::move(const Step& step, char* place, int64_t begin, int64_t end,
                 CopyToSlot copy_out) const {
  for (int64_t done = begin, count = 0; done < end; done += count) {
    count = end - done;
    char* at = place == nullptr ? nullptr : place + done * itemsize_;
    const char* from = at;
    char* into = at;
    if (place == nullptr || sends(step.op)) {
      from = address_of(step.src_buf, step.src_off + done, &count);
    }
    if (!sends(step.op)) into = address_of(step.dst_buf, step.dst_off + done, &count);
    const char* left = into;
    if (joins(step)) left = address_of(step.src_buf, step.src_off + done, &count);
    if (step.op == kRecvReduce && step.peer < rank_) {
      // If two ranks swap their vectors, the lower rank's operand comes first, so that both ranks
      // compute the same expression. Run.execute in core/engines/reference.py shows where that matters.
      reduce_.step(into, from, into, static_cast<size_t>(count));
    } else if (reduces(step.op)) {
      reduce_.step(into, left, from, static_cast<size_t>(count));
    } else if (into != from) {  // all_gather in place copies a block onto itself
      const auto nbytes = static_cast<size_t>(count * itemsize_);
      if (sends(step.op) && !reuses_posts_) {
        copy_out(into, from, nbytes);
      } else {
        (past_cache_ ? copy_past_cache : copy_chunked)(into, from, nbytes);
      }
    }
  }
}

// The address of an element of a buffer. `together` is reduced to the number of elements that are
// contiguous from there.
char* Group::address_of(int64_t buf, int64_t off, int64_t* together) const {
  if (buf == kScratch) return scratch_ + off * itemsize_;
  const Operand& whole = buf == kInput ? input_ : output_;
  const ArrayList& parts = whole.parts;
  off += whole.moved;
  if (parts.at == nullptr) return whole.data + off * itemsize_;
  const int64_t inside = off % parts.count;
  *together = std::min(*together, parts.count - inside);
  return parts.at[off / parts.count] + inside * itemsize_;
}

}  // namespace unisono
