// Memory for messages between two ranks of a host: one ring of bytes per direction.
//
// Every rank makes one inbox, a memory file:
//
//     InboxHead | ring from rank 0 | ring from rank 1 | ... | ring from rank p-1
//
// A sender maps the head and its own ring. Untouched pages take no memory, so a rank pays only for
// the rings that are used. Frames follow one another in a ring: a FrameHead, the payload, and
// padding up to the next multiple of kFrameAlign.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "kernels/copy_out.hpp"
#include "shared/layout.hpp"

namespace unisono {

// A ring takes this much of a message before its receiver must read. Larger: writer and reader use
// more of their caches, and 64 ranks use more memory. Smaller: they wait for each other more often,
// which costs most if there are more ranks than cores.
//
// Wide: more than a core's own cache, so that neither core holds the lines that the writer fills.
// To take them from the reader's cache costs twice the time.
constexpr size_t kRingBytes = 128 * 1024;
constexpr size_t kWideRingBytes = 2048 * 1024;

// Up to this many ranks on a host have wide rings: 12 rings for 4 ranks.
constexpr int kFewRanks = 4;

// How many bytes are copied before the peer may see them: the step of the pipeline.
constexpr size_t kStepBytes = 16 * 1024;

// The step for messages from this size on, because publishing less often saves more the less the
// cores share. For 64 MiB, which bypass the cache, it was slower.
constexpr uint64_t kLongBytes = 512 * 1024;
constexpr size_t kLongStepBytes = 64 * 1024;

// A head never wraps around. With a payload of 32 bytes it is one cache line.
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
  kInParts,  // the payload comes in parts over all wires to a rank
  kPart,     // a part: `context` is the number of its message, `tag` its offset there
};

constexpr bool is_power_of_2(size_t number) { return (number & (number - 1)) == 0; }
static_assert(is_power_of_2(kRingBytes) && is_power_of_2(kWideRingBytes), "see Ring::place()");
static_assert(sizeof(FrameHead) <= kFrameAlign && kRingBytes % kFrameAlign == 0 &&
                kWideRingBytes % kFrameAlign == 0,
              "heads fit");

constexpr uint64_t frame_bytes(uint64_t nbytes) {
  return (sizeof(FrameHead) + nbytes + kFrameAlign - 1) / kFrameAlign * kFrameAlign;
}

// memcpy that allows null pointers for 0 bytes.
inline void copy_bytes(void* into, const void* from, size_t nbytes) {
  if (nbytes != 0) std::memcpy(into, from, nbytes);
}

struct RingWords {
  // Bytes written since the start. Written by the sender (release), read by the receiver (acquire).
  alignas(kInterferenceBytes) std::atomic<uint64_t> tail;
  // The position at which the sender has aborted a frame. Written by the sender before `tail`.
  std::atomic<uint64_t> aborted_at;
  // Bytes read since the start. Written by the receiver (release), read by the sender (acquire).
  alignas(kInterferenceBytes) std::atomic<uint64_t> head;
  // Set by a sender that waits for room. Cleared by the receiver, which then rings the sender's
  // bell.
  alignas(kInterferenceBytes) std::atomic<uint32_t> wants_room;
  // The ring's size, and whether the sender has joined. Set by the sender once, in this order,
  // before its first write.
  std::atomic<uint64_t> bytes;
  std::atomic<uint32_t> joined;
  // Set by the sender when it has written its last byte and leaves.
  std::atomic<uint32_t> left;
};

// The threads of a rank that its peers must wake after they have written or read bytes.
struct Bells {
  // Threads that wait for a message of their own. `sleepers` of them sleep on `waiters`.
  alignas(kInterferenceBytes) std::atomic<uint64_t> waiters;
  std::atomic<uint32_t> sleepers;
  // The server thread, which handles messages for which no thread waits. It sleeps on `server`.
  // `server_wants` is a Wants: for what to wake it.
  alignas(kInterferenceBytes) std::atomic<uint64_t> server;
  std::atomic<uint32_t> server_wants;
  // Set by the thread that sleeps on wires and on a pipe instead. Cleared by the rank that writes
  // into the pipe, which is the owner's descriptor `pipe`.
  alignas(kInterferenceBytes) std::atomic<uint32_t> polls;
  std::atomic<int32_t> pipe;
};
enum Wants : uint32_t { kNothing, kFullRings, kEverything };

