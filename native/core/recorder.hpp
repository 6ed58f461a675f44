// The records of a group's last calls on this rank: a ring in one block, written without a lock.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/futex.hpp"
#include "core/status.hpp"
#include "core/ticks.hpp"

namespace unisono {

// One call. src/unisono/core/recorder/ring.py has the same columns. Times are ticks(); 0: not yet.
// A collective has no peer. There the column is kBlocking if the caller waits from the call on, or
// else how long after the call it begins to wait, in 2^kWaitShift ticks; kNoWait: not yet.
struct Record {
  uint64_t number;  // of the record, from 1; 0: the place is empty, or is being written
  uint64_t seq;     // of the call in the group
  uint64_t word;    // fingerprint of a collective, tag of a message
  int64_t count;    // elements
  uint64_t enqueued;
  uint64_t started;
  uint64_t ended;
  uint64_t waited;     // the sum of the waits
  uint32_t kind;       // operation, dtype, algorithm and route
  int32_t peer;        // rank in the group; -1: none, or not known yet. Of a collective: below
  int32_t waited_for;  // the rank of the longest wait; -1: none
  uint32_t site;       // code object of the caller; 0: unknown
  int32_t offset;      // of the instruction in the code object
  uint32_t outcome;    // 1 + Code; 0: the call has not ended
};

// All calls of one kind, also those whose records have been overwritten.
struct Total {
  uint64_t calls;
  uint64_t elements;
  uint64_t ticks;
  uint64_t worst;
};

// Where a call was made.
struct Site {
  uint32_t code = 0;
  int32_t offset = -1;
};

// A call that is about to be recorded.
struct Recorded {
  uint32_t kind = 0;
  uint64_t word = 0;
  int64_t count = 0;
  int peer = -1;
};

// The waits of the call that runs, and of all calls by rank.
struct Waits {
  std::vector<uint64_t> by_rank;
  uint64_t sum = 0;
  uint64_t longest = 0;
  int peer = -1;
  int waiting_for = -1;  // the rank of the wait that goes on, for readers; -1: none
  uint64_t from = 0;     // when that wait began

  void clear() {
    sum = longest = 0;
    peer = -1;
  }
  // Begin a wait. A second call before end() continues the wait.
  void begin(int rank) {
    if (waiting_for >= 0) return;
    from = ticks();
    waiting_for = rank;
  }
  // End the wait, if one was begun.
  void end() {
    if (waiting_for < 0) return;
    add(waiting_for, ticks() - from);
    waiting_for = -1;
  }
  void add(int rank, uint64_t waited) {
    if (rank < 0 || static_cast<size_t>(rank) >= by_rank.size()) return;
    by_rank[static_cast<size_t>(rank)] += waited;
    sum += waited;
    if (waited > longest) {
      longest = waited;
      peer = rank;
    }
  }
};

// Callers of begin() hold a lock of their own (Python's). start() and end() need no lock, because a
// record belongs to its call. The totals of a kind belong to the call that has the turn. So the
// server of a queue writes without Python's lock.
class Recorder {
 public:
  // The power of 2 after 2,000, so that a place is found without a division.
  static constexpr uint64_t kRecords = 2048;
  static constexpr uint32_t kKinds = 8192;
  static constexpr uint32_t kDropped = 0xffffffff;  // outcome of a record that stands for no call
  static constexpr int32_t kBlocking = -1, kNoWait = 0, kMostWait = 0x7fffffff;
  static constexpr int kWaitShift = 10;

  explicit Recorder(int ranks);

  // Begin a record and return its number. Overwrites the oldest record.
  uint64_t begin(const Recorded& call, uint64_t seq, Site site) {
    write(++last_, call, seq, site, ticks(), 0);
    return last_;
  }
  // As begin(), for a collective that runs at once on this thread. The record is written later, when
  // the run waits for its peers anyway, and `find_site` is called then.
  uint64_t begin_soon(const Recorded& call, uint64_t seq, Site (*find_site)()) {
    waits.clear();
    soon_ = {&call, ++last_, seq, ticks(), find_site};
    return last_;
  }
  // Call `find_site` of begin_soon() before write_now() would.
  void find_site() {
    if (soon_.call == nullptr || soon_.find_site == nullptr) return;
    soon_.site = soon_.find_site();
    soon_.find_site = nullptr;
  }
  // Write the record of begin_soon(), if it is not written.
  void write_now() {
    if (soon_.call == nullptr) return;
    find_site();
    write(soon_.number, *soon_.call, soon_.seq, soon_.site, soon_.begun, 1);
    soon_.call = nullptr;
  }
  // A run waits longer than a moment for a rank of the group.
  void begin_wait(int rank) {
    write_now();
    waits.begin(rank);
  }
  // The number for the next message.
  uint64_t count_message() { return ++messages_; }

