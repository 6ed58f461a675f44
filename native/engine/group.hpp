// One rank's part of a group over shared memory: publishing, waiting, and running programs.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "kernels.hpp"
#include "segment.hpp"
#include "status.hpp"

namespace unisono {

// One step of a program; the columns of a row as Python lowers it, all in elements.
struct Step {
  int64_t op;
  int64_t peer;
  int64_t src_buf;
  int64_t src_off;
  int64_t dst_buf;
  int64_t dst_off;
  int64_t count;
  int64_t slot_off;  // where in the poster's slot
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
struct Parts {
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
  Parts input_parts{};   // instead of `input`
  Parts output_parts{};  // instead of `output`
};

// Told once by a run that is going to wait for longer than a moment; may give up a lock, say.
class Idler {
 public:
  virtual void idle() = 0;

 protected:
  ~Idler() = default;
};

class Group {
 public:
  // `pids` has one process id per rank, in this host's numbering. `spin` is how often a wait looks
  // at a flag before it offers the core to others.
  Group(std::shared_ptr<Segment> segment, int rank, const std::vector<int>& pids, int spin);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Take part in an agreement. `even` comes back as 0 unless all ranks gave the same word.
  Status agree(uint64_t fingerprint, uint64_t* even, int64_t timeout_ns);

  // Agree on `words` (fingerprint 0: agreed already), then run a program. No buffer is written
  // before; nor is any if the ranks' `even` differ, which ends with that code. Every rank's program
  // must have the same loops, as far as repeats go.
  Status run(const Program& program, const Buffers& buffers, ReduceFn reduce, Words words,
             int64_t timeout_ns, Idler* idler = nullptr);

  // Called by a wait every kSliceNs; true ends the wait. For Ctrl-C, of which only Python knows.
  void set_poll(std::function<bool()> poll) { poll_ = std::move(poll); }

  // Called once by a call that still waits `before_ns` before its deadline.
  void set_late(std::function<void()> late, int64_t before_ns) {
    late_ = std::move(late);
    late_ns_ = before_ns;
  }

  // End whatever waits, from any thread; the group cannot be used afterwards.
  void abort();
  bool is_aborted() const { return aborted_.load(std::memory_order_relaxed); }

  // Tell the others that this rank takes part in nothing any more.
  void leave();

 private:
  bool fits(const Program& program, const Buffers& buffers) const;
  bool fits(const Step& step, int64_t input_end, int64_t output_end, const Buffers& buffers) const;
  Status enter(const Words& words, bool publishes_at_once);
  Status compare(uint64_t fingerprint, uint64_t* even);
  Status run_piece(const Step* first, const Step* end, const Words& words);
  Status run_step(const Step& step, int index);
  void reduce_swapped(char* into, const char* from, int64_t count);
  char* own_slot(const Step& step) const;
  char* place(int64_t buf, int64_t off, int64_t* together) const;
  void apply(const Step& step, char* slot);
  void raise(uint64_t stage);
  Status wait_for(int peer, uint64_t value, int step);
  Status wait_slowly(int peer, uint64_t value, int step);
  Code end_of(int peer) const;

  std::shared_ptr<Segment> segment_;
  int rank_;
  int ranks_;
  int spin_;
  uint64_t epoch_ = 1;
  int64_t timeout_ns_ = 0;
  int64_t deadline_ns_ = 0;  // 0: not worked out yet, because no wait was long
  Idler* idler_ = nullptr;
  std::atomic<bool> aborted_{false};
  std::vector<int> pidfds_;
  std::function<bool()> poll_;
  std::function<void()> late_;
  int64_t late_ns_ = 0;
  int64_t late_told_ns_ = 0;  // the deadline of the call that late_ was called for
  // Of the run in progress.
  struct Place {
    char* data = nullptr;
    Parts parts;
    int64_t moved = 0;  // elements, by the loops' shifts
  };
  Place input_;
  Place output_;
  char* scratch_ = nullptr;
  int64_t itemsize_ = 1;
  ReduceFn reduce_ = nullptr;
};

}  // namespace unisono
