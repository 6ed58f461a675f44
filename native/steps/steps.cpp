// Runs a program of messages in the order of its steps. steps_move.cpp has the messages.
#include "steps/steps.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "core/clock.hpp"

namespace unisono {

namespace {

// How many bytes a rank may send before all ranks have agreed, to save a latency. The bytes lie at
// a rank that may be in another call, until that is detected. At least the size of one message.
constexpr size_t kEarlyBytes = 64 * 1024;

}  // namespace

Steps::Steps(std::shared_ptr<Messages> messages, uint64_t context, std::vector<int> ranks,
             const std::vector<int>& hosts, Group* agreement)
    : messages_(std::move(messages)),
      context_(context),
      ranks_(std::move(ranks)),
      agreement_(agreement) {
  const auto me = std::find(ranks_.begin(), ranks_.end(), messages_->rank());
  rank_ = static_cast<int>(me - ranks_.begin());
  const auto first_on = [&hosts](int host) {
    return static_cast<int>(std::find(hosts.begin(), hosts.end(), host) - hosts.begin());
  };
  leader_ = first_on(hosts[static_cast<size_t>(rank_)]);
  for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank) {
    const int leader = first_on(hosts[static_cast<size_t>(rank)]);
    if (leader == rank) leaders_.push_back(rank);
    if (leader == rank_ && rank != rank_) followers_.push_back(rank);
  }
}

char* Steps::address_of(int64_t buf, int64_t off) const {
  if (buf == kScratch) return buffers_.scratch + off * itemsize_;
  const ArrayList& parts = buf == kInput ? buffers_.input_list : buffers_.output_list;
  if (parts.at != nullptr) return parts.at[off / parts.count] + off % parts.count * itemsize_;
  // INPUT is never written: step_fits() checks it.
  char* base = buf == kInput ? const_cast<char*>(buffers_.input) : buffers_.output;
  return base + off * itemsize_;
}

Status Steps::run(const Program& program, const Buffers& buffers, ReduceFns reduce,
                  AgreementWords words, int64_t timeout_ns, Idler* idler) {
  const int ranks = static_cast<int>(ranks_.size());
  for (size_t i = 0; i < program.step_count && !program.is_checked; ++i) {
    const Step* step = program.steps + i;
    if (!step_fits(*step, 0, 0, buffers, rank_, ranks) ||
        !sum_fits(step, program.steps + program.step_count)) {
      return {Code::bad_program, rank_};
    }
  }
  itemsize_ = buffers.itemsize;
  reduce_ = reduce;
  shared_by_ = team_for(std::max(buffers.input_count, buffers.output_count) * itemsize_);
  Status status;
  try {
    gather_lists(program, buffers);
    begin_run(timeout_ns, idler);
    status = agree_and_execute(program, words);
  } catch (const std::bad_alloc&) {
    status = {Code::no_memory, rank_};
  }
  end_run();
  const bool agreed_not = status.code == Code::mismatch || status.code == Code::uneven;
  if (status.is_ok() || agreed_not) finished_.store(epoch_, std::memory_order_relaxed);
  if (status.is_ok()) scatter_lists(buffers);
  return status;
}

// Whether each step uses only one array of the list in this buffer.
bool Steps::stays_within_arrays(const Program& program, int64_t buf, const ArrayList& parts) {
  const auto inside = [&parts](int64_t off, int64_t count) {
    return count != 0 && off % parts.count + count <= parts.count;
  };
  return parts.count != 0 &&
         std::all_of(program.steps, program.steps + program.step_count, [&](const Step& step) {
           return (step.src_buf != buf || inside(step.src_off, step.count)) &&
                  (step.dst_buf != buf || inside(step.dst_off, step.count));
         });
}

// Copy a list into one array if a message spans several of its arrays.
void Steps::gather_lists(const Program& program, const Buffers& given) {
  buffers_ = given;
  const auto gather = [&](int64_t buf, ArrayList* parts, int64_t total, std::vector<char>* into) {
    if (parts->at == nullptr || stays_within_arrays(program, buf, *parts)) return false;
    into->resize(static_cast<size_t>(total * itemsize_));
    const int64_t part = parts->count * itemsize_;
    for (int64_t i = 0; part != 0 && i < total / parts->count; ++i) {
      copy(into->data() + i * part, parts->at[i], static_cast<size_t>(part));
    }
    parts->at = nullptr;
    return true;
  };
  if (gather(kInput, &buffers_.input_list, given.input_count, &joined_input_)) {
    buffers_.input = joined_input_.data();
  }
  if (gather(kOutput, &buffers_.output_list, given.output_count, &joined_output_)) {
    buffers_.output = joined_output_.data();
  }
}