  // Mark a collective as running. Its waits are added to `waits` from here on.
  void start(uint64_t number) {
    Record& record = at(number);
    if (record.number == number) record.started = ticks();
    waits.clear();
  }
  // The caller waits for an asynchronous collective from now on. Its first wait counts.
  void note_wait(uint64_t number) {
    Record& record = at(number);
    if (record.number != number || record.peer != kNoWait) return;
    const uint64_t after = (ticks() - record.enqueued) >> kWaitShift;
    record.peer = static_cast<int32_t>(std::clamp(after, uint64_t{1}, uint64_t{kMostWait}));
  }
  void end(uint64_t number, Code code) { end(number, 1 + static_cast<uint32_t>(code), waits); }
  // Does nothing if the record was overwritten meanwhile.
  void end(uint64_t number, uint32_t outcome, const Waits& its) {
    Record& record = at(number);
    if (record.number != number) return;
    record.ended = ticks();
    record.waited = its.sum;
    record.waited_for = its.peer;
    // release: pairs with copy(), so that an outcome comes with the other columns
    __atomic_store_n(&record.outcome, outcome, __ATOMIC_RELEASE);
    if (outcome == kDropped || record.kind >= kKinds) return;
    Total& total = totals_[record.kind];
    const uint64_t taken = record.ended - record.enqueued;
    ++total.calls;
    total.elements += static_cast<uint64_t>(record.count);
    total.ticks += taken;
    total.worst = std::max(taken, total.worst);
  }
  // End a message: all of its time was a wait for its peer.
  void end_message(uint64_t number, uint32_t outcome, int peer);

  const Record* records() const { return records_.get(); }
  // Copy all records while other threads may write. A record that changed meanwhile is empty.
  void copy(Record* into) const {
    for (const Record* from = records(); from != records() + kRecords; ++from, ++into) {
      // acquire: pairs with the last store in write()
      const uint64_t number = __atomic_load_n(&from->number, __ATOMIC_ACQUIRE);
      // acquire: pairs with end()
      const uint32_t outcome = __atomic_load_n(&from->outcome, __ATOMIC_ACQUIRE);
      *into = *from;
      into->outcome = outcome;
      fence(std::memory_order_acquire);  // pairs with the fence in write()
      const uint64_t still = __atomic_load_n(&from->number, __ATOMIC_RELAXED);
      into->number = still == number ? number : 0;
    }
  }
  // kKinds totals.
  const Total* totals() const { return totals_.get(); }
  // The ticks that messages have waited for each rank. Not in `waits`, to which the server writes.
  const std::vector<uint64_t>& message_waits() const { return message_waits_; }
  uint64_t last() const { return last_; }

  Waits waits;

 private:
  struct Free {
    void operator()(void* memory) const;
  };

  // A record that is not written yet.
  struct Soon {
    const Recorded* call = nullptr;
    uint64_t number = 0;
    uint64_t seq = 0;
    uint64_t begun = 0;
    Site (*find_site)() = nullptr;  // nullptr: `site` is found
    Site site{};
  };

  void write(uint64_t number, const Recorded& call, uint64_t seq, Site site, uint64_t begun,
             uint64_t runs) {
    Record& record = at(number);
    __atomic_store_n(&record.number, 0, __ATOMIC_RELAXED);
    // Pairs with the fence in copy(). A release store instead would let the columns go ahead of it.
    fence(std::memory_order_release);
    record.seq = seq;
    record.word = call.word;
    record.count = call.count;
    record.enqueued = begun;
    record.started = record.enqueued * runs;
    record.ended = record.waited = 0;
    record.kind = call.kind;
    record.peer = call.peer;
    record.waited_for = -1;
    record.site = site.code;
    record.offset = site.offset;
    record.outcome = 0;
    // release: pairs with copy(), which finds the columns of the number that it loads
    __atomic_store_n(&record.number, number, __ATOMIC_RELEASE);
  }
  Record& at(uint64_t number) { return records_.get()[number % kRecords]; }

  std::unique_ptr<Record, Free> records_;
  std::unique_ptr<Total[], Free> totals_;
  std::vector<uint64_t> message_waits_;
  uint64_t last_ = 0;
  uint64_t messages_ = 0;
  Soon soon_;
};

}  // namespace unisono
