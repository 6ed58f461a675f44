// An all_reduce in place by recursive doubling, of messages of MPI, for Open MPI.
//
// In place MPI_Iallreduce of Open MPI 5 takes a binomial tree (coll/libnbc/nbc_iallreduce.c): each
// number is sent twice as often one after another. Its own parameter for recursive doubling counts
// for the whole process, so it could separate this rank from ranks that do not use unisono.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "mpi/call.hpp"

namespace unisono {

class Doubling {
 public:
  // `send`, `receive`: MPI_Isend and MPI_Irecv of the array. `reduce`: MPI_Reduce_local, with the
  // places of its two arrays. `rank`, `ranks`: of the communicator. The op is commutative.
  Doubling(const MPICall& send, const MPICall& receive, const MPICall& reduce, int rank, int ranks,
           size_t nbytes);

  // Size of the array.
  size_t nbytes() const { return nbytes_; }
  // Begin with an array, and memory of this size for a received array; return MPI's error.
  int begin(char* array, char* received);
  // Go on, and set whether all is done; return MPI's error.
  int test(MPITest test, bool* is_done);
  // Whether MPI has memory of a message, also after an error.
  bool is_under_way() const { return is_under_way_[0] || is_under_way_[1]; }

 private:
  struct Round {
    int peer;
    bool sends;
    bool receives;
    bool reduces;  // the received array is added, else it is the result
  };
  int begin_round();
  int begin_message(MPICall* call, const char* at, size_t which);

  MPICall send_;
  MPICall receive_;
  MPICall reduce_;
  std::vector<Round> rounds_;
  size_t nbytes_;
  char* array_ = nullptr;
  char* received_ = nullptr;
  size_t round_ = 0;
  std::array<std::array<uint64_t, 2>, 2> requests_{};  // each an int or a pointer
  std::array<bool, 2> is_under_way_{};
};

}  // namespace unisono
