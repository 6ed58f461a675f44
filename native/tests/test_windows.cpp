// The part of a window: bounds, bytes beside the elements, atomic sums of threads, and signals
// that publish what was put before.
#include "windows/part.hpp"

#include <algorithm>
#include <cassert>
#include <complex>
#include <memory>
#include <thread>
#include <vector>

using unisono::DType;
using unisono::RedOp;
using unisono::SignalLine;
using unisono::WindowPart;

namespace {

constexpr int64_t kMinute = 60'000'000'000;
constexpr int kRanks = 4;

template <class Element>
struct Memory {
  explicit Memory(size_t count, int dtype, Element value = Element()) : data(count + 2, value) {
    for (SignalLine& line : lines) line.signals = line.sleepers = line.closed = 0;
    part = std::make_unique<WindowPart>(lines, data.data() + 1, count, sizeof(Element), dtype);
  }
  alignas(64) SignalLine lines[kRanks];
  std::vector<Element> data;  // with an element before and after the part
  std::unique_ptr<WindowPart> part;
};

template <class Function>
void on_threads(const Function& function) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) threads.emplace_back(function, rank);
  for (std::thread& thread : threads) thread.join();
}

void test_bounds() {
  Memory<int64_t> memory(8, static_cast<int>(DType::i64));
  const WindowPart& part = *memory.part;
  assert(part.has(0, 8) && part.has(8, 0) && part.has(7, 1));
  assert(!part.has(-1, 1) && !part.has(0, 9) && !part.has(7, 2) && !part.has(9, 0));
  assert(!part.has(INT64_MAX, 1) && !part.has(1, SIZE_MAX) && !part.has(INT64_MIN, 0));
}