// Copy the array that replaced a list back into the list.
void Steps::scatter_lists(const Buffers& given) const {
  const ArrayList& parts = given.output_list;
  const bool is_joined = parts.at != buffers_.output_list.at;
  if (!is_joined || given.output_is_readonly) return;
  const int64_t part = parts.count * itemsize_;
  for (int64_t i = 0; part != 0 && i < given.output_count / parts.count; ++i) {
    copy(parts.at[i], joined_output_.data() + i * part, static_cast<size_t>(part));
  }
}

Status Steps::agree_and_execute(const Program& program, AgreementWords words) {
  steps_ = program.steps;
  count_ = program.step_count;
  uint64_t even = words.even;
  if (words.fingerprint != 0 && agreement_ != nullptr) {
    // Not a new epoch yet: ranks with uneven sizes may have given the call to another runner.
    if (idler_ != nullptr) idler_->idle();
    idler_ = nullptr;
    const int64_t left_ns = std::max<int64_t>(deadline_ns_ - now_ns(), 0);
    const Status status = agreement_->agree(words.fingerprint, &even, left_ns);
    if (!status.is_ok()) return status;
    if (even == 0) return {Code::uneven, rank_};
  }
  ++epoch_;
  if (words.fingerprint != 0 && agreement_ == nullptr) {
    Status status = agree(words, &even);
    if (status.is_ok() && even == 0) status = {Code::uneven, rank_};
    if (!status.is_ok()) {
      const bool ended = status.code == Code::mismatch || status.code == Code::uneven;
      // The other ranks must receive the verdict before this rank raises.
      for (size_t i = 0; i < sent_verdicts_.size() && ended; ++i) {
        const auto* verdict = reinterpret_cast<const char*>(&sent_verdicts_[i]);
        const Status sent = wait_for_sends(verdict, verdict + sizeof(Verdict));
        if (!sent.is_ok()) status = sent;
      }
      // No rank will receive the messages that were sent too early.
      messages_->programs().forget_tags(context_, program_tag());
      return status;
    }
  }
  return execute();
}

// The first rank of each host is its leader. A leader collects the words of its host's ranks,
// agrees with the other leaders and sends the result back. So as few messages as possible go
// between hosts.
Status Steps::agree(AgreementWords words, uint64_t* even) {
  Verdict verdict{words.fingerprint, words.even};
  Status status{};
  if (rank_ == leader_) {
    for (size_t i = 0; i < followers_.size() && status.is_ok(); ++i) {
      status = recv_verdict(followers_[i], &verdict);
    }
    if (status.is_ok()) status = agree_among_hosts(&verdict);
    for (size_t i = 0; i < followers_.size() && status.is_ok(); ++i) {
      send_verdict(followers_[i], verdict);
    }
  } else {
    send_verdict(leader_, verdict);
    send_early();
    status = recv_verdict(leader_, &verdict);
  }
  if (!status.is_ok()) return status;
  *even = verdict.even;
  return verdict.fingerprint == 0 ? Status{Code::mismatch} : Status{};
}

// In round k a leader sends its verdict 2^k leaders ahead, and receives a verdict from 2^k leaders
// before.
Status Steps::agree_among_hosts(Verdict* mine) {
  const size_t count = leaders_.size();
  const auto me = std::find(leaders_.begin(), leaders_.end(), rank_);
  const auto at = static_cast<size_t>(me - leaders_.begin());
  for (size_t distance = 1; distance < count; distance *= 2) {
    holds_sends_ = distance == 1;
    send_verdict(leaders_[(at + distance) % count], *mine);
    if (holds_sends_) {
      send_early();
      begin_held_sends();
    }
    const Status status = recv_verdict(leaders_[(at + count - distance) % count], mine);
    if (!status.is_ok()) return status;
  }
  return {};
}

void Steps::send_verdict(int peer, const Verdict& verdict) {
  sent_verdicts_.push_back(verdict);
  send_to(peer, agreement_tag(), reinterpret_cast<const char*>(&sent_verdicts_.back()),
          sizeof(Verdict));
}

Status Steps::recv_verdict(int peer, Verdict* into) {
  Verdict received{};
  Operation* op = new_op(peer, agreement_tag(), sizeof(received));
  op->data = reinterpret_cast<char*>(&received);
  Status status;
  try {
    messages_->programs().begin(*op);
    status = wait(*op);
  } catch (const std::bad_alloc&) {
    status = {Code::no_memory, rank_};
  }
  if (!status.is_ok()) messages_->programs().cancel(*op);  // the memory of `received` ends here
  free_ops_.push_back(op);
  into->merge(received);
  return status;
}

