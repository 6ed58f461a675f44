#include "mpi/group.hpp"

#include <algorithm>
#include <ctime>
#include <exception>
#include <new>

#include <sched.h>

#include "core/clock.hpp"

namespace unisono {

namespace {

// How long a call waits before the caller looks for lost ranks. Longer: they are detected later.
// While data move, the caller's wait for the interpreter lock would slow them down.
constexpr int64_t kLookNs = 5'000'000;
constexpr int64_t kMovingLookNs = 20'000'000;

// A rank that gives up a call keeps its arrays this long; see `_SETTLED_S` in adapters/mpi/engine.py.
constexpr int64_t kSettledNs = 50'000'000;

// Tests between two looks at the clock. A test takes 0.05 to 0.2 us, and moves data.
constexpr int kTests = 64;

// How long a wait only tests. Then each look yields the core. After the second limit a wait for a
// late rank sleeps, because that rank needs the core more. Data move only in tests.
constexpr int64_t kTestNs = 200'000;
constexpr int64_t kYieldNs = 5'000'000;
constexpr int64_t kMostSleepNs = 1'000'000;

void sleep_for(int64_t ns) {
  const timespec time{0, static_cast<long>(ns)};
  nanosleep(&time, nullptr);
}

}  // namespace

MPIGroup::MPIGroup(std::uintptr_t test, const MPICall& agreement, bool is_crowded,
                   std::optional<SharedAgreement> shared)
    : test_(reinterpret_cast<MPITest>(test)),
      is_crowded_(is_crowded),
      agreement_(agreement),
      shared_(std::move(shared)) {
  agreement_.set(agreement_.output_at, agreed_.data());
  agreement_.set(agreement_.request_at, request_.data());
}

Status MPIGroup::run(const MPICall& data, const Buffers& buffers, AgreementWords words,
                     Idler* idler, const std::shared_ptr<Doubling>& doubling) {
  // The caller left the last call, for which MPI still uses the memory of this object.
  if (stage_ != Stage::idle) return {Code::closed};
  data_ = data;
  data_.set(data_.input_at, buffers.input);
  data_.set(data_.output_at, buffers.output);
  data_.set(data_.request_at, request_.data());
  doubling_ = doubling;
  array_ = buffers.output;
  words_ = words;
  counts_ = words.fingerprint != 0;
  if (counts_) {
    ++begun_;
    started_ns_ = now_ns();
  }
  stage_ = Stage::begun;
  return go_on(idler);
}

Status MPIGroup::go_on(Idler* idler) {
  if (shared_) return advance(idler);
  if (!is_begun_) {
    try {
      // The owner keeps the group while a call is under way.
      thread_.begin([this] {
        status_ = advance(nullptr);
        return 0;
      });
    } catch (const std::exception&) {  // no thread, or no memory for it
      stage_ = Stage::idle;
      return {Code::no_memory};
    }
    is_begun_ = true;
  }
  if (idler != nullptr) idler->idle();
  if (!thread_.wait(look_ns())) return {Code::waiting};
  is_begun_ = false;
  return status_;
}

bool MPIGroup::give_up() {
  for (Stage before : {Stage::begun, Stage::agreeing}) {
    stage_.compare_exchange_strong(before, Stage::left);
  }
  return is_moving();
}

// Go on with the call until it has ended, or a moment is over.
Status MPIGroup::advance(Idler* idler) {
  if (stage_ == Stage::begun) {
    const Status status =
      counts_ ? agree(Stage::begun, Stage::agreeing, words_) : move(Stage::begun);
    if (!status.is_ok()) return status;
  }
  if (stage_ == Stage::agreeing) {
    Status status = wait(idler);
    if (!status.is_ok()) return status;
    status = compare();
    if (!status.is_ok() || (data_.function == 0 && !doubling_)) {
      enter(Stage::agreeing, Stage::idle);
      return status;
    }
    status = move(Stage::agreeing);
    if (!status.is_ok()) return status;
  }
  if (stage_ == Stage::moving) {
    if (const Status status = wait(idler); !status.is_ok()) return status;
    if (!data_.ends_together) return arrive();
    const Status status = agree(Stage::moving, Stage::ending, {1, 1});
    if (!status.is_ok()) return status;
  }
  if (stage_ == Stage::ending) {
    if (const Status status = wait(idler); !status.is_ok()) return status;
    return arrive();
  }
  return stage_ == Stage::arrived ? end() : Status{Code::closed};
}

// The data are there.
Status MPIGroup::arrive() {
  stage_ = Stage::arrived;
  return now_ns() - started_ns_ > kSettledNs ? Status{Code::waiting} : end();
}

Status MPIGroup::end() {
  stage_ = Stage::idle;
  if (counts_) finished_.store(begun_, std::memory_order_relaxed);
  return {};
}

// Begin an agreement: what ends when all ranks have begun it.
Status MPIGroup::agree(Stage before, Stage stage, AgreementWords words) {
  if (!enter(before, stage)) return {Code::closed};
  if (shared_) {
    shared_->enter(words);
    return {};
  }
  agreed_ = {words.fingerprint, ~words.fingerprint, words.even, ~words.even};
  return begin(agreement_);
}

// Give MPI the arrays.
Status MPIGroup::move(Stage before) {
  if (doubling_ && received_.size() < doubling_->nbytes()) {
    try {
      received_.resize(doubling_->nbytes());
    } catch (const std::bad_alloc&) {
      enter(before, Stage::idle);
      return {Code::no_memory};
    }
  }
  if (!enter(before, Stage::moving)) return {Code::closed};
  if (!doubling_) return begin(data_);
  const int error = doubling_->begin(array_, received_.data());
  return error == 0 ? Status{} : failed(error);
}

// Whether the caller has not given up before.
bool MPIGroup::enter(Stage before, Stage stage) {
  if (!stage_.compare_exchange_strong(before, stage)) return false;
  blocks_ = false;
  began_ns_ = 0;
  return true;
}

Status MPIGroup::begin(const MPICall& call) {
  blocks_ = call.blocks();
  if (blocks_ && shared_) {
    try {
      thread_.begin([call] { return call.make(); });
    } catch (const std::exception&) {  // no thread, or no memory for it
      stage_ = Stage::idle;
      return {Code::no_memory};
    }
    return {};
  }
  const int error = call.make();
  return error == 0 ? Status{} : failed(error);
}

Status MPIGroup::failed(int error) {
  // Another message of the call may still be under way.
  if (!is_moving() || !doubling_ || !doubling_->is_under_way()) stage_ = Stage::idle;
  return {Code::library, error};
}

// The ranks have reduced the words and their complements with MIN. So a word is equal on all ranks
// if its least value is the complement of its least complement.
Status MPIGroup::compare() const {
  if (shared_) return shared_->compare();
  if (agreed_[0] != ~agreed_[1]) return {Code::mismatch};
  // 0 is the word of sizes that are not even, even if all ranks have it.
  if (agreed_[2] == 0 || agreed_[2] != ~agreed_[3]) return {Code::uneven};
  return {};
}

int64_t MPIGroup::look_ns() const { return is_moving() ? kMovingLookNs : kLookNs; }

Status MPIGroup::wait(Idler* idler) {
  if (!blocks_) return poll(idler);
  // This is the thread then, and the call has returned.
  if (!shared_) return {};
  if (idler != nullptr) idler->idle();
  if (!thread_.wait(look_ns())) return {Code::waiting};
  return thread_.error() == 0 ? Status{} : failed(thread_.error());
}

// Set whether the stage is over; return MPI's error.
int MPIGroup::test(bool* is_done) {
  if (is_shared()) {
    *is_done = shared_->is_complete();
    return 0;
  }
  if (is_moving() && doubling_) return doubling_->test(test_, is_done);
  int flag = 0;
  alignas(16) std::array<char, kStatusBytes> status;
  const int error = test_(request_.data(), &flag, status.data());
  *is_done = flag != 0;
  return error;
}

Status MPIGroup::poll(Idler* idler) {
  int64_t end_ns = 0;
  for (int tests = 1;; ++tests) {
    bool is_done = false;
    if (const int error = test(&is_done); error != 0) return failed(error);
    if (is_done) return {};
    if (is_shared()) cpu_pause();
    if (tests % kTests != 0) continue;
    if (is_shared()) {
      if (const int error = shared_->progress(); error != 0) return failed(error);
    }
    const int64_t now = now_ns();
    if (end_ns == 0) {
      end_ns = now + look_ns();
      if (began_ns_ == 0) began_ns_ = now;
      if (idler != nullptr) idler->idle();
    }
    if (now >= end_ns) return {Code::waiting};
    const int64_t waited_ns = now - began_ns_;
    if (waited_ns > kYieldNs && !is_moving()) {
      sleep_for(std::min(waited_ns / 50, kMostSleepNs));
    } else if (is_crowded_ || waited_ns > kTestNs) {
      sched_yield();
    }
  }
}

}  // namespace unisono