struct InboxHead {
  uint64_t magic;
  uint64_t ranks;
  unsigned char nonce[kNonceBytes];
  // How many senders have joined. If it changes, the owner looks for the new senders.
  alignas(kInterferenceBytes) std::atomic<uint32_t> joined;
  // The number of the core on which the owner last waited, plus 1. 0: unknown.
  std::atomic<uint32_t> core;
  Bells bells;
};

// Untouched pages take no memory.
constexpr size_t kRingStride = kPageBytes + kWideRingBytes;
static_assert(sizeof(InboxHead) <= kPageBytes && sizeof(RingWords) <= kPageBytes, "layout");

// One ring as either of its ends. Each end uses its own part of the methods.
class Ring {
 public:
  Ring() = default;
  explicit Ring(char* base) : words(reinterpret_cast<RingWords*>(base)), data_(base + kPageBytes) {}

  // --- the sender's ---
  void choose_bytes(size_t bytes);
  // Return how many bytes may be written: exactly, if there is no room for the bytes `wanted`.
  size_t room(size_t wanted = kStepBytes) {
    if (at_ - other_ + wanted > bytes_ || other_ < abort_end_) {
      other_ = words->head.load(std::memory_order_acquire);  // pairs with release()
    }
    if (other_ < abort_end_) return 0;
    // The padding of a frame is not written, and may reach beyond the bytes that the receiver has
    // released.
    const uint64_t used = at_ - other_;
    return used < bytes_ ? bytes_ - used : 0;
  }
  void write(const FrameHead& head) {
    std::memcpy(data_ + place(), &head, sizeof(head));
    at_ += sizeof(head);
  }
  void write(const void* from, size_t nbytes);
  // Move to the beginning of the next frame. Used by both ends.
  void pad() { at_ = (at_ + kFrameAlign - 1) / kFrameAlign * kFrameAlign; }
  void publish() { words->tail.store(at_, std::memory_order_release); }  // pairs with available()
  // Abort the current frame, which the receiver then discards. There is no room for a further frame
  // until the receiver has passed it, so that a ring has at most one aborted frame.
  void abort_frame();

  // --- the receiver's ---
  void load_bytes() { bytes_ = words->bytes.load(std::memory_order_relaxed); }
  size_t available() {                                     // bytes that may be read
    other_ = words->tail.load(std::memory_order_acquire);  // pairs with publish()
    return other_ - at_;
  }
  FrameHead read_head() {
    FrameHead head;
    std::memcpy(&head, data_ + place(), sizeof(head));
    at_ += sizeof(head);
    return head;
  }
  void read(void* into, size_t nbytes, bool past_cache = false);
  // How many of the next `nbytes` bytes come before the position of an abort.
  size_t before_abort(size_t nbytes) const {
    const uint64_t cut = words->aborted_at.load(std::memory_order_relaxed);  // seen with `tail`
    return cut < at_ ? nbytes : std::min<size_t>(nbytes, cut - at_);
  }
  void skip(size_t nbytes) { at_ += nbytes; }
  void unread(size_t nbytes) { at_ -= nbytes; }
  void release() { words->head.store(at_, std::memory_order_release); }  // pairs with room()

  RingWords* words = nullptr;

 private:
  // A division would take longer than the copy of a small message.
  size_t place() const { return at_ & (bytes_ - 1); }

  char* data_ = nullptr;
  size_t bytes_ = kRingBytes;
  uint64_t at_ = 0;     // this end's position
  uint64_t other_ = 0;  // the other end's position, as last seen
  CopyOut copy_out_;
  uint64_t abort_end_ = 0;  // position of the frame after the aborted frame
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
  // Return 0 or an errno. `node`: the NUMA node of this rank, which reads the rings; -1: unknown.
  int create(int ranks, const unsigned char* nonce, int node);
  // No process can open the inbox afterwards. Processes that have opened it keep it.
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

// Another rank's inbox: the part that this rank writes.
class Outbox {
 public:
  // Map the memory that process `pid` holds open as `fd`; return 0 or an errno. EXDEV: the file
  // does not have this nonce, so `pid` names another process on this host.
  int attach(int pid, int fd, const unsigned char* nonce, int me, size_t ring_bytes);
  // Wake the owner's thread that sleeps on wires, if there is one.
  void ring_pipe() {
    if (head().bells.polls.load(std::memory_order_relaxed) != 0) write_to_pipe();
  }
  ~Outbox();
  Outbox() = default;
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;
  InboxHead& head() const { return *reinterpret_cast<InboxHead*>(head_.base()); }
  Ring ring;

 private:
  void write_to_pipe();

  int pid_ = 0;
  int pipe_ = -1;
  Mapping head_;
  Mapping ring_;
};

}  // namespace unisono
