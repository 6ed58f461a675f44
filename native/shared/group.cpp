#include "shared/group.hpp"

#include <algorithm>
#include <utility>

#include "core/clock.hpp"
#include "core/cores.hpp"
#include "core/futex.hpp"

namespace unisono {

Group::Group(std::shared_ptr<Segment> segment, int rank, const std::vector<int>& pids,
             bool is_crowded)
    : segment_(std::move(segment)),
      remote_reader_(*segment_, rank, pids),
      rank_(rank),
      ranks_(segment_->ranks()),
      is_crowded_(is_crowded),
      epoch_(flag_of(rank, 0).load(std::memory_order_relaxed) / kStages + 1) {
  for (int peer = 0; peer < ranks_; ++peer) {
    processes_.push_back(ProcessHandle::of(pids[static_cast<size_t>(peer)]));
  }
}

Group::~Group() { leave(); }

// After a failure the epoch stays, because this rank does not finish it. From the flag of a later
// epoch other ranks would conclude that this rank has posted everything in the failed epoch.
void Group::end_epoch(Code code) {
  if (code == Code::postponed) {
    was_postponed_ = true;
    return;
  }
  const bool is_over =
    code == Code::ok || code == Code::mismatch || code == Code::uneven || code == Code::divided;
  if (is_over) {
    turn_slot();
    epoch_.store(epoch() + 1, std::memory_order_relaxed);
  } else {
    has_stopped_.store(true, std::memory_order_relaxed);
  }
}

Status Group::agree(uint64_t fingerprint, uint64_t* even, int64_t timeout_ns) {
  timeout_ns_ = timeout_ns;
  deadline_ns_ = 0;
  idler_ = nullptr;
  postpones_ = false;
  Status status = has_stopped() ? Status{Code::aborted, rank_, -1} : begin_epoch();
  if (status.is_ok()) {
    AgreementWords words{fingerprint, *even};
    enter_epoch(words, 0);
    status = compare(&words);
    *even = words.even;
  }
  end_epoch(status.code);
  return status;
}

Status Group::run(const Program& program, const Buffers& buffers, ReduceFns reduce,
                  AgreementWords words, int64_t timeout_ns, Idler* idler) {
  if (!program.is_checked && !fits(program, buffers)) return {Code::bad_program, rank_, -1};
  if (std::exchange(was_divided_, false)) words = {0, 1};
  // Queued calls may follow a call that has failed here.
  if (has_stopped()) return {Code::aborted, rank_, -1};
  const uint64_t first_epoch = epoch();
  timeout_ns_ = timeout_ns;
  // A call of one piece reads the clock only if a wait gets long; see wait_slowly().
  const bool is_short = program.loop_count == 1 && program.loops[0].repeats == 1;
  deadline_ns_ = is_short ? 0 : now_ns() + timeout_ns;
  idler_ = idler;
  postpones_ = idler != nullptr && words.fingerprint != 0 && idler->postpones();
  input_ = {const_cast<char*>(buffers.input), buffers.input_list};
  output_ = {buffers.output, buffers.output_list};
  scratch_ = buffers.scratch;
  itemsize_ = buffers.itemsize;
  reduce_ = reduce;
  past_cache_ = false;
  shared_by_ = team_for(std::max(buffers.input_count, buffers.output_count) * itemsize_);
  words.direct = words.fingerprint == 0 ? 0 : direct_bits(program, buffers);
  Status status = run_loops(program, words);
  if (status.code == Code::divided) {
    direct_pause_ = kDirectPause;
    was_divided_ = postpones_;
    // The epochs that follow have no agreement, and their waits come between writes.
    if (postpones_) return {Code::postponed, rank_, -1};
  }
  if (status.is_ok() && direct_) {
    status = finish_direct();
    end_epoch(status.code);
  }
  if (status.code == Code::divided) return run_loops(program, {0, 1});
  if (status.is_ok() || !direct_ || status.code == Code::mismatch || status.code == Code::uneven) {
    return status;
  }
  // Other ranks may still read here, and the caller will now change the memory that they read.
  uint64_t none = 0;
  segment_->words(rank_).abandoned_in.compare_exchange_strong(none, first_epoch);
  full_fence();
  return status;
}

Status Group::run_loops(const Program& program, AgreementWords words) {
  direct_ = words.direct != 0;
  has_failed_ = false;
  input_.moved = output_.moved = 0;
  for (size_t i = 0; i < program.loop_count; ++i) {
    const Loop& loop = program.loops[i];
    repeats_ = loop.repeats;
    for (int64_t k = 0; k < (direct_ ? 1 : loop.repeats); ++k) {
      // A short call has no deadline yet.
      if (deadline_ns_ != 0) record_core(segment_->words(rank_).core);
      Status status = run_piece(program.steps + loop.first, program.steps + loop.end, words);
      if (!status.is_ok()) return status;
      words.fingerprint = 0;
      advance(loop, direct_ ? loop.repeats : 1);
    }
  }
  return {};
}

// Whether each step stays inside its buffers and its slot, in every repetition.
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
    const Step* end = program.steps + loop.end;
    for (const Step* step = program.steps + loop.first; step != end; ++step) {
      if (!step_fits(*step, input_last, output_last, buffers, rank_, ranks_)) return false;
      if (!sum_fits(step, end)) return false;
      if (!fits_slot(*step, buffers.itemsize)) return false;
    }
    input_at = input_last + loop.input_shift;
    output_at = output_last + loop.output_shift;
  }
  return true;
}

