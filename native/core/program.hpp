// What runs programs: over shared memory (shared/group.hpp) or with messages (steps/steps.hpp).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "core/agreement.hpp"
#include "kernels/kernels.hpp"
#include "core/status.hpp"

namespace unisono {

// The columns of schedules/ir.py.
enum StepOp : int64_t { kSend, kRecv, kRecvReduce, kCopy, kReduce, kPost, kRead, kReadReduce };
enum Buf : int64_t { kInput, kOutput, kScratch };

// One step of a program; the columns of a row as Python lowers it, all in elements.
struct Step {
  int64_t op;
  int64_t peer;
  int64_t src_buf;
  int64_t src_off;
  int64_t dst_buf;
  int64_t dst_off;
  int64_t count;
  int64_t slot;      // whose slot the post lies in
  int64_t slot_off;  // where there
  int64_t stage;     // which publication of the poster
};

// Steps [first, end) executed `repeats` times; afterwards INPUT and OUTPUT move on.
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
};

// A list of arrays of equal size that stands for their concatenation.
struct ArrayList {
  char* const* at = nullptr;  // nullptr: there is no list but one array
  int64_t count = 0;          // elements of each
};

// Memory of one call; counts in elements.
struct Buffers {
  const char* input;
  int64_t input_count;
  char* output;
  int64_t output_count;
  bool output_is_readonly;  // as the tensor of a broadcast's root may be
  char* scratch;
  int64_t scratch_count;
  int64_t itemsize;
  ArrayList input_list{};   // instead of `input`
  ArrayList output_list{};  // instead of `output`
};

inline bool sends(int64_t op) { return op == kSend || op == kPost; }

// Whether a step is a copy and the reduction that follows it in one: dst = src (op) what is read.
inline bool joins(const Step& step) { return step.op == kReadReduce && step.src_buf >= kInput; }

// Whether a step names buffers, ranges and peers that exist, INPUT and OUTPUT having moved on that
// far: what comes from Python is checked once instead of trusted, because a wrong offset here is a
// corrupted process somewhere else.
bool step_fits(const Step& step, int64_t input_at, int64_t output_at, const Buffers& buffers,
               int rank, int ranks);

// Told once by a run that is going to wait for longer than a moment; may give up a lock, say.
class Idler {
 public:
  virtual void idle() = 0;

 protected:
  ~Idler() = default;
};

// One rank's part of a group.
class Runner {
 public:
  virtual ~Runner() = default;

  // Agree on `words` (fingerprint 0: agreed already), then run a program. No buffer is written
  // before; nor is any if the ranks' `even` differ, which ends with that code.
  virtual Status run(const Program& program, const Buffers& buffers, ReduceFn reduce,
                     AgreementWords words, int64_t timeout_ns, Idler* idler = nullptr) = 0;

  // Wake who sleeps for this rank, which has begun a call: a thread needs long to wake, and can do so
  // while this one finds out what the call is.
  virtual void wake_waiters() {}

  // End whatever waits, from any thread; the group cannot be used afterwards.
  virtual void abort() = 0;
  virtual bool is_aborted() const = 0;

  // Called once by a call that still waits `before_ns` before its deadline.
  void set_late(std::function<void()> late, int64_t before_ns) {
    late_ = std::move(late);
    late_ns_ = before_ns;
  }

 protected:
  std::function<void()> late_;
  int64_t late_ns_ = 0;

  // How long before its deadline a call of this time-out is late: half of a short one, or each call
  // that waits would ask all others; but an answer takes up to 0.45 s.
  int64_t late_ns(int64_t timeout_ns) const {
    const int64_t half_ns = timeout_ns / 2;
    return std::min(late_ns_, std::max(half_ns, int64_t{450'000'000}));
  }
};

}  // namespace unisono
