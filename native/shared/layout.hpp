// The words that ranks share, and which rank may write each.
//
// One segment per process group and host:
//
//     Header | RankWords of rank 0 | ... | of rank p-1 | slots of rank 0 | ... | slots of rank p-1
//
// Every rank executes the same sequence of epochs: one per piece of a call. With direct reading
// there is one per loop and one more. In epoch e a rank may write its slot e % 2 and line e % 2. It
// then raises the flag in this line to e * kStages + stage, and reads the slots and lines of other
// ranks. A rank may overwrite a post that only it reads with its own next post. A rank that enters
// epoch e+1 no longer needs the slots and lines of epoch e.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "core/agreement.hpp"
#include "core/cores.hpp"

namespace unisono {

// Stages per epoch: a stage is one publication. A ring of 1,000 ranks needs 1,998.
constexpr uint64_t kStages = 4096;

// Two adjacent cache lines, because the prefetcher of x86 fetches lines in pairs. Words that lie
// closer disturb each other even if they lie in different lines.
constexpr size_t kInterferenceBytes = 128;

// How far the slots of a parity of all ranks together move through memory before they come back.
// More than a core's own cache, so that neither core holds the lines that a post writes. To take
// lines from the reader's cache costs 2 to 4 times the write.
constexpr size_t kTurnBytes = size_t{3} << 19;

// Slots stay where they are after calls that move no more than this: all of it stays in the
// fastest cache.
constexpr int64_t kStayBytes = 8192;

constexpr int64_t kLineBytes = 64;
constexpr size_t kPageBytes = 4096;

// Size of the random numbers that identify a process or its memory.
constexpr size_t kNonceBytes = 16;

// A rank's word about direct reading; see group_direct.cpp.
enum DirectReading : uint32_t {
  kWilling = 1,         // the rank has no post that must go into the slot
  kPostsAddresses = 2,  // the slot of the rank holds addresses of posts
  kFailed = 4,          // the rank could not read a post
};

enum Membership : uint32_t { kMember = 0, kLeft = 1, kAborted = 2 };

// Largest post that lies beside the flag. Another rank gets its first 32 bytes with the cache line
// in which it sees the flag, and the rest with the line that the prefetcher adds.
constexpr int64_t kLinePostBytes = 96;

// What a rank publishes in the epochs of one parity. The owner writes it in epoch e after all ranks
// have entered epoch e-1 and so have left epoch e-2, in which they read it.
struct alignas(kInterferenceBytes) EpochLine {
  // Written by the owner only (release); read by every rank (acquire).
  std::atomic<uint64_t> flag;
  // Written before the flag is raised to the epoch, and read after that flag was seen.
  AgreementWords agreement;
  // A post, written before the flag is raised to its stage, and read after that flag was seen.
  char post[kLinePostBytes];

  // Take the line from the caches of other ranks, for writes that come later.
  void prefetch() {
    for (char* at : {reinterpret_cast<char*>(this), post + kLinePostBytes - 1}) {
#if defined(__x86_64__)
      asm volatile("prefetchw %0" : : "m"(*at));  // of __builtin_prefetch gcc makes one for reads
#else
      __builtin_prefetch(at, 1);
#endif
    }
  }
};

struct alignas(kInterferenceBytes) RankWords {
  EpochLine lines[2];
  EpochLine& line(uint64_t epoch) { return lines[epoch & 1]; }

  // A Membership: whether and how the owner has left. Every call looks at it, so it lies among
  // words that seldom change.
  std::atomic<uint32_t> membership;
  // The number of the core on which the owner last ran for a longer time, plus 1. 0: unknown.
  std::atomic<uint32_t> core;

  // A random number in the owner's memory and its address there, for RemoteReader. Written before
  // the first epoch.
  unsigned char nonce[kNonceBytes];
  uint64_t nonce_at;

  // The first epoch of the call that the owner has left before all ranks had read its posts
  // directly; 0: there is none. See Group::run.
  std::atomic<uint64_t> abandoned_in;

  // The first epoch that the owner does not finish, because it has aborted; 0: there is none.
  // Written before `membership` becomes kAborted.
  std::atomic<uint64_t> ended_in;

  // How many ranks sleep on the flags. Written by the sleepers, read by the owner after it has
  // raised a flag.
  alignas(kInterferenceBytes) std::atomic<uint32_t> sleepers;
};

struct alignas(kInterferenceBytes) Header {
  uint64_t magic;
  uint64_t ranks;
  uint64_t slot_bytes;
  unsigned char nonce[kNonceBytes];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared words must not need a lock");
static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared words must not need a lock");
static_assert(sizeof(EpochLine) == kInterferenceBytes, "layout");
static_assert(sizeof(RankWords) == 4 * kInterferenceBytes && sizeof(Header) == kInterferenceBytes,
              "layout");

}  // namespace unisono