// Wait until this rank's words and slot may be written.
Status Group::begin_epoch() {
  const uint64_t previous = (epoch() - 1) * kStages;
  for (int i = 1; i < ranks_; ++i) {
    // A rank that has entered the previous epoch has read the words and slots of the epoch before.
    // This epoch writes these again.
    const int peer = other(ranks_ - i);
    if (has_reached(peer, previous)) continue;
    Status status = wait_for(peer, previous, -1);
    if (!status.is_ok()) return status;
  }
  return {};
}

// Enter the epoch and publish a stage of it. Nothing may stand between the two stores. Other ranks
// poll this cache line, and to take it back from them costs 0.1 us each time.
void Group::enter_epoch(const AgreementWords& words, uint64_t stage) {
  AgreementWords& mine = segment_->words(rank_).line(epoch()).agreement;
  mine = words;
  mine.slot_at = slot_at();
  publish(stage);
}

// Compare this rank's words with those of all ranks. Afterwards `even` is 0 unless all ranks have
// the same word. `direct` has kWilling if all ranks have it, and kPostsAddresses if any rank has
// it.
Status Group::compare(AgreementWords* common) {
  const uint64_t entered = epoch() * kStages;
  const AgreementWords mine = *common;
  Status verdict{};
  for (int i = 1; i < ranks_; ++i) {
    // Backwards, because ranks often arrive in their order. A rank that waits forwards sleeps once
    // for each of them.
    const int peer = other(ranks_ - i);
    Status status = wait_for(peer, entered, -1);
    if (!status.is_ok()) return status;
    RankWords& theirs = segment_->words(peer);
    // The rank entered this epoch and then aborted: report the errors of a broken group.
    if (has_ended(peer)) return {Code::aborted, peer, -1};
    const AgreementWords& words = theirs.line(epoch()).agreement;
    if (words.fingerprint != mine.fingerprint && verdict.is_ok()) {
      verdict = {Code::mismatch, peer, -1};
    }
    if (words.even != mine.even) common->even = 0;
    common->direct = (common->direct & words.direct & kWilling) |
                     ((common->direct | words.direct) & kPostsAddresses);
  }
  // A rank may have aborted during the wait for a later one. Other ranks raise then, too.
  for (int i = 1; i + 1 < ranks_; ++i) {
    const int peer = other(ranks_ - i);
    if (has_ended(peer)) return {Code::aborted, peer, -1};
  }
  return verdict;
}

Status Group::run_piece(const Step* first, const Step* end, AgreementWords words) {
  const bool posts_first = first != end && sends(first->op);
  reuses_posts_ = reuses_posts(first, end);
  Status status = begin_epoch();
  const Step* step = first;
  if (status.is_ok()) {
    // A run that was postponed may have entered the epoch, and other ranks may read the slot now.
    const bool has_entered = was_postponed_ && has_reached(rank_, epoch() * kStages);
    // A post writes no buffer of the user, so posts need not wait for the agreement.
    for (; step != end && sends(step->op); ++step) {
      if (!has_entered) post(*step);
    }
    was_postponed_ = false;
    if (!has_entered) enter_epoch(words, posts_first ? static_cast<uint64_t>(first->stage) : 0);
    // Here, because the other ranks do not wait for it.
    if (recorder_ != nullptr) recorder_->write_now();
  }
  if (status.is_ok() && words.fingerprint != 0) {
    status = compare(&words);
    if (status.is_ok() && words.even == 0) status = {Code::uneven, rank_, -1};
    if (status.is_ok() && (!posts_first || is_in_line(*first, rank_))) prefetch_next_line();
    // All waits come before the first write.
    for (const Step* each = step; postpones_ && status.is_ok() && each != end; ++each) {
      if (reads(*each)) status = wait_for_post(*each, -1);
    }
    direct_ = (words.direct & kWilling) != 0;
    // Some ranks have posted addresses, which other ranks do not want.
    if (status.is_ok() && words.direct == kPostsAddresses) status = {Code::divided, rank_, -1};
  }
  for (; status.is_ok() && step != end; ++step) {
    const auto index = static_cast<int>(step - first);
    if (step->goes_on != 0 && reduce_.is_wide()) {
      const Step* last = step;
      while (last + 1 != end && last->goes_on != 0) ++last;
      status = run_sum(step, last, index);
      step = last;
      continue;
    }
    status = run_step(*step, index);
    const bool last_post = sends(step->op) && (step + 1 == end || !sends((step + 1)->op));
    if (last_post) publish(static_cast<uint64_t>(step->stage));
  }
  end_epoch(status.code);
  return status;
}

