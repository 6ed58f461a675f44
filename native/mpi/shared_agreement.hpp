// The agreement of the ranks of one host, in memory that they share. It takes a third of the time
// of an all_reduce of MPI.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>

#include "core/agreement.hpp"
#include "core/status.hpp"
#include "mpi/call.hpp"
#include "shared/segment.hpp"

namespace unisono {

class SharedAgreement {
 public:
  // `probe`: MPI_Iprobe, with the places of its two results. A rank that waits here may have to move
  // data of the last call for other ranks, and MPI does that in its calls only.
  SharedAgreement(std::shared_ptr<Segment> segment, int rank, const MPICall& probe)
      : segment_(std::move(segment)), rank_(rank), probe_(probe) {}

  // Publish this rank's words of the next call. All ranks have compared those of the call before
  // the last, which these replace: they have published the words of the last call.
  void enter(const AgreementWords& words) {
    ++epoch_;
    arrived_ = 0;
    EpochLine& mine = segment_->words(rank_).line(epoch_);
    mine.agreement = words;
    mine.flag.store(epoch_, std::memory_order_release);  // pairs with is_complete()
  }

  // Whether all ranks have published their words.
  bool is_complete() {
    for (; arrived_ < segment_->ranks(); ++arrived_) {
      // acquire: pairs with the store in enter()
      const EpochLine& theirs = segment_->words(arrived_).line(epoch_);
      if (theirs.flag.load(std::memory_order_acquire) < epoch_) return false;
    }
    return true;
  }

  // Let MPI move data; return its error.
  int progress() {
    int flag = 0;
    alignas(16) std::array<char, kStatusBytes> status;
    probe_.set(probe_.input_at, &flag);
    probe_.set(probe_.output_at, status.data());
    return probe_.make();
  }

  // Compare the words of all ranks; is_complete() was true.
  Status compare() const {
    const AgreementWords& mine = words_of(rank_);
    bool is_even = mine.even != 0;
    for (int rank = 0; rank < segment_->ranks(); ++rank) {
      const AgreementWords& theirs = words_of(rank);
      if (theirs.fingerprint != mine.fingerprint) return {Code::mismatch};
      is_even = is_even && theirs.even == mine.even;
    }
    return is_even ? Status{} : Status{Code::uneven};
  }

 private:
  const AgreementWords& words_of(int rank) const {
    return segment_->words(rank).line(epoch_).agreement;
  }

  std::shared_ptr<Segment> segment_;
  int rank_;
  MPICall probe_;
  uint64_t epoch_ = 0;
  int arrived_ = 0;  // ranks below this one have published their words
};

}  // namespace unisono
