// Programs, and the interface of the two classes that run them: in shared memory (shared/group.hpp)
// and with messages (steps/steps.hpp).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "core/agreement.hpp"
#include "core/recorder.hpp"
#include "core/status.hpp"
#include "core/team.hpp"
#include "kernels/kernels.hpp"

namespace unisono {

// The opcodes of core/schedules/ir.py.
enum StepOp : int64_t { kSend, kRecv, kRecvReduce, kCopy, kReduce, kPost, kRead, kReadReduce };
enum Buf : int64_t { kInput, kOutput, kScratch };

// One step of a program: the columns of a row as Python lowers it. Counts and offsets are in
// elements.
struct Step {
  int64_t op;
  int64_t peer;
  int64_t src_buf;
  int64_t src_off;
  int64_t dst_buf;
  int64_t dst_off;
  int64_t count;
  int64_t slot;      // rank in whose slot the post lies
  int64_t slot_off;  // offset in that slot
  int64_t stage;     // the publication of the poster with which the post becomes readable
  // Whether the next step continues the accumulation: it reduces into the same elements.
  int64_t goes_on = 0;
};

// Steps [first, end), executed `repeats` times. After each repetition INPUT and OUTPUT move by the
// shifts.
struct Loop {
  int64_t first;
  int64_t end;
  int64_t repeats;
  int64_t input_shift;
  int64_t output_shift;
};

struct Program {
  const Step* steps;
  size_t step_count;
  const Loop* loops;
  size_t loop_count;
  bool is_checked = false;  // a run with buffers of these sizes has found that the steps fit
};

inline bool reduces(int64_t op) { return op == kReduce || op == kRecvReduce || op == kReadReduce; }

// Whether a rank posts all that it posts before it reads or writes anything.
bool posts_first(const Program& program);

// A list of arrays of equal size that stands for their concatenation.
struct ArrayList {
  char* const* at = nullptr;  // the arrays; nullptr: there is no list
  int64_t count = 0;          // elements of each array
};

// The memory of one call. Counts are in elements.
struct Buffers {
  const char* input;
  int64_t input_count;
  char* output;
  int64_t output_count;
  bool output_is_readonly;  // for example the array of a broadcast's root
  char* scratch;
  int64_t scratch_count;
  int64_t itemsize;
  ArrayList input_list{};   // instead of `input`
  ArrayList output_list{};  // instead of `output`
};

inline bool sends(int64_t op) { return op == kSend || op == kPost; }

// Whether a step is a copy and a reduction in one: dst = src (op) the value that is read.
inline bool joins(const Step& step) { return step.op == kReadReduce && step.src_buf >= kInput; }

// Whether a step names existing buffers, ranges and peers, with INPUT and OUTPUT moved by
// `input_at` and `output_at`. Programs from Python are checked once, because a wrong offset would
// corrupt the memory of some process.
bool step_fits(const Step& step, int64_t input_at, int64_t output_at, const Buffers& buffers,
               int rank, int ranks);

// Whether the step after a step that goes on, if there is one before `end`, continues its sum.
bool sum_fits(const Step* step, const Step* end);

// A run calls idle() once before it waits for longer than a moment. The callee may release a lock.
class Idler {
 public:
  virtual void idle() = 0;
  // Whether the run ends with Code::postponed instead of sleeping, if it can be run again.
  bool postpones() const { return postpones_; }

 protected:
  explicit Idler(bool postpones = false) : postpones_(postpones) {}
  ~Idler() = default;

 private:
  const bool postpones_;
};

// One rank's part of a group.
class Runner {
 public:
  virtual ~Runner() = default;

  // Agree on `words` (fingerprint 0: the ranks have agreed already), then run a program. Before all
  // ranks agree, no buffer is written. If the ranks' words `even` differ, the run ends with
  // Code::uneven and writes nothing. Without memory it ends with Code::no_memory and throws nothing,
  // because the other ranks are in this run.
  virtual Status run(const Program& program, const Buffers& buffers, ReduceFns reduce,
                     AgreementWords words, int64_t timeout_ns, Idler* idler = nullptr) = 0;

  // Whether a run of this program can be postponed before it writes a buffer, and then run again.
  virtual bool can_postpone(const Program& /*program*/) const { return false; }

  // Wake the threads that sleep for this rank, because this rank begins a call. A thread takes long
  // to wake: the wake-up then overlaps with parsing the arguments here.
  virtual void wake_waiters() {}

  // End every wait, from any thread. The group cannot be used afterwards.
  virtual void abort() = 0;
  virtual bool is_aborted() const = 0;

  // Set a function that a call invokes once if it still waits `before_ns` before its deadline.
  void set_late(std::function<void()> late, int64_t before_ns) {
    late_ = std::move(late);
    late_ns_ = before_ns;
  }
  // Record the waits of each run. The recorder must outlive the runner's last run.
  void set_recorder(Recorder* recorder) { recorder_ = recorder; }
  // Share the loops of large calls among threads.
  void set_team(std::shared_ptr<ThreadTeam> team) { team_ = std::move(team); }
  // The team for a call with a buffer of that size. nullptr: one thread does its loops.
  ThreadTeam* team_for(int64_t nbytes) const {
    return nbytes > ThreadTeam::kCallBytes ? team_.get() : nullptr;
  }

 protected:
  Recorder* recorder_ = nullptr;  // nullptr: the calls are not recorded
  std::shared_ptr<ThreadTeam> team_;
  std::function<void()> late_;
  int64_t late_ns_ = 0;

  // How long before its deadline a call with this time-out counts as late. At most half of the
  // time-out, or each waiting call would ask all other ranks. At least 0.45 s, because an answer
  // takes up to that.
  int64_t late_ns(int64_t timeout_ns) const {
    const int64_t half_ns = timeout_ns / 2;
    return std::min(late_ns_, std::max(half_ns, int64_t{450'000'000}));
  }
};

}  // namespace unisono