void Group::post(const Step& step) {
  char* place = place_of(step, rank_);
  if (step.slot == rank_ && !is_in_line(step, rank_)) {
    posted_bytes_ = std::max(posted_bytes_, (step.slot_off + step.count) * itemsize_);
  }
  direct_ ? post_address(step, place) : apply(step, place);
}

Status Group::run_step(const Step& step, int index) {
  char* place = nullptr;
  if (sends(step.op)) {
    post(step);
    return {};
  }
  if (reads(step)) {
    Status status = wait_for_post(step, index);
    if (!status.is_ok()) return status;
    place = place_of(step, step.peer);
    read_bytes_ += step.count * itemsize_;
    if (direct_) {
      read_posted(step, place);
      return {};
    }
  }
  apply(step, place);
  return {};
}

// Publish that this rank has reached `stage` of the epoch, and wake the threads that sleep on its
// flag.
void Group::publish(uint64_t stage) {
  RankWords& mine = segment_->words(rank_);
  std::atomic<uint64_t>& flag = mine.line(epoch()).flag;
  // seq_cst: pairs with wait_slowly(). Either this load sees the sleeper, or the sleeper sees the
  // flag. As a release store the flag pairs with has_reached().
  flag.store(epoch() * kStages + stage, std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(flag);
}

// Not if ranks share cores: a woken thread could get the core that this rank needs.
void Group::wake_waiters() {
  RankWords& mine = segment_->words(rank_);
  if (mine.sleepers.load(std::memory_order_relaxed) == 0 || is_crowded_) return;
  futex_wake_all(mine.line(epoch()).flag);
}

Status Group::wait_for(int peer, uint64_t value, int step) {
  if (spin(peer, value)) return {};
  const Status status =
    postpones_ ? Status{Code::postponed, peer, step} : wait_slowly(peer, value, step);
  if (recorder_ != nullptr) recorder_->waits.end();
  return status;
}

// Poll for a limited time whether a peer's flag has reached `value`.
bool Group::spin(int peer, uint64_t value) {
  const SpinPolicy& patience = is_crowded_ ? kCrowded : is_server ? kServing : kOwnCore;
  for (int round = 1; round <= patience.busy_rounds + patience.yield_rounds; ++round) {
    for (int i = 0; i < patience.spins; ++i) {
      if (has_reached(peer, value)) {
        if (round > 1 && recorder_ != nullptr) recorder_->waits.end();
        return true;
      }
      cpu_pause();
    }
    // Not earlier: two looks at a clock are a tenth of the time of a small call.
    if (recorder_ != nullptr) recorder_->begin_wait(peer);
    if (idler_ != nullptr) {
      idler_->idle();
      idler_ = nullptr;
    }
    const bool yields = round > patience.busy_rounds;
    if (is_on_this_core(peer) ? !step_aside() : yields) sched_yield();
  }
  return false;
}

Status Group::wait_slowly(int peer, uint64_t value, int step) {
  RankWords& theirs = segment_->words(peer);
  std::atomic<uint64_t>& awaited = flag_of(peer, value);
  // Not earlier, because reading the clock takes a tenth of the time of a small call.
  if (deadline_ns_ == 0) deadline_ns_ = now_ns() + timeout_ns_;
  while (true) {
    theirs.sleepers.fetch_add(1, std::memory_order_seq_cst);  // pairs with publish(), as the load
    const uint64_t seen = awaited.load(std::memory_order_seq_cst);
    const int64_t left_ns = deadline_ns_ - now_ns();
    bool woken_early = false;
    if (seen < value && left_ns > 0) {
      woken_early = futex_wait(awaited, seen, left_ns < kSliceNs ? left_ns : kSliceNs);
    }
    theirs.sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (woken_early ? spin(peer, value) : has_reached(peer, value)) return {};
    if (is_broken()) return {Code::aborted, peer, step};
    if (late_ && late_called_ns_ != deadline_ns_ &&
        deadline_ns_ - now_ns() < late_ns(timeout_ns_)) {
      late_called_ns_ = deadline_ns_;
      late_();
    }
    if (poll_ && poll_()) return {Code::interrupted, peer, step};
    for (int other = 0; other < ranks_; ++other) {
      // A rank that ended inside this epoch may be the cause of the peer's delay.
      const uint64_t needed = other == peer ? value : epoch() * kStages;
      const std::atomic<uint64_t>& flag = flag_of(other, needed);
      if (other == rank_) continue;
      if (has_ended(other)) return {Code::aborted, other, step};
      if (flag.load(std::memory_order_acquire) >= needed) continue;  // pairs with publish()
      const Code end = exit_of(other);
      // A second look, because the rank may have raised its flag just before it ended. This is the
      // last flag: exit_of() pairs with leave().
      if (end != Code::ok && flag.load(std::memory_order_acquire) < needed) {
        return {end, other, step};
      }
    }
    if (now_ns() >= deadline_ns_) return {Code::timeout, peer, step};
  }
}

}  // namespace unisono
