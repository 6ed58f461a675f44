// The calls of a group whose data an MPI library moves: an agreement of all ranks, then a collective
// of the library.
//
// MPI has no time-outs, and cannot take an array back. So MPI gets an array only when all ranks have
// come. The agreement is in shared memory on one host, else an all_reduce of 4 numbers in memory of
// this object. A call whose wait is long returns Code::waiting. The caller then looks for lost
// ranks, aborts and the deadline, and goes on with the same call.
//
// Without the agreement in shared memory a thread makes all calls of MPI. The network between hosts
// may keep MPI_Test for ever, when a rank has died: Intel MPI then connects again and again.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/program.hpp"
#include "mpi/blocking_thread.hpp"
#include "mpi/call.hpp"
#include "mpi/doubling.hpp"
#include "mpi/shared_agreement.hpp"

namespace unisono {

class MPIGroup {
 public:
  // `test`: the address of MPI_Test. `agreement`: MPI_Iallreduce of 4 numbers, MIN.
  // `is_crowded`: there are more ranks than cores on this host. `shared` replaces `agreement`.
  MPIGroup(std::uintptr_t test, const MPICall& agreement, bool is_crowded,
           std::optional<SharedAgreement> shared = {});
  MPIGroup(const MPIGroup&) = delete;
  MPIGroup& operator=(const MPIGroup&) = delete;

  // Agree on `words` (fingerprint 0: the ranks have agreed already), then make the call `data`, if
  // there is one, or `doubling`. Code::waiting: call go_on().
  Status run(const MPICall& data, const Buffers& buffers, AgreementWords words, Idler* idler,
             const std::shared_ptr<Doubling>& doubling = {});
  // Wait for the call for another moment.
  Status go_on(Idler* idler = nullptr);

  // Whether the data of a call that took long are there. Then the caller must find out whether a
  // rank has given up the call before it goes on.
  bool has_arrived() const { return stage_ == Stage::arrived; }
  // Whether MPI has the caller's arrays.
  bool is_moving() const { return stage_ == Stage::moving; }
  // Give MPI no array of the call any more; return whether MPI has the arrays already.
  bool give_up();
  // Whether a call has begun and not ended: MPI may have memory of it.
  bool is_under_way() const {
    return is_in_mpi() || (stage_ != Stage::idle && stage_ != Stage::arrived);
  }
  // Whether the thread is in MPI.
  bool is_in_mpi() const { return thread_.is_busy(); }
  // The number of calls that have ended here.
  int64_t finished() const { return finished_.load(std::memory_order_relaxed); }

  // No call of C++ begins any more.
  void abort() { is_aborted_.store(true, std::memory_order_relaxed); }
  bool is_aborted() const { return is_aborted_.load(std::memory_order_relaxed); }
  void close() { thread_.close(); }

 private:
  // left: given up before MPI got an array.
  enum class Stage { idle, begun, agreeing, moving, ending, arrived, left };

  Status advance(Idler* idler);
  Status agree(Stage before, Stage stage, AgreementWords words);
  Status arrive();
  Status end();
  Status move(Stage before);
  Status begin(const MPICall& call);
  bool enter(Stage before, Stage stage);
  bool is_shared() const {
    return shared_ && (stage_ == Stage::agreeing || stage_ == Stage::ending);
  }
  int test(bool* is_done);
  int64_t look_ns() const;
  Status wait(Idler* idler);
  Status poll(Idler* idler);
  Status compare() const;
  Status failed(int error);

  const MPITest test_;
  const bool is_crowded_;
  MPICall agreement_;
  std::optional<SharedAgreement> shared_;
  // The fingerprint, then the word of the sizes, each followed by its complement. MPI may write them
  // and read `data_` also after a time-out.
  std::array<uint64_t, 4> agreed_{};
  MPICall data_;
  std::shared_ptr<Doubling> doubling_;
  char* array_ = nullptr;  // of `doubling_`
  // For `doubling_`. A program may prepare a thousand calls, and only one of them runs.
  std::vector<char> received_;
  std::array<uint64_t, 2> request_{};  // an int or a pointer
  AgreementWords words_{};
  std::atomic<Stage> stage_{Stage::idle};
  bool is_begun_ = false;  // the thread has a part of the call, or its status was not taken
  Status status_{};        // of that part
  bool blocks_ = false;
  bool counts_ = false;     // whether the call counts as finished when its data are there
  int64_t began_ns_ = 0;    // the first look at the clock in this stage; 0: not yet
  int64_t started_ns_ = 0;  // before the agreement
  int64_t begun_ = 0;
  std::atomic<int64_t> finished_{0};
  std::atomic<bool> is_aborted_{false};
  BlockingThread thread_;
};

// One kind of call of such a group.
class MPIRunner final : public Runner {
 public:
  MPIRunner(std::shared_ptr<MPIGroup> group, const MPICall& call)
      : group_(std::move(group)), call_(call) {}
  MPIRunner(std::shared_ptr<MPIGroup> group, std::shared_ptr<Doubling> doubling)
      : group_(std::move(group)), doubling_(std::move(doubling)) {}

  // Ignores the program and the time-out.
  Status run(const Program& /*program*/, const Buffers& buffers, ReduceFns /*reduce*/,
             AgreementWords words, int64_t /*timeout_ns*/, Idler* idler = nullptr) override {
    return group_->run(call_, buffers, words, idler, doubling_);
  }
  void abort() override { group_->abort(); }
  bool is_aborted() const override { return group_->is_aborted(); }

 private:
  std::shared_ptr<MPIGroup> group_;
  MPICall call_;
  std::shared_ptr<Doubling> doubling_;
};

}  // namespace unisono