// Send the first messages of the program before the agreement is complete. A send writes no buffer.
void Steps::send_early() {
  const size_t eager = messages_->programs().eager_bytes();
  size_t sent = 0;
  for (size_t i = 0; i < count_; ++i) {
    const Step& step = steps_[i];
    if (step.op == kCopy) continue;
    if (!sends(step.op)) return;
    const char* data = address_of(step.src_buf, step.src_off);
    for (size_t j = 0; j < i; ++j) {  // the target of a pending copy cannot be sent yet
      const Step& copy = steps_[j];
      if (copy.op != kCopy) continue;
      const char* into = address_of(copy.dst_buf, copy.dst_off);
      const bool moves = into != address_of(copy.src_buf, copy.src_off);
      if (moves && overlaps(into, into + bytes(copy), data, data + bytes(step))) return;
    }
    sent += bytes(step) * (step.peer < 0 ? ranks_.size() - 1 : 1);
    // A larger message would stay in its ring or wire until its receiver comes, and block all
    // messages behind it.
    if (sent > std::max(kEarlyBytes, eager) || bytes(step) > eager) return;
    send(step);
    early_end_ = i + 1;
  }
}

Status Steps::execute() {
  for (at_ = 0; at_ < count_; ++at_) {
    const Step& step = steps_[at_];
    post_ahead();
    if (sends(step.op)) {
      if (at_ >= early_end_) send(step);
      continue;
    }
    const bool local = step.op == kCopy || step.op == kReduce;
    const bool is_sum = step.goes_on != 0 && step.count != 0 && reduce_.is_wide();
    const Status status = is_sum ? run_sum() : local ? compute(step) : receive(step);
    if (!status.is_ok()) return status;
  }
  return wait_for_sends(nullptr, nullptr);
}

Status Steps::compute(const Step& step) {
  char* into = address_of(step.dst_buf, step.dst_off);
  const char* from = address_of(step.src_buf, step.src_off);
  const Status status = wait_for_sends(into, into + bytes(step));
  if (!status.is_ok()) return status;
  if (step.op == kReduce) {
    reduce(step, into, from, bytes(step));
  } else if (into != from) {
    copy(into, from, bytes(step));
  }
  messages_->programs().try_progress();
  return {};
}

Status Steps::receive(const Step& step) {
  char* into = address_of(step.dst_buf, step.dst_off);
  char* const into_end = into + bytes(step);
  do {  // once, too, if the message has no elements
    if (receives_.empty()) {
      // Not posted yet, because a send still reads its memory.
      const Status status = wait_for_sends(into, into_end);
      if (!status.is_ok()) return status;
      post_ahead();
    }
    Receiving receiving = receives_.front();
    Status status = wait(*receiving.op);
    if (!status.is_ok()) return status;
    receives_.pop_front();
    expected_bytes_ -= receiving.nbytes;
    if (receiving.staging != nullptr) {
      status = wait_for_sends(into, into + receiving.nbytes);
      if (status.is_ok()) reduce(step, into, receiving.staging, receiving.nbytes);
    }
    recycle(receiving);
    if (!status.is_ok()) return status;
    into += receiving.nbytes;
    post_ahead();
    messages_->programs().try_progress();
  } while (into != into_end);
  return {};
}

// If two ranks swap their vectors, the lower rank's operand comes first, so that both ranks compute
// the same expression. Run.execute in core/engines/reference.py shows where that matters.
void Steps::reduce(const Step& step, char* into, const char* staging, size_t nbytes) const {
  const auto itemsize = static_cast<size_t>(itemsize_);
  const bool swaps = step.op == kRecvReduce && step.peer < rank_;
  share(shared_by_, nbytes / itemsize, itemsize, [&](size_t begin, size_t end) {
    char* const sum = into + begin * itemsize;
    const char* const other = staging + begin * itemsize;
    reduce_.step(sum, swaps ? other : sum, swaps ? sum : other, end - begin);
  });
}

void Steps::copy(char* into, const char* from, size_t nbytes) const {
  share(shared_by_, nbytes, 1,
        [&](size_t begin, size_t end) { copy_chunked(into + begin, from + begin, end - begin); });
}

void Steps::begin_run(int64_t timeout_ns, Idler* idler) {
  deadline_ns_ = now_ns() + timeout_ns;
  late_at_ns_ = deadline_ns_ - late_ns(timeout_ns);
  late_called_ = false;
  send_failure_ = {};
  idler_ = idler;
  at_ = early_end_ = next_ = next_byte_ = turns_first_ = turns_end_ = expected_bytes_ = 0;
}

// End all operations that use the caller's memory.
void Steps::end_run() {
  for (const Sending& sending : sends_) {
    messages_->programs().cancel(*sending.op);
    free_ops_.push_back(sending.op);
  }
  for (const Receiving& receiving : receives_) {
    messages_->programs().cancel(*receiving.op);
    recycle(receiving);
  }
  sends_.clear();
  receives_.clear();
  sent_verdicts_.clear();
  holds_sends_ = false;
  held_sends_.clear();
  messages_->programs().end_waits();
}

}  // namespace unisono
