// Lets a thread sleep on a word of shared memory until another process changes the word.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace unisono {

// The low half of a 64-bit word, because a futex has 32 bits. Every change of a flag changes this
// half.
inline uint32_t* low_half(std::atomic<uint64_t>& word) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half comes first");
  return reinterpret_cast<uint32_t*>(&word);
}

// Sleep while `word` is `seen`, at most until the time-out. Returns true if this thread was woken
// although the word has not changed: the word will change soon.
//
// Not FUTEX_PRIVATE_FLAG, because the waker is another process. (libstdc++'s atomic::wait is
// private.)
inline bool futex_wait(std::atomic<uint64_t>& word, uint64_t seen, int64_t timeout_ns) {
  timespec limit{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  const long woken =
    syscall(SYS_futex, low_half(word), FUTEX_WAIT, static_cast<uint32_t>(seen), &limit, nullptr, 0);
  // acquire: pairs with the change of the word, which the caller may rely on
  return woken == 0 && word.load(std::memory_order_acquire) == seen;
}

inline void futex_wake_all(std::atomic<uint64_t>& word) {
  syscall(SYS_futex, low_half(word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

inline void fence(std::memory_order order) {
#pragma GCC diagnostic push
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wtsan"  // the fence alone rules out no race
#endif
  std::atomic_thread_fence(order);
#pragma GCC diagnostic pop
}

// Separates a write from a read of another word. If two threads do so with the words swapped, at
// least one of the threads sees the write of its peer. Each call pairs with a call of that peer.
inline void full_fence() { fence(std::memory_order_seq_cst); }

// Change a word and wake the threads that sleep on it.
inline void change_and_wake(std::atomic<uint64_t>& word) {
  word.fetch_add(1, std::memory_order_seq_cst);  // pairs with the sleeper's load of `seen`
  futex_wake_all(word);
}

}  // namespace unisono
