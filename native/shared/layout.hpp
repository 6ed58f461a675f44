// The words that ranks share, and who may write each.
//
// One segment per process group and host:
//
//     Header | RankWords of rank 0 | ... | RankWords of rank p-1 | slots of rank 0 | ... | slots of rank p-1
//
// Every rank executes the same sequence of epochs (one per piece of a call, or per loop and one
// more where posts are read where they lie). In epoch e it may
// write its slot e % 2, tell the others by raising its flag to e * kStages + stage, and read
// theirs. What only it reads there it may overwrite with what it posts next. Entering epoch e+1
// says that it is done with the others' slots of epoch e.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include <sched.h>

#include "core/agreement.hpp"

namespace unisono {

// Stages per epoch: a stage is one publication. A ring of 1,000 ranks needs 1,998.
constexpr uint64_t kStages = 4096;

// Two adjacent cache lines: the prefetcher of x86 fetches them in pairs, so that words nearer than
// this disturb each other even when they lie in different lines.
constexpr size_t kInterferenceBytes = 128;

// Of the random numbers by which a process, or its memory, is known.
constexpr size_t kNonceBytes = 16;

// Whether a rank's posts may be read where they lie, instead of from its slot; see Group::run.
enum DirectReading : uint64_t {
  kWilling = 1,         // it has no post that should go into the slot
  kPostsAddresses = 2,  // its slot holds the addresses of what it posts
  kFailed = 4,          // it could not read what was posted, afterwards
};

enum Membership : uint32_t { kMember = 0, kLeft = 1, kAborted = 2 };

struct alignas(kInterferenceBytes) RankWords {
  // Written by the owner only (release); read by every rank (acquire).
  std::atomic<uint64_t> flag;
  // Written by the owner before it raises its flag to the epoch, and after all ranks have left the
  // epoch before the last; read after seeing that flag.
  AgreementWords agreements[2];
  // Why the owner takes part in nothing any more, a Membership. In the line of the flag, so that
  // looking at it costs nothing.
  std::atomic<uint32_t> membership;
  // One more than the number of the core on which the owner last ran for longer; 0: not known.
  std::atomic<uint32_t> core;

  // How many ranks sleep on `flag`. Written by the sleepers, read by the owner after raising it.
  alignas(kInterferenceBytes) std::atomic<uint32_t> sleepers;

  // A random number in the owner's memory and where it is there, for RemoteReader. Written before the first epoch.
  unsigned char nonce[kNonceBytes];
  uint64_t nonce_at;

  // Whether the owner has left a call before all had read its posts where they lie; see Group::run.
  std::atomic<uint32_t> abandoned_posts;
};

struct alignas(kInterferenceBytes) Header {
  uint64_t magic;
  uint64_t ranks;
  uint64_t slot_bytes;
  unsigned char nonce[kNonceBytes];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared words must not need a lock");
static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared words must not need a lock");
static_assert(sizeof(RankWords) == 2 * kInterferenceBytes && sizeof(Header) == kInterferenceBytes,
              "layout");

// Say on which core this thread runs, as one more than its number; 0: not known.
inline uint32_t record_core(std::atomic<uint32_t>& recorded) {
  const auto core = static_cast<uint32_t>(sched_getcpu() + 1);
  // Others look at this line all the time: each store takes it from them.
  if (recorded.load(std::memory_order_relaxed) != core) {
    recorded.store(core, std::memory_order_relaxed);
  }
  return core;
}

}  // namespace unisono
