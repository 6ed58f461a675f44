// The ring of records: it wraps, and a late end does not touch the record of another call.
#include "core/recorder.hpp"

#include <atomic>
#include <cassert>
#include <cstdint>
#include <thread>
#include <vector>

using unisono::Code;
using unisono::Record;
using unisono::Recorder;

namespace {

const Record& record_of(const Recorder& recorder, uint64_t number) {
  return recorder.records()[number % Recorder::kRecords];
}

void test_a_call_is_recorded_from_begin_to_end() {
  Recorder recorder(2);
  const uint64_t number = recorder.begin({3, 77, 10, 1}, 5, {4, 6});
  const Record& record = record_of(recorder, number);
  assert(record.number == number && record.seq == 5 && record.word == 77 && record.count == 10);
  assert(record.kind == 3 && record.peer == 1 && record.site == 4 && record.offset == 6);
  assert(record.started == 0 && record.ended == 0 && record.outcome == 0);
  recorder.start(number);
  recorder.waits.add(1, 40);
  recorder.waits.add(0, 2);
  recorder.end(number, Code::timeout);
  assert(record.enqueued <= record.started && record.started <= record.ended);
  assert(record.waited == 42 && record.waited_for == 1);
  assert(record.outcome == 1 + static_cast<uint32_t>(Code::timeout));
  assert(recorder.totals()[3].calls == 1 && recorder.totals()[3].elements == 10);
}

void test_the_first_wait_of_an_asynchronous_call_counts() {
  Recorder recorder(2);
  const uint64_t blocking = recorder.begin({1, 0, 1, Recorder::kBlocking}, 1, {});
  const uint64_t queued = recorder.begin({1, 0, 1, Recorder::kNoWait}, 2, {});
  recorder.note_wait(blocking);
  assert(record_of(recorder, blocking).peer == Recorder::kBlocking);
  recorder.note_wait(queued);
  const int32_t first = record_of(recorder, queued).peer;
  assert(first > 0);
  const uint64_t until = unisono::ticks() + (uint64_t{4} << Recorder::kWaitShift);
  while (unisono::ticks() < until) {
  }
  recorder.note_wait(queued);
  assert(record_of(recorder, queued).peer == first);
  recorder.note_wait(queued + Recorder::kRecords);
  assert(record_of(recorder, queued).peer == first);
}

void test_clocks_are_read_at_one_moment() {
  // A read takes 1 tick, and a tick is 2 ns. The thread loses its core before some reads.
  for (const int interrupted : {-1, 0, 1, 2, 3, 4}) {
    uint64_t time = 1000;
    int read = 0;
    const auto next = [&] {
      time += 1 + (read == interrupted || read == 5 ? 100'000 : 0);
      ++read;
      return time;
    };
    const auto [ticks, now] =
      unisono::at_one_moment(next, [&] { return static_cast<int64_t>(2 * next()); });
    assert(2 * ticks == static_cast<uint64_t>(now));
  }
}

void test_a_record_is_written_when_the_run_waits() {
  Recorder recorder(2);
  const unisono::Recorded call{1, 0, 1, -1};
  const uint64_t number = recorder.begin_soon(call, 1, [] { return unisono::Site{7, 5}; });
  assert(record_of(recorder, number).number == 0);
  recorder.begin_wait(1);
  assert(record_of(recorder, number).number == number);
  assert(record_of(recorder, number).site == 7 && record_of(recorder, number).offset == 5);
  assert(recorder.waits.waiting_for == 1);
  recorder.waits.end();
  recorder.write_now();
  recorder.end(number, Code::ok);
  assert(record_of(recorder, number).waited_for == 1);
  assert(recorder.waits.waiting_for == -1);
}

void test_the_end_of_an_overwritten_record_is_ignored() {
  Recorder recorder(1);
  const uint64_t first = recorder.begin({1, 0, 1, -1}, 1, {});
  uint64_t last = 0;
  for (uint64_t i = 0; i < Recorder::kRecords; ++i) last = recorder.begin({2, 0, 1, -1}, i, {});
  recorder.end(first, Code::ok);
  assert(record_of(recorder, last).number == last && record_of(recorder, last).ended == 0);
  assert(recorder.totals()[1].calls == 0 && recorder.last() == Recorder::kRecords + 1);
}

void test_a_dropped_record_counts_no_call() {
  Recorder recorder(2);
  recorder.end_message(recorder.begin({1, 0, 1, 1}, 1, {}), Recorder::kDropped, 1);
  assert(recorder.totals()[1].calls == 0);
}

// Not with TSan: the columns are plain words, and copy() finds out whether they have changed.
#ifndef __SANITIZE_THREAD__
void test_a_copy_has_whole_records_only() {
  Recorder recorder(1);
  std::atomic<bool> is_over{false};
  std::thread writer([&] {
    for (uint64_t i = 1; !is_over; ++i) {
      recorder.begin({1, i, static_cast<int64_t>(i), -1}, i, {static_cast<uint32_t>(i)});
    }
  });
  std::vector<Record> records(Recorder::kRecords);
  for (int look = 0; look < 2000; ++look) {
    recorder.copy(records.data());
    for (const Record& record : records) {
      const uint64_t number = record.number;
      assert(number == 0 || (record.seq == number && record.word == number &&
                             record.site == static_cast<uint32_t>(number)));
    }
  }
  is_over = true;
  writer.join();
}
#endif

}  // namespace

int main() {
#ifndef __SANITIZE_THREAD__
  test_a_copy_has_whole_records_only();
#endif
  test_a_call_is_recorded_from_begin_to_end();
  test_the_first_wait_of_an_asynchronous_call_counts();
  test_clocks_are_read_at_one_moment();
  test_a_record_is_written_when_the_run_waits();
  test_the_end_of_an_overwritten_record_is_ignored();
  test_a_dropped_record_counts_no_call();
}
