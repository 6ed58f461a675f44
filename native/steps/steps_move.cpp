// The messages of a program: posting, waiting, and the memory that they occupy meanwhile.
#include <algorithm>
#include <new>

#include "core/clock.hpp"
#include "steps/steps.hpp"

namespace unisono {

namespace {

// A message is sent in pieces of this size, at both ends. Larger: the reduction of a piece waits
// longer for its end. Smaller: more turns between sending, receiving and reducing; at 64 KiB two
// hosts took twice as long for 64 MiB as at 512 KiB.
constexpr size_t kChunkBytes = 1024 * 1024;

// How far ahead receives are posted: in steps, in bytes, and in chunks that are to be reduced. Of
// blocks of 16 MiB those of several ranks are, so that whoever sends can.
constexpr size_t kAheadSteps = 32;
constexpr size_t kAheadBytes = 32 * kChunkBytes;
constexpr size_t kSpares = 4;

bool receives(int64_t op) {
  return op == kRecv || op == kRecvReduce || op == kRead || op == kReadReduce;
}

}  // namespace

// ---- operations ---------------------------------------------------------------------------

Op* Steps::new_op(int peer, int64_t tag, size_t nbytes) {
  if (free_ops_.empty()) {
    free_ops_.reserve(ops_.size() + 1);  // end() must not need memory
    ops_.emplace_back();
    free_ops_.push_back(&ops_.back());
  }
  Op* op = free_ops_.back();
  free_ops_.pop_back();
  op->~Op();
  new (op) Op();
  op->peer = ranks_[static_cast<size_t>(peer)];
  op->envelope = {context_, tag, nbytes, 0};
  return op;
}

void Steps::recycle(const Receiving& receiving) {
  free_ops_.push_back(receiving.op);
  if (receiving.spare != nullptr) free_spares_.push_back(receiving.spare);
}

void Steps::send_to(int peer, int64_t tag, const char* data, size_t nbytes) {
  for (size_t sent = 0; sent < nbytes;) {
    const size_t piece = std::min(kChunkBytes, nbytes - sent);
    Op* op = new_op(peer, tag, piece);
    op->is_send = true;
    op->data = const_cast<char*>(data + sent);  // only read
    sends_.push_back({op, data + sent, data + sent + piece});
    holds_ ? held_.push_back(op) : begin_send(*op);
    sent += piece;
  }
}

void Steps::begin_send(Op& op) {
  messages_->begin(op);
  // Who waits for another rank would not hear that this one is gone.
  if (op.done.load(std::memory_order_acquire) && op.code != Code::ok) broken_ = status_of(op);
}

// Begin what was held. What goes to one rank goes in one packet: to hand that to the network costs as
// much as all the rest of a small message.
void Steps::let_go() {
  holds_ = false;
  for (auto at = held_.begin(); at != held_.end(); ++at) {
    (*at)->more = std::any_of(at + 1, held_.end(),
                              [&](const Op* next) { return next->peer == (*at)->peer; });
    begin_send(**at);
  }
  held_.clear();
}

void Steps::send(const Step& step) {
  const char* data = place(step.src_buf, step.src_off);
  if (step.peer >= 0) return send_to(static_cast<int>(step.peer), program_tag(), data, bytes(step));
  const int p = static_cast<int>(ranks_.size());
  for (int i = 1; i < p; ++i) send_to((rank_ + i) % p, program_tag(), data, bytes(step));
}

// ---- receiving ahead ----------------------------------------------------------------------

void Steps::post_ahead() {
  while (post_next()) continue;
}

// Post the next piece of the next receive; false: not now.
bool Steps::post_next() {
  while (next_ < count_ && (!receives(steps_[next_].op) || steps_[next_].count == 0)) ++next_;
  if (next_ == count_ || next_ > at_ + kAheadSteps) return false;
  const Step& step = steps_[next_];
  const size_t nbytes = std::min(kChunkBytes, bytes(step) - next_byte_);
  if (expected_bytes_ != 0 && expected_bytes_ + nbytes > kAheadBytes) return false;
  char* into = place(step.dst_buf, step.dst_off) + next_byte_;
  char* spare = nullptr;
  if (step.op == kRecvReduce || step.op == kReadReduce) {
    if (free_spares_.empty()) {
      if (spares_.size() == kSpares) return false;
      spares_.reserve(kSpares);
      free_spares_.reserve(kSpares);
      spares_.emplace_back(new char[kChunkBytes]);
      free_spares_.push_back(spares_.back().get());
    }
    into = spare = free_spares_.back();
  } else if (is_busy(into, nbytes)) {
    return false;
  }
  // First of all where end() finds it.
  receives_.push_back({new_op(static_cast<int>(step.peer), program_tag(), nbytes), spare, nbytes});
  if (spare != nullptr) free_spares_.pop_back();
  receives_.back().op->data = into;
  messages_->begin(*receives_.back().op);
  expected_bytes_ += nbytes;
  next_byte_ += nbytes;
  if (next_byte_ == bytes(step)) {
    ++next_;
    next_byte_ = 0;
  }
  return true;
}

// Whether a step from now to `next_` still needs what is in this memory, or writes there.
bool Steps::is_busy(const char* first, size_t nbytes) const {
  const char* end = first + nbytes;
  for (const Sending& sending : sends_) {
    const bool done = sending.op->done.load(std::memory_order_acquire);  // release: finish()
    if (!done && overlaps(first, end, sending.first, sending.end)) return true;
  }
  for (size_t i = at_; i < next_; ++i) {
    const Step& step = steps_[i];
    const char* from = step.src_buf < 0 ? nullptr : place(step.src_buf, step.src_off);
    const char* into = step.dst_buf < 0 ? nullptr : place(step.dst_buf, step.dst_off);
    if (from != nullptr && overlaps(first, end, from, from + bytes(step))) return true;
    if (into != nullptr && overlaps(first, end, into, into + bytes(step))) return true;
  }
  return false;
}

// ---- waiting ------------------------------------------------------------------------------

// Wait for the sends that read [first, end); for all if nullptr.
Status Steps::settle(const char* first, const char* end) {
  size_t kept = 0;
  Status status{};
  for (const Sending& sending : sends_) {
    const bool needed = first == nullptr || overlaps(first, end, sending.first, sending.end);
    const bool done = sending.op->done.load(std::memory_order_acquire);
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

Status Steps::wait(Op& op) {
  if (!broken_.is_ok()) return broken_;
  if (!op.done.load(std::memory_order_acquire)) {
    if (idler_ != nullptr) {
      idler_->idle();
      idler_ = nullptr;
    }
    Code code = Code::timeout;
    if (late_ && !late_told_) {
      code = messages_->wait(op, std::max<int64_t>(late_at_ns_ - now_ns(), 0));
      if (code == Code::timeout) {
        late_told_ = true;
        late_();
      }
    }
    if (code == Code::timeout) {
      code = messages_->wait(op, std::max<int64_t>(deadline_ns_ - now_ns(), 0));
    }
    if (code != Code::ok) return {code, status_of(op).peer};
  }
  return op.code == Code::ok ? Status{} : status_of(op);
}

Status Steps::status_of(const Op& op) const {
  // Not its `source`, which another thread may be writing until it is done.
  const auto found = std::find(ranks_.begin(), ranks_.end(), op.peer);
  const int peer = found == ranks_.end() ? -1 : static_cast<int>(found - ranks_.begin());
  // A size that both ends have agreed on differs: not the same program.
  return {op.code == Code::mismatch ? Code::bad_program : op.code, peer};
}

}  // namespace unisono
