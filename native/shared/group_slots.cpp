// Where the posts of an epoch lie in memory.
#include <algorithm>

#include "shared/group.hpp"

namespace unisono {

bool Group::fits_slot(const Step& step, int64_t itemsize) const {
  if (step.op == kCopy || step.op == kReduce) return true;
  const int64_t slot_end = (step.slot_off + step.count) * itemsize;
  return step.slot >= 0 && step.slot < ranks_ && step.slot_off >= 0 &&
         slot_end <= static_cast<int64_t>(segment_->slot_bytes()) && step.stage > 0 &&
         step.stage < static_cast<int64_t>(kStages);
}

// Whether results take the place of large posts. The peer's writes then bring the lines back.
bool Group::reuses_posts(const Step* first, const Step* end) const {
  if (first == end || first->count * itemsize_ < kStayBytes / 2) return false;
  return std::any_of(first, end,
                     [this](const Step& step) { return sends(step.op) && step.slot != rank_; });
}

// Move this rank's slot on, behind what it has posted.
void Group::turn_slot() {
  if (posted_bytes_ + read_bytes_ > kStayBytes && !reuses_posts_) {
    const int64_t next = slot_at() + (posted_bytes_ + kLineBytes - 1) / kLineBytes * kLineBytes;
    slot_at() = next <= segment_->turn_bytes() ? static_cast<uint32_t>(next) : 0;
  }
  posted_bytes_ = read_bytes_ = 0;
}

}  // namespace unisono
