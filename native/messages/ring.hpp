// Memory for messages between two ranks of a host: one ring of bytes per direction.
//
// Every rank makes one inbox, a memory file:
//
//     InboxHead | ring from rank 0 | ring from rank 1 | ... | ring from rank p-1
//
// A sender maps the head and its own ring. Pages that nobody touches take no memory, so a rank pays
// for those that write to it. In a ring, frames follow one another: a FrameHead, the payload,
// and padding up to the next multiple of kFrameAlign. A frame on loan is a FrameHead, a Loan and
// padding; the payload follows only if its receiver has refused the loan.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "shared/layout.hpp"

namespace unisono {

// A ring takes this much of a message before its receiver has to read. Larger: writer and reader use
// more of their caches, 64 ranks more memory. Smaller: they wait for one another more often, which
// costs most where more ranks than cores take turns.
constexpr size_t kRingBytes = 128 * 1024;
constexpr size_t kWideRingBytes = 512 * 1024;

// So many ranks on a host have wide rings: twelve of them.
constexpr int kFewRanks = 4;

// How much is copied before the other side may see it: the pipeline's step.
constexpr size_t kStepBytes = 16 * 1024;

// The same for messages of this size on: to tell the other side less often counts for more, the less
// the cores share. 64 MiB, past the cache, were slower.
constexpr uint64_t kLongBytes = 1024 * 1024;
constexpr size_t kLongStepBytes = 64 * 1024;

// A head never wraps around, and with a payload of 32 bytes it is one cache line.
constexpr size_t kFrameAlign = 64;

struct FrameHead {
  uint64_t context;
  int64_t tag;
  uint64_t nbytes;
  uint32_t info;
  uint32_t kind;
};
enum FrameKind : uint32_t {
  kWhole,  // the payload follows
  // On wires:
  kInParts,  // the payload comes in parts, over all wires to a rank
  kPart,  // one of them: `context` is the number of its message, `tag` where in it the part begins
  // In rings:
  kOnLoan,  // a Loan follows
};

// A payload that its sender leaves where it lies, and does not touch, until its receiver has read it there.
struct Loan {
  uint64_t address;
  uint64_t number;  // one of the ring's, in which there is one loan at a time
};
// What has become of the loan whose number is in RingWords::loan.
enum class LoanState : uint64_t {
  lent,
  read,
  refused,  // its receiver cannot read it: the payload is to follow in the ring
  revoked,  // what has been read may be something else by now
};
constexpr uint64_t kLoanStates = 4;
static_assert(sizeof(FrameHead) + sizeof(Loan) <= kFrameAlign && kRingBytes % kFrameAlign == 0 &&
                kWideRingBytes % kFrameAlign == 0,
              "heads fit");

constexpr uint64_t frame_bytes(uint64_t nbytes) {
  return (sizeof(FrameHead) + nbytes + kFrameAlign - 1) / kFrameAlign * kFrameAlign;
}

// memcpy, for which memory of no bytes may have no address.
inline void copy_bytes(void* into, const void* from, size_t nbytes) {
  if (nbytes != 0) std::memcpy(into, from, nbytes);
}

struct RingWords {
  // Bytes ever written. Written by the sender (release), read by the receiver (acquire).
  alignas(kInterferenceBytes) std::atomic<uint64_t> tail;
  // At this byte the sender has left off a frame before its end. Written by it before `tail`.
  std::atomic<uint64_t> aborted_at;
  // Bytes ever read. Written by the receiver (release), read by the sender (acquire).
  alignas(kInterferenceBytes) std::atomic<uint64_t> head;
  // Set by a sender that waits for room, taken back by the receiver that rings its bell.
  alignas(kInterferenceBytes) std::atomic<uint32_t> wants_room;
  // Set by the sender once, before it writes for the first time: first the ring's size.
  std::atomic<uint64_t> bytes;
  std::atomic<uint32_t> joined;
  // Set by the sender when it has written its last byte and leaves.
  std::atomic<uint32_t> left;
  // Set by the sender before it joins: where in its memory the nonce of its inbox is.
  std::atomic<uint64_t> nonce_at;
  // Number * kLoanStates + state. The sender lends; then either end says what has become of that,
  // whoever is first (compare-and-swap).
  alignas(kInterferenceBytes) std::atomic<uint64_t> loan;
};

// Whom a rank that has written or read something must wake.
struct Bells {
  // Threads that wait for a message of their own; `sleepers` of them sleep on `waiters`.
  alignas(kInterferenceBytes) std::atomic<uint64_t> waiters;
  std::atomic<uint32_t> sleepers;
  // The thread that serves what nobody waits for. It sleeps on `server`; `server_wants` says what
  // it is to be woken for.
  alignas(kInterferenceBytes) std::atomic<uint64_t> server;
  std::atomic<uint32_t> server_wants;
  // Set by the one thread that sleeps on wires and a pipe instead, taken back by who rings that: it
  // is file `pipe` of the owner.
  alignas(kInterferenceBytes) std::atomic<uint32_t> polls;
  std::atomic<int32_t> pipe;
};
enum Wants : uint32_t { kNothing, kFullRings, kEverything };

struct InboxHead {
  uint64_t magic;
  uint64_t ranks;
  unsigned char nonce[kNonceBytes];
  // How many senders have joined; the owner then looks which.
  alignas(kInterferenceBytes) std::atomic<uint32_t> joined;
  // One more than the number of the core on which the owner last waited; 0: not known.
  std::atomic<uint32_t> core;
  Bells bells;
};

constexpr size_t kPageBytes = 4096;
// Of memory that nobody touches there is none.
constexpr size_t kRingStride = kPageBytes + kWideRingBytes;
static_assert(sizeof(InboxHead) <= kPageBytes && sizeof(RingWords) <= kPageBytes, "layout");

// One ring, seen by either end. Each end uses its own half of the methods.
class Ring {
 public:
  Ring() = default;
  explicit Ring(char* base) : words(reinterpret_cast<RingWords*>(base)), data_(base + kPageBytes) {}

