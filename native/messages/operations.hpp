// The started operations of a rank, by number, and their outcomes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/status.hpp"
#include "messages/matching.hpp"

namespace unisono {

// As an argument `const Lock&`: proof that the caller holds the lock of a `Messages`.
using Lock = std::unique_lock<std::mutex>;

// How an operation ended. `nbytes`, `info` and `tag` are those of the message of a receive, also for
// Code::mismatch.
struct Outcome {
  uint64_t number = 0;  // 0: the operation ended before it got a number
  Code code = Code::ok;
  int source = -1;
  uint64_t nbytes = 0;
  uint32_t info = 0;
  int64_t tag = 0;
  std::unique_ptr<char[]> memory = nullptr;  // the message, for Take::anything
};

// The outcome, also for an operation that goes on, and then still needs its memory.
inline Outcome outcome_of(Operation& op) {
  auto memory = op.done ? std::move(op.memory) : nullptr;
  return {op.number, op.code, op.source, op.got_nbytes, op.got_info, op.got_tag, std::move(memory)};
}

class Operations {
 public:
  // Store an operation that is about to begin, because after its start there must be memory for
  // that. Then it gets its number, or it is dropped: it has ended already.
  Operation& open(const Lock& lock);
  uint64_t assign_number(const Lock& lock, Operation& op);
  void drop(const Lock& lock);

  // nullptr: there is no such operation, or serve() has returned its outcome.
  Operation* find(const Lock& lock, uint64_t number) const;
  // The last receive into this memory with a number above `after`. 0: there is none.
  uint64_t number_of(const Lock& lock, const char* data, uint64_t after) const;
  uint64_t last_number() const { return last_number_.load(std::memory_order_relaxed); }

  void finish(const Lock& lock, Operation& op, Code code) {
    op.code = code;
    has_changed_ = true;
    if (op.number != 0 && !op.awaited) note_end(lock, op);
    op.done.store(true, std::memory_order_release);  // pairs with Waiting::is_over
  }
  // Report an operation that has ended and for which no thread waits.
  void note_end(const Lock& lock, const Operation& op);
  // Return the outcome of an operation that has ended, and forget the operation.
  Outcome take(const Lock& lock, uint64_t number);
  // Take the operations that were reported.
  std::vector<Outcome> take_ended(const Lock& lock);
  bool have_ended(const Lock& /*lock*/) const { return !ended_.empty(); }

  // Make the server thread report the end of a receive at once.
  void watch(const Lock& lock, Operation& op);
  bool are_watched(const Lock& /*lock*/) const { return watched_ != 0; }

  // Whether sleeping threads must look at the state again. The question resets the answer.
  void note_change(const Lock& /*lock*/) { has_changed_ = true; }
  bool take_change(const Lock& /*lock*/) { return std::exchange(has_changed_, false); }
  // As take_change(): whether serve() must return outcomes.
  bool take_due(const Lock& lock);

 private:
  std::unordered_map<uint64_t, std::unique_ptr<Operation>> open_;
  size_t watched_ = 0;                    // operations of open_ that are not quiet
  std::atomic<uint64_t> last_number_{0};  // written under the lock
  std::vector<uint64_t> ended_;           // of open_; serve() returns them
  bool has_changed_ = false;
  bool is_due_ = false;
};

}  // namespace unisono
