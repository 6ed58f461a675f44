#include "shared/group.hpp"

#include <algorithm>

#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/clock.hpp"
#include "core/futex.hpp"

namespace unisono {

Group::Group(std::shared_ptr<Segment> segment, int rank, const std::vector<int>& pids,
             bool is_crowded)
    : segment_(std::move(segment)),
      reach_(*segment_, rank, pids),
      rank_(rank),
      ranks_(segment_->ranks()),
      is_crowded_(is_crowded),
      epoch_(segment_->line(rank).flag.load(std::memory_order_relaxed) / kStages + 1) {
  for (int peer = 0; peer < ranks_; ++peer) {
    // Without pidfds (kernels before 5.3) the death of a peer shows at the deadline.
    long fd = peer == rank_ ? -1 : syscall(SYS_pidfd_open, pids[static_cast<size_t>(peer)], 0);
    pidfds_.push_back(static_cast<int>(fd));
  }
}

Group::~Group() {
  leave();
  for (int fd : pidfds_) {
    if (fd >= 0) close(fd);
  }
}

void Group::leave() {
  if (origin_.is_forked()) return;
  Line& line = segment_->line(rank_);
  uint32_t takes_part = kTakesPart;
  // acquire: end_of()
  line.end.compare_exchange_strong(takes_part, kLeft, std::memory_order_release);
  futex_wake_all(line.flag);
}

void Group::abort() {
  aborted_.store(true, std::memory_order_relaxed);
  if (origin_.is_forked()) return;
  segment_->line(rank_).end.store(kAborted, std::memory_order_release);  // acquire: end_of()
}

Status Group::agree(uint64_t fingerprint, uint64_t* even, int64_t timeout_ns) {
  timeout_ns_ = timeout_ns;
  deadline_ns_ = 0;
  idler_ = nullptr;
  Status status = begin_epoch();
  if (status.is_ok()) {
    Words words{fingerprint, *even};
    enter(words, 0);
    status = compare(&words);
    *even = words.even;
  }
  ++epoch_;
  return status;
}

Status Group::run(const Program& program, const Buffers& buffers, ReduceFn reduce, Words words,
                  int64_t timeout_ns, Idler* idler) {
  if (!fits(program, buffers)) return {Code::bad_program, rank_, -1};
  timeout_ns_ = timeout_ns;
  // A call of one piece learns the time when a wait gets long; see wait_slowly().
  const bool is_short = program.loop_count == 1 && program.loops[0].repeats == 1;
  deadline_ns_ = is_short ? 0 : now_ns() + timeout_ns;
  idler_ = idler;
  input_ = {const_cast<char*>(buffers.input), buffers.input_parts};
  output_ = {buffers.output, buffers.output_parts};
  scratch_ = buffers.scratch;
  itemsize_ = buffers.itemsize;
  reduce_ = reduce;
  past_cache_ = false;
  words.direct = words.fingerprint == 0 ? 0 : wish(program, buffers);
  Status status = run_loops(program, words);
  if (status.code == Code::divided) holds_off_ = kHoldsOff;
  if (status.is_ok() && direct_) status = part();
  if (status.code == Code::divided) return run_loops(program, {0, 1});
  if (status.is_ok() || !direct_ || status.code == Code::mismatch || status.code == Code::uneven) {
    return status;
  }
  // Others may still read here, and the caller is about to change what they read.
  segment_->line(rank_).gave_up.store(1, std::memory_order_relaxed);
  full_fence();
  return status;
}

Status Group::run_loops(const Program& program, Words words) {
  direct_ = words.direct != 0;
  has_failed_ = false;
  input_.moved = output_.moved = 0;
  for (size_t i = 0; i < program.loop_count; ++i) {
    const Loop& loop = program.loops[i];
    repeats_ = loop.repeats;
    for (int64_t k = 0; k < (direct_ ? 1 : loop.repeats); ++k) {
      // A short call has no deadline yet.
      if (deadline_ns_ != 0) tell_core(segment_->line(rank_).core);
      Status status = run_piece(program.steps + loop.first, program.steps + loop.end, words);
      if (!status.is_ok()) return status;
      words.fingerprint = 0;
      move_on(loop, direct_ ? loop.repeats : 1);
    }
  }
  return {};
}

void Group::move_on(const Loop& loop, int64_t times) {
  input_.moved += loop.input_shift * times;
  output_.moved += loop.output_shift * times;
}

// Whether no step leaves its buffers or its slot, in any repetition.
bool Group::fits(const Program& program, const Buffers& buffers) const {
  int64_t input_at = 0;
  int64_t output_at = 0;
  if (program.loop_count == 0) return false;
  for (size_t i = 0; i < program.loop_count; ++i) {
    const Loop& loop = program.loops[i];
    if (loop.repeats < 1 || loop.input_shift < 0 || loop.output_shift < 0 || loop.first < 0 ||
        loop.first > loop.end || loop.end > static_cast<int64_t>(program.step_count)) {
      return false;
    }
    const int64_t input_last = input_at + (loop.repeats - 1) * loop.input_shift;
    const int64_t output_last = output_at + (loop.repeats - 1) * loop.output_shift;
    for (const Step* step = program.steps + loop.first; step != program.steps + loop.end; ++step) {
      if (!step_fits(*step, input_last, output_last, buffers, rank_, ranks_)) return false;
      if (!fits_slot(*step, buffers.itemsize)) return false;
    }
    input_at = input_last + loop.input_shift;
    output_at = output_last + loop.output_shift;
  }
  return true;
}

bool Group::fits_slot(const Step& step, int64_t itemsize) const {
  if (step.op == kCopy || step.op == kReduce) return true;
  const int64_t slot_end = (step.slot_off + step.count) * itemsize;
  return step.slot >= 0 && step.slot < ranks_ && step.slot_off >= 0 &&
         slot_end <= static_cast<int64_t>(segment_->slot_bytes()) &&
         step.stage > 0 && step.stage < static_cast<int64_t>(kStages);
}

// Wait until this rank's words and slot may be written.
Status Group::begin_epoch() {
  const uint64_t previous = (epoch_ - 1) * kStages;
  for (int i = 1; i < ranks_; ++i) {
    // Whoever has entered the previous epoch has read words and slots of the one before, which
    // this epoch writes again.
    if (has_come(other(i), previous)) continue;
    Status status = wait_for(other(i), previous, -1);
    if (!status.is_ok()) return status;
  }
  return {};
}

// Enter the epoch, and come to a stage of it. Nothing may lie between the two stores: others look at
// this line all the time, and each time it is taken back from them costs a tenth of a microsecond.
void Group::enter(const Words& words, uint64_t stage) {
  segment_->line(rank_).words[epoch_ & 1] = words;
  raise(stage);
}

// On return `even` is 0 unless all ranks' are equal, and `direct` has kWilling if all ranks' have, and
// kReferred if anybody's has.
Status Group::compare(Words* common) {
  const uint64_t entered = epoch_ * kStages;
  const Words mine = *common;
  Status verdict{};
  for (int i = 1; i < ranks_; ++i) {
    const int peer = other(i);
    Status status = wait_for(peer, entered, -1);
    if (!status.is_ok()) return status;
    const Line& line = segment_->line(peer);
    // It came here and gave up: its other calls, and errors, are those of a broken group.
    if (line.end.load(std::memory_order_relaxed) == kAborted) return {Code::aborted, peer, -1};
    const Words& words = line.words[epoch_ & 1];
    if (words.fingerprint != mine.fingerprint && verdict.is_ok()) {
      verdict = {Code::mismatch, peer, -1};
    }
    if (words.even != mine.even) common->even = 0;
    common->direct = (common->direct & words.direct & kWilling) |
                     ((common->direct | words.direct) & kReferred);
  }
  return verdict;
}

Status Group::run_piece(const Step* first, const Step* end, Words words) {
  const bool posts_first = first != end && sends(first->op);
  Status status = begin_epoch();
  const Step* step = first;
  if (status.is_ok()) {
    // Posts touch no buffer of the user, so they need not wait for the agreement.
    for (; step != end && sends(step->op); ++step) post(*step);
    enter(words, posts_first ? static_cast<uint64_t>(first->stage) : 0);
  }
  if (status.is_ok() && words.fingerprint != 0) {
    status = compare(&words);
    if (status.is_ok() && words.even == 0) status = {Code::uneven, rank_, -1};
    direct_ = (words.direct & kWilling) != 0;
    // What some have posted are addresses, which others do not want.
    if (status.is_ok() && words.direct == kReferred) status = {Code::divided, rank_, -1};
  }
  for (; status.is_ok() && step != end; ++step) {
    status = run_step(*step, static_cast<int>(step - first));
    const bool last_post = sends(step->op) && (step + 1 == end || !sends((step + 1)->op));
    if (last_post) raise(static_cast<uint64_t>(step->stage));
  }
  ++epoch_;
  return status;
}

void Group::post(const Step& step) {
  direct_ ? refer(step, slot_of(step)) : apply(step, slot_of(step));
}

Status Group::run_step(const Step& step, int index) {
  char* slot = nullptr;
  if (sends(step.op)) {
    post(step);
    return {};
  }
  if (step.op != kCopy && step.op != kReduce) {
    const int peer = static_cast<int>(step.peer);
    const uint64_t posted = epoch_ * kStages + static_cast<uint64_t>(step.stage);
    if (!has_come(peer, posted)) {
      Status status = wait_for(peer, posted, index);
      if (!status.is_ok()) return status;
    }
    slot = slot_of(step);
    if (direct_) {
      fetch(step, slot);
      return {};
    }
  }
  apply(step, slot);
  return {};
}

// Copy or reduce a step's elements: into `slot`, from there, or between buffers if it is nullptr.
void Group::apply(const Step& step, char* slot) {
  const bool reduces = step.op == kReduce || step.op == kRecvReduce || step.op == kReadReduce;
  const int64_t whole = direct_ ? step.count * repeats_ : step.count;
  for (int64_t done = 0, count = 0; done < whole; done += count) {
    count = whole - done;
    char* at = slot == nullptr ? nullptr : slot + done * itemsize_;
    const char* from = at;
    char* into = at;
    if (slot == nullptr || sends(step.op)) from = place(step.src_buf, step.src_off + done, &count);
    if (!sends(step.op)) into = place(step.dst_buf, step.dst_off + done, &count);
    const char* left = into;
    if (joins(step)) left = place(step.src_buf, step.src_off + done, &count);
    if (step.op == kRecvReduce && step.peer < rank_) {
      // Two ranks that swap their vectors put the lower rank's first, so that both compute the same
      // expression; see Run.execute in engines/reference.py for where that matters.
      reduce_(into, from, into, static_cast<size_t>(count));
    } else if (reduces) {
      reduce_(into, left, from, static_cast<size_t>(count));
    } else if (into != from) {  // all_gather in place copies a block onto itself
      const auto copy = past_cache_ && !sends(step.op) ? copy_past_cache : copy_chunked;
      copy(into, from, static_cast<size_t>(count * itemsize_));
    }
  }
}

// Where an element of a buffer lies; `together` is cut to how many lie there without a gap.
char* Group::place(int64_t buf, int64_t off, int64_t* together) const {
  if (buf == kScratch) return scratch_ + off * itemsize_;
  const Place& whole = buf == kInput ? input_ : output_;
  const Parts& parts = whole.parts;
  off += whole.moved;
  if (parts.at == nullptr) return whole.data + off * itemsize_;
  const int64_t inside = off % parts.count;
  *together = std::min(*together, parts.count - inside);
  return parts.at[off / parts.count] + inside * itemsize_;
}

char* Group::slot_of(const Step& step) const {
  return segment_->slot(static_cast<int>(step.slot), epoch_) + step.slot_off * itemsize_;
}

// Say that this rank has come to `stage` of the epoch, and wake whoever sleeps for that.
void Group::raise(uint64_t stage) {
  Line& line = segment_->line(rank_);
  // seq_cst, as is the sleeper's increment: either it is seen here, or the sleeper sees the flag.
  line.flag.store(epoch_ * kStages + stage, std::memory_order_seq_cst);
  if (line.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(line.flag);
}

// Not where ranks share cores: a sleeper might get the one that this rank needs.
void Group::rouse() {
  Line& line = segment_->line(rank_);
  if (line.sleepers.load(std::memory_order_relaxed) != 0 && !is_crowded_) futex_wake_all(line.flag);
}

// Whether a peer cannot be running now, because this rank does on the same core; a guess.
bool Group::is_on_this_core(int peer) {
  const uint32_t core = tell_core(segment_->line(rank_).core);
  return core != 0 && segment_->line(peer).core.load(std::memory_order_relaxed) == core;
}

Status Group::wait_for(int peer, uint64_t value, int step) {
  return look(peer, value) ? Status{} : wait_slowly(peer, value, step);
}

// Look for a while whether a peer has raised its flag that far.
bool Group::look(int peer, uint64_t value) {
  const Patience& patience = is_crowded_ ? kCrowded : is_server ? kServing : kOwnCore;
  for (int round = 1; round <= patience.stays + patience.offers; ++round) {
    for (int i = 0; i < patience.looks; ++i) {
      if (has_come(peer, value)) return true;
      relax();
    }
    if (idler_ != nullptr) {
      idler_->idle();
      idler_ = nullptr;
    }
    if (round > patience.stays || is_on_this_core(peer)) sched_yield();
  }
  return false;
}

Status Group::wait_slowly(int peer, uint64_t value, int step) {
  Line& line = segment_->line(peer);
  // Not before: asking for the time would be a tenth of a small call.
  if (deadline_ns_ == 0) deadline_ns_ = now_ns() + timeout_ns_;
  while (true) {
    line.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint64_t seen = line.flag.load(std::memory_order_seq_cst);
    const int64_t left_ns = deadline_ns_ - now_ns();
    bool is_roused = false;
    if (seen < value && left_ns > 0) {
      is_roused = futex_wait(line.flag, seen, left_ns < kSliceNs ? left_ns : kSliceNs);
    }
    line.sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (is_roused ? look(peer, value) : has_come(peer, value)) return {};
    if (aborted_.load(std::memory_order_relaxed)) return {Code::aborted, peer, step};
    if (late_ && late_told_ns_ != deadline_ns_ && deadline_ns_ - now_ns() < late_ns(timeout_ns_)) {
      late_told_ns_ = deadline_ns_;
      late_();
    }
    if (poll_ && poll_()) return {Code::interrupted, peer, step};
    for (int other = 0; other < ranks_; ++other) {
      // A rank that ended inside this epoch may be what the awaited one waits for.
      const uint64_t needed = other == peer ? value : epoch_ * kStages;
      const std::atomic<uint64_t>& flag = segment_->line(other).flag;
      if (other == rank_ || flag.load(std::memory_order_acquire) >= needed) continue;
      const Code end = end_of(other);
      // Once more, since it may have raised its flag just before it went.
      if (end != Code::ok && flag.load(std::memory_order_acquire) < needed) return {end, other, step};
    }
    if (now_ns() >= deadline_ns_) return {Code::timeout, peer, step};
  }
}

// How a peer ended; ok if it has not.
Code Group::end_of(int peer) const {
  // acquire: pairs with the stores in leave() and abort()
  const uint32_t end_word = segment_->line(peer).end.load(std::memory_order_acquire);
  if (end_word != kTakesPart) return end_word == kLeft ? Code::left : Code::aborted;
  pollfd end{pidfds_[static_cast<size_t>(peer)], POLLIN, 0};
  return end.fd >= 0 && poll(&end, 1, 0) == 1 ? Code::lost : Code::ok;
}

}  // namespace unisono
