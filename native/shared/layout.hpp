// The words that ranks share, and which rank may write each.
//
// One segment per process group and host:
//
//     Header | RankWords of rank 0 | ... | of rank p-1 | slots of rank 0 | ... | slots of rank p-1
//
// Every rank executes the same sequence of epochs: one per piece of a call. With direct reading
// there is one per loop and one more. In epoch e a rank may write its slot e % 2. It then raises
// its flag to e * kStages + stage, and reads the slots of other ranks. A rank may overwrite a post
// that only it reads with its own next post. A rank that enters epoch e+1 no longer needs the slots
// of epoch e.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/agreement.hpp"
#include "core/cores.hpp"

namespace unisono {

// Stages per epoch: a stage is one publication. A ring of 1,000 ranks needs 1,998.
constexpr uint64_t kStages = 4096;

// Two adjacent cache lines, because the prefetcher of x86 fetches lines in pairs. Words that lie
// closer disturb each other even if they lie in different lines.
constexpr size_t kInterferenceBytes = 128;

// Size of the random numbers that identify a process or its memory.
constexpr size_t kNonceBytes = 16;

// A rank's word about direct reading; see group_direct.cpp.
enum DirectReading : uint64_t {
  kWilling = 1,         // the rank has no post that must go into the slot
  kPostsAddresses = 2,  // the slot of the rank holds addresses of posts
  kFailed = 4,          // the rank could not read a post
};

enum Membership : uint32_t { kMember = 0, kLeft = 1, kAborted = 2 };

struct alignas(kInterferenceBytes) RankWords {
  // Written by the owner only (release); read by every rank (acquire).
  std::atomic<uint64_t> flag;
  // Written by the owner before it raises its flag to the epoch, and after all ranks have left the
  // epoch before the last. Read after that flag was seen. Valid for two epochs, hence one per
  // parity.
  AgreementWords agreements[2];
  // A Membership: whether and how the owner has left. In the cache line of the flag, so that a look
  // at it costs nothing.
  std::atomic<uint32_t> membership;
  // The number of the core on which the owner last ran for a longer time, plus 1. 0: unknown.
  std::atomic<uint32_t> core;

  // How many ranks sleep on `flag`. Written by the sleepers, read by the owner after it has raised
  // the flag.
  alignas(kInterferenceBytes) std::atomic<uint32_t> sleepers;

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

}  // namespace unisono