template <class Element>
void test_put_and_get_move_these_elements_only() {
  for (const size_t count : {0, 1, 2, 7, 1000, 70'000, 3'000'000}) {
    for (const size_t offset : {0, 1, 3}) {
      Memory<Element> memory(count + 4, -1, Element(9));
      std::vector<Element> source(count), found(count + 1, Element(5));
      for (size_t i = 0; i < count; ++i) source[i] = static_cast<Element>(i * 7 + 1);
      memory.part->put(offset, source.data(), count);
      memory.part->get(offset, found.data(), count);
      assert(std::equal(source.begin(), source.end(), found.begin()));
      assert(found[count] == Element(5));
      for (size_t i = 0; i < memory.data.size(); ++i) {
        const bool is_inside = i >= offset + 1 && i < offset + 1 + count;
        assert(memory.data[i] == (is_inside ? source[i - offset - 1] : Element(9)));
      }
    }
  }
}

void test_put_of_a_rank_s_own_elements() {
  Memory<int64_t> memory(100, static_cast<int>(DType::i64));
  for (int64_t i = 0; i < 100; ++i) memory.data[i + 1] = i;
  memory.part->put(3, &memory.data[1], 90);
  for (int64_t i = 0; i < 90; ++i) assert(memory.data[i + 4] == i);
}

template <class Element>
void test_sums_of_threads_are_complete(DType dtype) {
  constexpr int kRounds = 5000;
  Memory<Element> memory(2, static_cast<int>(dtype));
  on_threads([&](int rank) {
    const Element one[2] = {Element(1), Element(rank)};
    Element old[2];
    for (int round = 0; round < kRounds; ++round) {
      const bool takes_old = round % 2 != 0;
      assert(memory.part->apply(0, one, takes_old ? old : nullptr, 2, RedOp::sum));
    }
  });
  assert(memory.data[1] == static_cast<Element>(kRounds * kRanks));
  assert(memory.data[2] == static_cast<Element>(kRounds * (0 + 1 + 2 + 3)));
  assert(memory.data[0] == Element(0) && memory.data[3] == Element(0));
}

void test_each_number_is_drawn_once() {
  constexpr int kRounds = 5000;
  Memory<int64_t> memory(1, static_cast<int>(DType::i64));
  std::vector<std::atomic<int>> drawn(kRounds * kRanks);
  on_threads([&](int) {
    int64_t one = 1, last = -1, number = 0;
    for (int round = 0; round < kRounds; ++round) {
      assert(memory.part->apply(0, &one, &number, 1, RedOp::sum));
      assert(number > last);
      drawn[number]++;
      last = number;
    }
  });
  for (const std::atomic<int>& times : drawn) assert(times == 1);
}

void test_ops_that_are_not_defined() {
  Memory<double> real(1, static_cast<int>(DType::f64));
  double value = 1;
  assert(!real.part->apply(0, &value, nullptr, 1, RedOp::band));
  Memory<std::complex<double>> wide(1, static_cast<int>(DType::c128));
  const std::complex<double> number{1, 2};
  assert(wide.part->apply(0, &number, nullptr, 1, RedOp::sum));
  assert(wide.data[1] == number);
  assert(!wide.part->apply(0, &number, nullptr, 1, RedOp::product));
  assert(wide.data[1] == number);
}

template <class Word>
void test_a_lock_by_compare_and_swap(DType dtype) {
  constexpr int kRounds = 300;
  Memory<Word> memory(1, static_cast<int>(dtype));
  int guarded = 0;
  on_threads([&](int rank) {
    for (int round = 0; round < kRounds; ++round) {
      const Word mine = static_cast<Word>(rank) + 1, none = 0;
      for (Word seen = 1; seen != none;) {
        seen = none;
        memory.part->compare_and_swap(0, &seen, &mine);
        if (seen != none) std::this_thread::yield();
      }
      guarded += 1;
      Word held = mine;
      memory.part->compare_and_swap(0, &held, &none);
      assert(held == mine);
    }
  });
  assert(guarded == kRounds * kRanks && memory.data[1] == 0);
}

void test_a_signal_publishes_what_was_put_before() {
  constexpr int kRounds = 2000;
  for (const bool is_crowded : {false, true}) {
    Memory<int32_t> there(1000, static_cast<int>(DType::i32)), here(1, -1);
    std::thread other([&] {
      std::vector<int32_t> values(1000);
      for (int32_t round = 1; round <= kRounds; ++round) {
        std::fill(values.begin(), values.end(), round);
        there.part->put(0, values.data(), values.size());
        there.part->signal(2);
        const uint64_t taken = round - 1;
        assert(here.part->wait_signal(1, taken, kMinute, is_crowded) == uint64_t(round));
      }
    });
    for (int32_t round = 1; round <= kRounds; ++round) {
      assert(there.part->wait_signal(2, round - 1, kMinute, is_crowded) == uint64_t(round));
      std::vector<int32_t> found(1000);
      there.part->get(0, found.data(), found.size());
      for (const int32_t value : found) assert(value == round);
      here.part->signal(1);
    }
    other.join();
    assert(there.part->signals(0) == 0 && there.part->signals(1) == 0);
  }
}

void test_a_wait_ends_at_its_time_out() {
  Memory<int32_t> memory(1, static_cast<int>(DType::i32));
  memory.part->signal(0);
  assert(memory.part->wait_signal(0, 0, 0, true) == 1);
  assert(memory.part->wait_signal(0, 1, 1'000'000, true) == 1);
  assert(memory.part->wait_signal(3, 0, 1'000'000, false) == 0);
  assert(!memory.part->is_closed());
  memory.part->close();
  assert(memory.part->is_closed());
}

}  // namespace

int main() {
  test_bounds();
  test_put_and_get_move_these_elements_only<int64_t>();
  test_put_and_get_move_these_elements_only<int32_t>();
  test_put_and_get_move_these_elements_only<int8_t>();
  test_put_of_a_rank_s_own_elements();
  test_sums_of_threads_are_complete<int64_t>(DType::i64);
  test_sums_of_threads_are_complete<int32_t>(DType::i32);
  test_sums_of_threads_are_complete<uint16_t>(DType::u16);
  test_sums_of_threads_are_complete<double>(DType::f64);
  test_each_number_is_drawn_once();
  test_ops_that_are_not_defined();
  test_a_lock_by_compare_and_swap<int64_t>(DType::i64);
  test_a_lock_by_compare_and_swap<uint8_t>(DType::u8);
  test_a_signal_publishes_what_was_put_before();
  test_a_wait_ends_at_its_time_out();
}
