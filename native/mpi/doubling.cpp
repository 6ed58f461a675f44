#include "mpi/doubling.hpp"

namespace unisono {

namespace {

// Places of the arguments of MPI_Isend and MPI_Irecv.
constexpr int kArray = 0;
constexpr size_t kPeer = 3;
constexpr int kRequest = 6;

}  // namespace

Doubling::Doubling(const MPICall& send, const MPICall& receive, const MPICall& reduce, int rank,
                   int ranks, size_t nbytes)
    : send_(send), receive_(receive), reduce_(reduce), nbytes_(nbytes) {
  int power = 1;
  while (2 * power <= ranks) power *= 2;
  // The first 2 * pairs ranks form pairs, so that a power of two remains. The lower rank of a pair
  // gives its array to the upper rank, and gets the result from it.
  const int pairs = ranks - power;
  const bool is_paired = rank < 2 * pairs;
  if (is_paired && rank % 2 == 0) {
    rounds_ = {{rank + 1, true, false, false}, {rank + 1, false, true, false}};
    return;
  }
  if (is_paired) rounds_.push_back({rank - 1, false, true, true});
  const int place = is_paired ? rank / 2 : rank - pairs;
  for (int distance = 1; distance < power; distance *= 2) {
    const int other = place ^ distance;
    rounds_.push_back({other < pairs ? 2 * other + 1 : other + pairs, true, true, true});
  }
  if (is_paired) rounds_.push_back({rank - 1, true, false, false});
}

int Doubling::begin(char* array, char* received) {
  array_ = array;
  received_ = received;
  round_ = 0;
  return begin_round();
}

int Doubling::begin_round() {
  const Round& round = rounds_[round_];
  receive_.arguments[kPeer] = send_.arguments[kPeer] = round.peer;
  if (round.receives) {
    const char* into = round.reduces ? received_ : array_;
    if (const int error = begin_message(&receive_, into, 0); error != 0) return error;
  }
  return round.sends ? begin_message(&send_, array_, 1) : 0;
}

int Doubling::begin_message(MPICall* call, const char* at, size_t which) {
  call->set(kArray, at);
  call->set(kRequest, requests_[which].data());
  const int error = call->make();
  is_under_way_[which] = error == 0;
  return error;
}

int Doubling::test(MPITest test, bool* is_done) {
  *is_done = false;
  while (true) {
    for (size_t which = 0; which < requests_.size(); ++which) {
      if (!is_under_way_[which]) continue;
      int flag = 0;
      alignas(16) std::array<char, kStatusBytes> status;
      if (const int error = test(requests_[which].data(), &flag, status.data()); error != 0) {
        return error;
      }
      is_under_way_[which] = flag == 0;
    }
    if (is_under_way()) return 0;
    if (rounds_[round_].reduces) {
      reduce_.set(reduce_.input_at, received_);
      reduce_.set(reduce_.output_at, array_);
      if (const int error = reduce_.make(); error != 0) return error;
    }
    if (++round_ == rounds_.size()) break;
    if (const int error = begin_round(); error != 0) return error;
  }
  *is_done = true;
  return 0;
}

}  // namespace unisono
