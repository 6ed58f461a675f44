// Direct reading: readers copy large data in huge pages from the poster's own memory. One copy
// instead of two.
//
// A post is then the address of a value, and a loop runs once for all its repetitions. The ranks
// decide in the agreement, and each rank's posts must be worth it. No rank ends the call before all
// ranks have read or have reported that they cannot; in the second case all use slots.
//
// A rank that must leave earlier, for example because of a time-out, sets its word
// `abandoned_in`. A rank that may have read changed data finds the word afterwards and discards
// its result.
#include <cstring>
#include <new>

#include "core/clock.hpp"
#include "core/futex.hpp"
#include "shared/group.hpp"

namespace unisono {

namespace {

// Smallest post to read directly. Below it, process_vm_readv costs more than the copy.
constexpr int64_t kDirectBytes = 128 * 1024;

// How long a rank with a core of its own stays awake while other ranks read. To sleep and wake
// would add a fifth to a broadcast of 4 MiB, which is read in 75 us.
constexpr int64_t kReadingNs = 300'000;

}  // namespace

// This rank's word about direct reading in the call that it begins: bits of DirectReading.
uint32_t Group::direct_bits(const Program& program, const Buffers& buffers) {
  const int64_t most = std::max(buffers.input_count, buffers.output_count) * itemsize_;
  if (most < kDirectBytes || !fits_direct(program) || remote_reader_.is_disabled()) return 0;
  past_cache_ = buffers.output_count * itemsize_ >= static_cast<int64_t>(kStreamBytes);
  if (direct_pause_ != 0) {
    --direct_pause_;
    return 0;
  }
  bool posts = false;
  try {
    if (!is_worth_reading(program, &posts)) return 0;
  } catch (const std::bad_alloc&) {
    return 0;
  }
  return posts ? kWilling | kPostsAddresses : kWilling;
}

// Whether this rank's posts may and should be read directly. `has_posts`: set to whether there are
// any.
bool Group::is_worth_reading(const Program& program, bool* has_posts) {
  std::vector<Range> posts, writes;
  bool in_one_piece = true;
  const auto range = [&](int64_t buf, int64_t off, int64_t count) {
    int64_t together = count;
    const char* at = address_of(buf, off, &together);
    in_one_piece = in_one_piece && together == count;
    return Range{at, count * itemsize_};
  };
  input_.moved = output_.moved = 0;
  for (const Loop* loop = program.loops; loop != program.loops + program.loop_count; ++loop) {
    for (const Step* step = program.steps + loop->first; step != program.steps + loop->end;
         ++step) {
      const int64_t count = step->count * loop->repeats;
      if (sends(step->op)) {
        posts.push_back(range(step->src_buf, step->src_off, count));
      } else {
        writes.push_back(range(step->dst_buf, step->dst_off, count));
      }
      // all_gather in place copies a block onto itself
      if (step->op == kCopy && writes.back().at == range(step->src_buf, step->src_off, count).at) {
        writes.pop_back();
      }
    }
    advance(*loop, loop->repeats);
  }
  for (const Range& post : posts) {
    for (const Range& write : writes) {
      if (post.meets(write)) return false;
    }
    // The first loop moves nearly all elements.
    if (post.nbytes >= kDirectBytes && !pays_off(post, !writes.empty())) return false;
  }
  *has_posts = !posts.empty();
  return in_one_piece;
}

// Whether direct reading of this post saves time. The kernel copies small pages in three times the
// time. Up to a quarter in small pages it gains: arrays of NumPy begin and end with some. A rank
// that only posts loses: the ranks that read would wait for one copying core instead of two.
bool Group::pays_off(const Range& post, bool has_more_to_do) {
  if (ignores_pages_) return true;
  return has_more_to_do && huge_pages_.covers(post.at, static_cast<size_t>(post.nbytes));
}

// Whether this program only moves large data, by steps whose next repetition continues at the end
// of the last.
bool Group::fits_direct(const Program& program) const {
  bool is_large = false;
  for (const Loop* loop = program.loops; loop != program.loops + program.loop_count; ++loop) {
    const auto goes_on = [&](int64_t buf, int64_t count) {
      if (buf == kScratch) return false;
      return loop->repeats == 1 ||
             count == (buf == kInput ? loop->input_shift : loop->output_shift);
    };
    for (const Step* step = program.steps + loop->first; step != program.steps + loop->end;
         ++step) {
      const bool reads = step->op == kRecv || step->op == kRead;
      const bool copies = step->op == kCopy;
      if (!sends(step->op) && !reads && !copies) return false;
      if (!reads && !goes_on(step->src_buf, step->count)) return false;
      if (!sends(step->op) && !goes_on(step->dst_buf, step->count)) return false;
      const auto slot_end = static_cast<size_t>(step->slot_off * itemsize_) + sizeof(uint64_t);
      if (!copies && slot_end > segment_->slot_bytes()) return false;
      is_large = is_large || step->count * loop->repeats * itemsize_ >= kDirectBytes;
    }
  }
  return is_large;
}

// Post the address of a step's elements.
void Group::post_address(const Step& step, char* place) const {
  int64_t together = step.count;
  const auto at = reinterpret_cast<uintptr_t>(address_of(step.src_buf, step.src_off, &together));
  const auto address = static_cast<uint64_t>(at);
  std::memcpy(place, &address, sizeof(address));
}

// Read a step's elements from the address that their rank has posted.
void Group::read_posted(const Step& step, const char* place) {
  uint64_t from = 0;
  std::memcpy(&from, place, sizeof(from));
  int64_t count = step.count * repeats_;
  char* into = address_of(step.dst_buf, step.dst_off, &count);
  std::atomic<bool> is_read{remote_reader_.can_read_all()};
  share(shared_by_, static_cast<size_t>(count * itemsize_), 1, [&](size_t begin, size_t end) {
    if (is_read.load(std::memory_order_relaxed) &&
        !remote_reader_.read(static_cast<int>(step.peer), into + begin, from + begin,
                             end - begin)) {
      is_read.store(false, std::memory_order_relaxed);
    }
  });
  // That rank has ended, or the kernel forbids the read. No rank changes its posts before all know.
  if (!is_read.load(std::memory_order_relaxed)) has_failed_ = true;
}

// Wait until all ranks have read this rank's posts. Then check that no rank changed a post while it
// was read.
Status Group::finish_direct() {
  Status status = begin_epoch();
  if (!status.is_ok()) return status;
  enter_epoch({0, 1, has_failed_ ? kFailed : uint32_t{0}}, 0);
  const int64_t stays_until_ns = is_crowded_ || is_server ? 0 : now_ns() + kReadingNs;
  for (int i = 1; i < ranks_; ++i) {
    const int peer = other(i);
    for (int look = 1; !has_reached(peer, epoch() * kStages); ++look) {
      if (look % 64 == 0 && (now_ns() >= stays_until_ns || is_on_this_core(peer))) break;
      cpu_pause();
    }
    status = wait_for(peer, epoch() * kStages, -1);
    if (!status.is_ok()) return status;
  }
  // The reads are older than the following loads of `abandoned_in`. Pairs with the fence in
  // run().
  full_fence();
  bool has_failed = has_failed_;
  for (int i = 1; i < ranks_; ++i) {
    RankWords& theirs = segment_->words(other(i));
    const uint64_t abandoned_in = theirs.abandoned_in.load(std::memory_order_relaxed);
    if (abandoned_in != 0 && abandoned_in <= epoch()) {
      return {Code::aborted, other(i), -1};
    }
    has_failed |= (theirs.line(epoch()).agreement.direct & kFailed) != 0;
  }
  if (!has_failed) return {};
  remote_reader_.disable();
  return {Code::divided, rank_, -1};
}

}  // namespace unisono
