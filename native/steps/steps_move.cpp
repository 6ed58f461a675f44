// The messages of a program: posting, waiting, and the memory that they use meanwhile.
#include <algorithm>
#include <new>

#include "core/clock.hpp"
#include "steps/steps.hpp"

namespace unisono {

namespace {

// How far ahead receives are posted: in steps, in bytes, and in chunks to be reduced. With blocks
// of 16 MiB, receives from several ranks are posted, so that the first rank that is ready can send.
constexpr size_t kAheadSteps = 32;
constexpr size_t kAheadBytes = 32 * 1024 * 1024;
constexpr size_t kStagingBuffers = 4;

bool receives(int64_t op) {
  return op == kRecv || op == kRecvReduce || op == kRead || op == kReadReduce;
}

}  // namespace

// ---- operations ---------------------------------------------------------------------------

Operation* Steps::new_op(int peer, int64_t tag, size_t nbytes) {
  if (free_ops_.empty()) {
    free_ops_.reserve(ops_.size() + 1);  // so that end_run() needs no memory
    ops_.emplace_back();
    free_ops_.push_back(&ops_.back());
  }
  Operation* op = free_ops_.back();
  free_ops_.pop_back();
  op->~Operation();
  new (op) Operation();
  op->peer = ranks_[static_cast<size_t>(peer)];
  op->envelope = {context_, tag, nbytes, 0};
  return op;
}

void Steps::recycle(const Receiving& receiving) {
  free_ops_.push_back(receiving.op);
  if (receiving.staging != nullptr) free_staging_.push_back(receiving.staging);
}

void Steps::send_to(int peer, int64_t tag, const char* data, size_t nbytes) {
  size_t sent = 0;
  do {
    const size_t piece = std::min(kChunkBytes, nbytes - sent);
    Operation* op = new_op(peer, tag, piece);
    op->is_send = true;
    op->data = const_cast<char*>(data + sent);  // only read
    sends_.push_back({op, data + sent, data + sent + piece});
    holds_sends_ ? held_sends_.push_back(op) : begin_send(*op);
    sent += piece;
  } while (sent < nbytes);
}

void Steps::begin_send(Operation& op) {
  messages_->programs().begin(op);
  // Kept, because a wait for another rank would not detect that this rank is gone.
  // acquire, here and below: pairs with Operations::finish
  if (op.done.load(std::memory_order_acquire) && op.code != Code::ok) send_failure_ = status_of(op);
}

// Begin the collected sends. Messages to one rank go into one packet. To pass a packet to the
// network costs as much as all other work on a small message.
void Steps::begin_held_sends() {
  holds_sends_ = false;
  for (auto at = held_sends_.begin(); at != held_sends_.end(); ++at) {
    (*at)->more = std::any_of(at + 1, held_sends_.end(),
                              [&](const Operation* next) { return next->peer == (*at)->peer; });
    begin_send(**at);
  }
  held_sends_.clear();
}

void Steps::send(const Step& step) {
  const char* data = address_of(step.src_buf, step.src_off);
  if (step.peer >= 0) return send_to(static_cast<int>(step.peer), program_tag(), data, bytes(step));
  const int p = static_cast<int>(ranks_.size());
  for (int i = 1; i < p; ++i) send_to((rank_ + i) % p, program_tag(), data, bytes(step));
}

// ---- receiving ahead ----------------------------------------------------------------------

void Steps::post_ahead() {
  while (post_next()) continue;
}

// Post the next piece of the next receive. False: not possible now.
bool Steps::post_next() {
  while (next_ < count_ && !receives(steps_[next_].op)) ++next_;
  if (next_ == count_ || next_ > at_ + kAheadSteps) return false;
  const Step& step = steps_[next_];
  const size_t nbytes = std::min(kChunkBytes, bytes(step) - next_byte_);
  if (expected_bytes_ != 0 && expected_bytes_ + nbytes > kAheadBytes) return false;
  char* into = address_of(step.dst_buf, step.dst_off) + next_byte_;
  char* staging = nullptr;
  if (step.op == kRecvReduce || step.op == kReadReduce) {
    if (free_staging_.empty()) {
      if (staging_.size() == kStagingBuffers) return false;
      staging_.reserve(kStagingBuffers);
      free_staging_.reserve(kStagingBuffers);
      staging_.emplace_back(new char[kChunkBytes]);
      free_staging_.push_back(staging_.back().get());
    }
    into = staging = free_staging_.back();
  } else if (is_in_use(into, nbytes)) {
    return false;
  }
  // Before the operation begins, so that end_run() finds it.
  receives_.push_back(
    {new_op(static_cast<int>(step.peer), program_tag(), nbytes), staging, nbytes});
  if (staging != nullptr) free_staging_.pop_back();
  receives_.back().op->data = into;
  messages_->programs().begin(*receives_.back().op);
  expected_bytes_ += nbytes;
  pass_posted(nbytes);
  return true;
}

// Go on to the piece to post after `nbytes` of step `next_`. The operands of an accumulation take
// turns: a piece of each of them, so that the sum stays in the cache.
void Steps::pass_posted(size_t nbytes) {
  if (next_ >= turns_end_) {
    turns_first_ = next_;
    while (reduce_.is_wide() && is_in_sum(turns_first_)) --turns_first_;
    turns_end_ = end_of_sum(turns_first_);
    if (!takes_turns(turns_first_, turns_end_)) {
      turns_first_ = next_;
      turns_end_ = next_ + 1;
    }
  }
  const size_t first = turns_first_, end = turns_end_;
  const size_t done = next_byte_ + nbytes;
  const auto skip_local = [&] {
    while (next_ < end && !receives(steps_[next_].op)) ++next_;
  };
  ++next_;
  skip_local();
  if (next_ < end) return;
  next_byte_ = 0;
  if (done == bytes(steps_[first])) return;
  next_byte_ = done;
  next_ = first;
  skip_local();
}

// Whether a step from now up to `next_` reads or writes this memory.
bool Steps::is_in_use(const char* first, size_t nbytes) const {
  const char* end = first + nbytes;
  for (const Sending& sending : sends_) {
    const bool done = sending.op->done.load(std::memory_order_acquire);  // pairs with finish()
    if (!done && overlaps(first, end, sending.first, sending.end)) return true;
  }
  for (size_t i = at_; i < next_; ++i) {
    const Step& step = steps_[i];
    const char* from = step.src_buf < 0 ? nullptr : address_of(step.src_buf, step.src_off);
    const char* into = step.dst_buf < 0 ? nullptr : address_of(step.dst_buf, step.dst_off);
    if (from != nullptr && overlaps(first, end, from, from + bytes(step))) return true;
    if (into != nullptr && overlaps(first, end, into, into + bytes(step))) return true;
  }
  return false;
}

// ---- waiting ------------------------------------------------------------------------------

// Wait for the sends that read [first, end); nullptr: for all sends.
Status Steps::wait_for_sends(const char* first, const char* end) {
  size_t kept = 0;
  Status status{};
  for (const Sending& sending : sends_) {
    const bool needed = first == nullptr || overlaps(first, end, sending.first, sending.end);
    const bool done = sending.op->done.load(std::memory_order_acquire);  // pairs with finish()
    if (!status.is_ok() || (!needed && !done)) {
      sends_[kept++] = sending;
      continue;
    }
    status = wait(*sending.op);
    if (status.is_ok()) {
      free_ops_.push_back(sending.op);
    } else {
      sends_[kept++] = sending;
    }
  }
  sends_.resize(kept);
  return status;
}

Status Steps::wait(Operation& op) {
  if (!send_failure_.is_ok()) return send_failure_;
  if (!op.done.load(std::memory_order_acquire)) {  // pairs with finish()
    if (recorder_ != nullptr) recorder_->begin_wait(status_of(op).peer);
    const Code code = wait_until_done(op);
    if (recorder_ != nullptr) recorder_->waits.end();
    if (code != Code::ok) return {code, status_of(op).peer};
  }
  return op.code == Code::ok ? Status{} : status_of(op);
}

Code Steps::wait_until_done(Operation& op) {
  if (idler_ != nullptr) {
    idler_->idle();
    idler_ = nullptr;
  }
  if (late_ && !late_called_) {
    const Code code = messages_->programs().wait(op, std::max<int64_t>(late_at_ns_ - now_ns(), 0));
    if (code != Code::timeout) return code;
    late_called_ = true;
    late_();
  }
  return messages_->programs().wait(op, std::max<int64_t>(deadline_ns_ - now_ns(), 0));
}

Status Steps::status_of(const Operation& op) const {
  // Not `source`, which another thread may write until the operation is done.
  const auto found = std::find(ranks_.begin(), ranks_.end(), op.peer);
  const int peer = found == ranks_.end() ? -1 : static_cast<int>(found - ranks_.begin());
  // Both ends have agreed on the sizes, so a different size means a different program.
  return {op.code == Code::mismatch ? Code::bad_program : op.code, peer};
}

}  // namespace unisono
