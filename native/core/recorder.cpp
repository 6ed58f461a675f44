#include "core/recorder.hpp"

#include <cstdlib>
#include <new>

namespace unisono {

static_assert(sizeof(Record) == 88, "core/recorder/ring.py has the same columns");
static_assert(sizeof(Total) == 32, "core/recorder/ring.py has the same columns");

void Recorder::Free::operator()(void* memory) const { std::free(memory); }

// calloc: the system gives memory to a page of the ring or of the totals at the first write there.
Recorder::Recorder(int ranks)
    : records_(static_cast<Record*>(std::calloc(kRecords, sizeof(Record)))),
      totals_(static_cast<Total*>(std::calloc(kKinds, sizeof(Total)))) {
  if (records_ == nullptr || totals_ == nullptr) throw std::bad_alloc();
  waits.by_rank.resize(static_cast<size_t>(ranks));
  message_waits_.resize(static_cast<size_t>(ranks));
}

void Recorder::end_message(uint64_t number, uint32_t outcome, int peer) {
  Record& record = at(number);
  if (record.number != number) return;
  record.peer = peer;
  record.started = record.enqueued;
  Waits its;
  its.peer = peer;
  its.sum = ticks() - record.enqueued;
  const auto rank = static_cast<size_t>(peer);
  if (peer >= 0 && rank < message_waits_.size()) message_waits_[rank] += its.sum;
  end(number, outcome, its);
}

}  // namespace unisono
