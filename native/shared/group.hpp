// One rank's part of a group in shared memory: it publishes, waits and runs programs.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/fork_guard.hpp"
#include "core/program.hpp"
#include "kernels/copy_out.hpp"
#include "shared/process_handle.hpp"
#include "shared/remote_read.hpp"
#include "shared/segment.hpp"

namespace unisono {

struct Range {
  const char* at;
  int64_t nbytes;

  bool meets(const Range& other) const {
    return at < other.at + other.nbytes && other.at < at + nbytes;
  }
};

class Group final : public Runner {
 public:
  // `pids` has one process id per rank, as this host numbers processes. `is_crowded`: there are
  // more ranks than cores.
  Group(std::shared_ptr<Segment> segment, int rank, const std::vector<int>& pids, bool is_crowded);
  ~Group() override;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Take part in an agreement. `even` becomes 0 unless all ranks passed the same word.
  Status agree(uint64_t fingerprint, uint64_t* even, int64_t timeout_ns);
  // The programs of all ranks must have the same number of loops with the same repeats.
  Status run(const Program& program, const Buffers& buffers, ReduceFns reduce, AgreementWords words,
             int64_t timeout_ns, Idler* idler = nullptr) override;

  // Set a function that a wait calls every kSliceNs; true ends the wait. It detects Ctrl-C, of
  // which only Python knows.
  void set_poll(std::function<bool()> poll) { poll_ = std::move(poll); }

  // For tests: use direct reading also for posts outside huge pages.
  void ignore_pages() { ignores_pages_ = true; }
  bool was_direct() const { return direct_; }

  bool can_postpone(const Program& program) const override { return posts_first(program); }
  void wake_waiters() override;
  void abort() override;
  // A rank has reported that the group is broken. Epochs that the rank has finished go on.
  void fail(int by);
  bool is_aborted() const override { return broken_by_.load(std::memory_order_relaxed) >= 0; }

  // Mark this rank as gone, so that the other ranks do not wait for it. In the child of a fork: do
  // nothing.
  void leave();

 private:
  // The i-th rank after this rank. Without a division, because a small call would notice two of
  // them.
  int other(int i) const { return rank_ + i < ranks_ ? rank_ + i : rank_ + i - ranks_; }
  bool fits(const Program& program, const Buffers& buffers) const;
  bool fits_slot(const Step& step, int64_t itemsize) const;
  Status begin_epoch();
  void enter_epoch(const AgreementWords& words, uint64_t stage);
  Status compare(AgreementWords* common);
  Status run_loops(const Program& program, AgreementWords words);
  Status run_piece(const Step* first, const Step* end, AgreementWords words);
  void advance(const Loop& loop, int64_t times) {
    input_.moved += loop.input_shift * times;
    output_.moved += loop.output_shift * times;
  }
  bool reuses_posts(const Step* first, const Step* end) const;
  void post(const Step& step);
  Status run_step(const Step& step, int index);
  Status run_sum(const Step* first, const Step* last, int index);
  void sum_part(const Step* first, const Step* last, int64_t begin, int64_t end) const;
  static bool reads(const Step& step) {
    return !sends(step.op) && step.op != kCopy && step.op != kReduce;
  }
  // Wait for what a step reads.
  Status wait_for_post(const Step& step, int index) {
    const int peer = static_cast<int>(step.peer);
    const uint64_t posted = epoch() * kStages + static_cast<uint64_t>(step.stage);
    return has_reached(peer, posted) ? Status{} : wait_for(peer, posted, index);
  }
  // Whether a post lies beside the flag of its poster: if it fits, and is no result that goes to
  // the place of its operand. Both sides decide alike, because a read has the size of its post.
  bool is_in_line(const Step& step, int64_t poster) const {
    return (step.slot_off + step.count) * itemsize_ <= kLinePostBytes && step.slot == poster;
  }
  char* place_of(const Step& step, int64_t poster) const {
    const auto rank = static_cast<int>(step.slot);
    EpochLine& line = segment_->words(rank).line(epoch());
    if (is_in_line(step, poster)) return line.post + step.slot_off * itemsize_;
    const uint32_t at = rank == rank_ ? slot_at() : line.agreement.slot_at;
    return segment_->slot(rank, epoch(), at) + step.slot_off * itemsize_;
  }
  uint32_t& slot_at() { return slot_at_[epoch() & 1]; }
  uint32_t slot_at() const { return slot_at_[epoch() & 1]; }
  // After all ranks have entered this epoch, so that none reads the line of the epoch before. The
  // next call then need not wait for the line. Not before a post in the slot: the next call would
  // wait for the slot with the line in hand, and lose it to a rank that polls it.
  void prefetch_next_line() { segment_->words(rank_).line(epoch() + 1).prefetch(); }
  char* address_of(int64_t buf, int64_t off, int64_t* together) const;
  const char* operand_of(const Step& step, int64_t done, int64_t* count) const;
  void apply(const Step& step, char* place);
  void apply_shared(const Step& step, char* place);
  template <class CopyToSlot>
  void move(const Step& step, char* place, int64_t begin, int64_t end, CopyToSlot copy_out) const;

