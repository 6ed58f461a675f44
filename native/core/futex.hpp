// Sleeping on a word of shared memory until another process changes it.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace unisono {

// The low half of a 64-bit flag; a futex is 32 bits wide. Every raise of a flag changes this half.
inline uint32_t* low_half(std::atomic<uint64_t>& word) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half comes first");
  return reinterpret_cast<uint32_t*>(&word);
}

// Not FUTEX_PRIVATE_FLAG: the waker is another process. (libstdc++'s atomic::wait is private.)
// Returns whether this thread was woken though the word has not changed: it will, in a moment.
inline bool futex_wait(std::atomic<uint64_t>& word, uint64_t seen, int64_t timeout_ns) {
  timespec limit{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  const long woken =
    syscall(SYS_futex, low_half(word), FUTEX_WAIT, static_cast<uint32_t>(seen), &limit, nullptr, 0);
  return woken == 0 && word.load(std::memory_order_acquire) == seen;
}

inline void futex_wake_all(std::atomic<uint64_t>& word) {
  syscall(SYS_futex, low_half(word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// Between a write and a read of another word, of which one side must see the other's.
inline void full_fence() {
#pragma GCC diagnostic push
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wtsan"  // no race is ruled out by this fence alone
#endif
  std::atomic_thread_fence(std::memory_order_seq_cst);
#pragma GCC diagnostic pop
}

// Change a word on which others sleep, and wake them.
inline void change_and_wake(std::atomic<uint64_t>& word) {
  word.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(word);
}

}  // namespace unisono
