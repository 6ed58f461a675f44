#include "windows/part.hpp"

#include <cstring>

#include <sched.h>

#include "core/clock.hpp"
#include "core/futex.hpp"

namespace unisono {

namespace {

template <class Word>
std::atomic<Word>& word_at(char* place) {
  static_assert(sizeof(std::atomic<Word>) == sizeof(Word) && std::atomic<Word>::is_always_lock_free,
                "other processes change the same bytes");
  return *reinterpret_cast<std::atomic<Word>*>(place);
}

template <class Word>
void apply_words(char* place, const char* source, char* old, size_t count, ReduceFn combine) {
  for (size_t i = 0; i < count; ++i) {
    std::atomic<Word>& word = word_at<Word>(place + i * sizeof(Word));
    Word before = word.load(std::memory_order_relaxed), after;
    do {
      combine(&after, &before, source + i * sizeof(Word), 1);
      // acq_rel: pairs with itself. What the rank has written before is visible to the next rank
      // that changes the element, for example to the one that gets the next number of a queue.
    } while (!word.compare_exchange_weak(before, after, std::memory_order_acq_rel,
                                         std::memory_order_relaxed));
    if (old != nullptr) memcpy(old + i * sizeof(Word), &before, sizeof(Word));
  }
}

template <class Word>
bool swap_word(char* place, void* expected, const void* desired) {
  Word before, after;
  memcpy(&before, expected, sizeof(Word));
  memcpy(&after, desired, sizeof(Word));
  std::atomic<Word>& word = word_at<Word>(place);
  // acq_rel: pairs with itself, as in apply_words(). A failed exchange is an acquire, because it
  // tells as much about the other rank as a good one.
  const bool swapped = word.compare_exchange_strong(before, after, std::memory_order_acq_rel,
                                                    std::memory_order_acquire);
  memcpy(expected, &before, sizeof(Word));
  return swapped;
}

template <class Word>
void put_word(char* place, const void* from) {
  Word value;
  memcpy(&value, from, sizeof(Word));
  std::atomic<Word>& word = word_at<Word>(place);
  word.store(value, std::memory_order_relaxed);  // a signal publishes it
}

template <class Word>
void get_word(char* place, void* to) {
  const Word value = word_at<Word>(place).load(std::memory_order_relaxed);  // as put_word()
  memcpy(to, &value, sizeof(Word));
}

}  // namespace

void WindowPart::signal(int from) {
  SignalLine& line = lines_[from];
  // seq_cst: pairs with wait_signal(). Either this load sees the sleeper, or the sleeper sees the
  // signal. As a release store it publishes what was put before.
  line.signals.fetch_add(1, std::memory_order_seq_cst);
  if (line.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(line.signals);
}

uint64_t WindowPart::wait_signal(int from, uint64_t taken, int64_t timeout_ns, bool is_crowded) {
  SignalLine& line = lines_[from];
  const SpinPolicy& patience = is_crowded ? kCrowded : kOwnCore;
  uint64_t seen = 0;
  for (int round = 1; round <= patience.busy_rounds + patience.yield_rounds; ++round) {
    for (int i = 0; i < patience.spins; ++i) {
      seen = signals(from);
      if (seen > taken) return seen;
      cpu_pause();
    }
    if (round > patience.busy_rounds) sched_yield();
  }
  const int64_t deadline_ns = now_ns() + timeout_ns;
  for (int64_t left_ns = timeout_ns; left_ns > 0; left_ns = deadline_ns - now_ns()) {
    line.sleepers.fetch_add(1, std::memory_order_seq_cst);  // pairs with signal(), as the load
    seen = line.signals.load(std::memory_order_seq_cst);
    if (seen <= taken) futex_wait(line.signals, seen, left_ns);
    line.sleepers.fetch_sub(1, std::memory_order_relaxed);
    seen = signals(from);
    if (seen > taken) break;
  }
  return seen;
}

void WindowPart::put(size_t offset, const void* from, size_t count) {
  char* place = data_ + offset * itemsize_;
  if (count == 1 && itemsize_ == 8) return put_word<uint64_t>(place, from);
  if (count == 1 && itemsize_ == 4) return put_word<uint32_t>(place, from);
  const size_t nbytes = count * itemsize_;
  const auto* first = static_cast<const char*>(from);
  if (first < place + nbytes && place < first + nbytes) {
    memmove(place, from, nbytes);  // the rank puts elements of its own part
    return;
  }
  if (nbytes >= kStreamBytes) return copy_past_cache(place, from, nbytes);
  copy_chunked(place, from, nbytes);
}

void WindowPart::get(size_t offset, void* to, size_t count) const {
  char* place = data_ + offset * itemsize_;
  if (count == 1 && itemsize_ == 8) return get_word<uint64_t>(place, to);
  if (count == 1 && itemsize_ == 4) return get_word<uint32_t>(place, to);
  memmove(to, place, count * itemsize_);
}

bool WindowPart::apply(size_t offset, const void* source, void* old, size_t count, RedOp op) {
  DType dtype = dtype_;
  size_t itemsize = itemsize_;
  char* place = data_ + offset * itemsize;
  if (dtype == DType::c128 && op == RedOp::sum) {
    // The sum of complex numbers is two sums, and no atomic operation has 16 bytes.
    dtype = DType::f64, itemsize = 8, count *= 2;
  }
  const ReduceFn combine = reduce_fn(dtype, op);
  const auto* from = static_cast<const char*>(source);
  auto* before = static_cast<char*>(old);
  if (combine == nullptr) return false;
  switch (itemsize) {
    case 1: apply_words<uint8_t>(place, from, before, count, combine); return true;
    case 2: apply_words<uint16_t>(place, from, before, count, combine); return true;
    case 4: apply_words<uint32_t>(place, from, before, count, combine); return true;
    case 8: apply_words<uint64_t>(place, from, before, count, combine); return true;
    default: return false;
  }
}

bool WindowPart::compare_and_swap(size_t offset, void* expected, const void* desired) {
  char* place = data_ + offset * itemsize_;
  switch (itemsize_) {
    case 1: return swap_word<uint8_t>(place, expected, desired);
    case 2: return swap_word<uint16_t>(place, expected, desired);
    case 4: return swap_word<uint32_t>(place, expected, desired);
    default: return swap_word<uint64_t>(place, expected, desired);
  }
}

}  // namespace unisono