  // group_direct.cpp: direct reading
  //
  // For how many large calls a rank uses slots after a call in which only some ranks wanted direct
  // reading. To begin a call a second time costs a third.
  static constexpr int kDirectPause = 256;

  uint32_t direct_bits(const Program& program, const Buffers& buffers);
  bool is_worth_reading(const Program& program, bool* posts);
  bool fits_direct(const Program& program) const;
  bool pays_off(const Range& post, bool has_more_to_do);
  void post_address(const Step& step, char* place) const;
  void read_posted(const Step& step, const char* place);
  Status finish_direct();

  void publish(uint64_t stage);
  // The flag that a rank raises to `value`.
  std::atomic<uint64_t>& flag_of(int rank, uint64_t value) const {
    return segment_->words(rank).line(value / kStages).flag;
  }
  bool has_reached(int peer, uint64_t value) const {
    const std::atomic<uint64_t>& flag = flag_of(peer, value);
    return flag.load(std::memory_order_acquire) >= value;  // acquire: pairs with publish()
  }
  bool is_on_this_core(int peer);
  bool step_aside();
  Status wait_for(int peer, uint64_t value, int step);
  bool spin(int peer, uint64_t value);
  Status wait_slowly(int peer, uint64_t value, int step);
  Code exit_of(int peer) const;
  bool is_broken() const;
  // Whether a peer has aborted and does not finish this epoch. Inline: each call asks.
  bool has_ended(int peer) const {
    const RankWords& theirs = segment_->words(peer);
    // acquire: pairs with abort(), which has set `ended_in` before
    return theirs.membership.load(std::memory_order_acquire) == kAborted &&
           theirs.ended_in.load(std::memory_order_relaxed) <= epoch();
  }
  void end_epoch(Code code);
  void turn_slot();
  uint64_t epoch() const { return epoch_.load(std::memory_order_relaxed); }
  bool has_stopped() const { return has_stopped_.load(std::memory_order_relaxed); }

  const ForkGuard fork_guard_;
  std::shared_ptr<Segment> segment_;
  RemoteReader remote_reader_;
  HugePages huge_pages_;
  bool ignores_pages_ = false;
  int direct_pause_ = 0;  // large calls left for which this rank uses slots
  int rank_;
  int ranks_;
  bool is_crowded_;
  // The first epoch that is not finished: 1 at first, unless a test has raised this rank's flag 0
  // before. The thread that has the turn writes it, and abort() reads it in any thread.
  std::atomic<uint64_t> epoch_;
  std::atomic<bool> has_stopped_{false};  // after a failure or abort() no call runs here
  int64_t timeout_ns_ = 0;
  int64_t deadline_ns_ = 0;  // 0: not computed yet, because no wait was long
  Idler* idler_ = nullptr;
  bool postpones_ = false;  // until all that the run waits for is there; see Idler
  bool was_postponed_ = false;
  bool was_divided_ = false;  // the run that was postponed has ended its agreement: Code::divided
  std::atomic<int> broken_by_{-1};  // the rank that has broken the group; this rank: abort()
  std::vector<std::shared_ptr<const ProcessHandle>> processes_;  // by rank
  std::function<bool()> poll_;
  int64_t late_called_ns_ = 0;  // the deadline of the call for which late_ was called
  // State of the current run.
  struct Operand {
    char* data = nullptr;
    ArrayList parts;
    int64_t moved = 0;  // elements that the loops have moved on
  };
  Operand input_;
  Operand output_;
  char* scratch_ = nullptr;
  int64_t itemsize_ = 1;
  ReduceFns reduce_;
  ThreadTeam* shared_by_ = nullptr;  // the threads that share the loops of this call
  bool direct_ = false;              // whether posts are addresses
  bool has_failed_ = false;          // whether a direct read has failed
  uint32_t slot_at_[2] = {0, 0};     // of the next epoch of each parity; see Segment::slot
  int64_t posted_bytes_ = 0;         // in this rank's slot of this epoch
  int64_t read_bytes_ = 0;           // in this epoch
  bool reuses_posts_ = false;
  CopyOut copy_out_;         // into slots
  int64_t repeats_ = 1;      // of the current loop; with direct reading they are done as one
  bool past_cache_ = false;  // whether the moved data do not fit into the cache
};

}  // namespace unisono
