#include "core/program.hpp"

#include <algorithm>

namespace unisono {

bool step_fits(const Step& step, int64_t input_at, int64_t output_at, const Buffers& buffers,
               int rank, int ranks) {
  auto inside = [&](int64_t buf, int64_t off) {
    const int64_t shift = buf == kInput ? input_at : buf == kOutput ? output_at : 0;
    const int64_t size = buf == kInput    ? buffers.input_count
                         : buf == kOutput ? buffers.output_count
                                          : buffers.scratch_count;
    return buf >= kInput && buf <= kScratch && off >= 0 && shift + off + step.count <= size;
  };
  if (step.op < kSend || step.op > kReadReduce || step.count < 0) return false;
  const bool local = step.op == kCopy || step.op == kReduce;
  const bool takes = local || joins(step) || sends(step.op);
  if (takes && !inside(step.src_buf, step.src_off)) return false;
  const bool readonly =
    step.dst_buf == kInput || (step.dst_buf == kOutput && buffers.output_is_readonly);
  if (!sends(step.op) && (readonly || !inside(step.dst_buf, step.dst_off))) return false;
  const bool any_peer = step.peer == -1 && sends(step.op);
  return local || any_peer || (step.peer >= 0 && step.peer < ranks && step.peer != rank);
}

bool sum_fits(const Step* step, const Step* end) {
  if (step->goes_on == 0) return true;
  const Step* next = step + 1;
  return next != end && reduces(step->op) && reduces(next->op) && !joins(*next) &&
         next->dst_buf == step->dst_buf && next->dst_off == step->dst_off &&
         next->count == step->count;
}

bool posts_first(const Program& program) {
  if (program.loop_count != 1 || program.loops[0].repeats != 1) return false;
  const auto sending = [](const Step& step) { return sends(step.op); };
  return std::is_partitioned(program.steps + program.loops[0].first,
                             program.steps + program.loops[0].end, sending);
}

}  // namespace unisono