  // --- the sender's ---
  void choose_bytes(size_t bytes);
  size_t room();  // bytes that may be written
  void write(const void* from, size_t nbytes);
  // Also of the receiver: go on to where the next frame begins.
  void pad() { at_ = (at_ + kFrameAlign - 1) / kFrameAlign * kFrameAlign; }
  void publish() { words->tail.store(at_, std::memory_order_release); }
  // Leave off the frame that has begun, without its rest: there is no such message. What follows has room
  // once the receiver is past it, so that there is one cut at a time.
  void abort_frame();
  void lend(const FrameHead& head, const char* data);
  LoanState loan_state() const;
  // Returns what had become of it.
  LoanState revoke();

  // --- the receiver's ---
  void load_bytes() { bytes_ = words->bytes.load(std::memory_order_relaxed); }
  size_t available();  // bytes that may be read
  void read(void* into, size_t nbytes, bool past_cache = false);
  // How many of the next bytes are before the cut.
  size_t before_abort(size_t nbytes) const;
  void skip(size_t nbytes) { at_ += nbytes; }
  void unread(size_t nbytes) { at_ -= nbytes; }
  void release() { words->head.store(at_, std::memory_order_release); }
  bool is_lent(const Loan& loan) const;
  // Say what has become of a loan; false: it was taken back.
  bool answer(const Loan& loan, LoanState state);

  RingWords* words = nullptr;

 private:
  char* data_ = nullptr;
  size_t bytes_ = kRingBytes;
  uint64_t at_ = 0;         // this end's position
  uint64_t other_ = 0;      // the other end's, as last seen
  uint64_t abort_end_ = 0;  // where the frame after the last cut begins
  uint64_t loans_ = 0;      // the number of the last one
};

// A mapping of part of a file.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();
  int map(int fd, size_t offset, size_t nbytes);  // 0 or an errno
  char* base() const { return base_; }

 private:
  char* base_ = nullptr;
  size_t bytes_ = 0;
};

// A rank's own inbox.
class Inbox {
 public:
  ~Inbox() { close_fd(); }
  int create(int ranks, const unsigned char* nonce);  // 0 or an errno
  // After this nobody can open it any more; who has, goes on.
  void close_fd();
  int fd() const { return fd_; }
  InboxHead& head() const { return *reinterpret_cast<InboxHead*>(memory_.base()); }
  Ring ring(int sender) const {
    return Ring(memory_.base() + kPageBytes + static_cast<size_t>(sender) * kRingStride);
  }

 private:
  int fd_ = -1;
  Mapping memory_;
};

// Another rank's inbox, as far as this rank writes to it.
class Outbox {
 public:
  // Map what process `pid` holds open as `fd`; 0 or an errno. EXDEV: it is not the inbox with this
  // nonce, so `pid` is not a process of this host's view.
  int attach(int pid, int fd, const unsigned char* nonce, int me, size_t ring_bytes);
  // Wake the thread of its owner that sleeps on wires, if there is one.
  void ring_pipe();
  ~Outbox();
  Outbox() = default;
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;
  InboxHead& head() const { return *reinterpret_cast<InboxHead*>(head_.base()); }
  Ring ring;

 private:
  int pid_ = 0;
  int pipe_ = -1;
  Mapping head_;
  Mapping ring_;
};

}  // namespace unisono
