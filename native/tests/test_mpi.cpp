// Calls of two imaginary MPI libraries: results, disagreement, long waits, hangs, errors; own ops.
#include "core/clock.hpp"
#include "mpi/group.hpp"
#include "mpi/own_ops.hpp"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

using namespace unisono;

namespace {

struct Object {
  int id;
};

// How the libraries answer the next calls.
struct Library {
  std::array<uint64_t, 4> other{~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0}};
  std::atomic<int> tests{0};        // tests before a request is done; -1: it is never done
  std::atomic<bool> is_open{true};  // whether a blocking call returns
  std::atomic<bool> hangs{false};   // whether MPI_Test does not return
  std::atomic<int> returned{0};     // number of blocking calls that have reduced
  std::atomic<int> error{0};
  std::vector<int> counts;  // of the calls that were made
} library;

// The other rank contributes `library.other` to an agreement, and 1 to each number of the data.
void reduce(const void* in, void* out, int64_t count, int type, int op) {
  library.counts.push_back(static_cast<int>(count));
  if (op == 3) {
    auto* words = static_cast<uint64_t*>(out);
    for (size_t i = 0; i < 4; ++i) words[i] = std::min(words[i], library.other[i]);
    return;
  }
  assert(type == 8 && op == 5);
  auto* into = static_cast<double*>(out);
  const auto* from = reinterpret_cast<intptr_t>(in) == -1 ? into : static_cast<const double*>(in);
  for (int64_t i = 0; i < count; ++i) into[i] = from[i] + 1;
}

// Handles are ints.
extern "C" int ints_iallreduce(const void* in, void* out, int count, int type, int op, int comm,
                               int* request) {
  assert(comm == -77 && request != nullptr);
  if (op == 5 && library.error != 0) return library.error;
  *request = 1;
  reduce(in, out, count, type, op);
  return 0;
}
extern "C" int ints_test(int* request, int* done, int* status) {
  assert(*request == 1);
  while (library.hangs) std::this_thread::yield();
  status[4] = 9;
  *done = library.tests == 0 ? 1 : 0;
  if (library.tests > 0) --library.tests;
  return 0;
}
extern "C" int ints_allreduce(const void* in, void* out, int count, int type, int op, int comm) {
  assert(comm == -77);
  while (!library.is_open) std::this_thread::yield();
  reduce(in, out, count, type, op);
  ++library.returned;
  return library.error;
}

// Handles are pointers, and there are ten arguments.
Object kComm{77}, kType{8}, kMin{3}, kLast{10};
extern "C" int pointers_iallreduce(const void* in, void* out, int count, Object* type, Object* op,
                                   Object* comm, Object** request) {
  assert(comm == &kComm);
  *request = &kLast;
  reduce(in, out, count, type->id, op->id);
  return 0;
}
extern "C" int pointers_ialltoallv(const void* in, const int* sizes, const int* starts,
                                   Object* type, void* out, const int* out_sizes,
                                   const int* out_starts, Object* out_type, Object* comm,
                                   Object** request) {
  assert(type == &kType && out_type == &kType && comm == &kComm && sizes[0] == 1);
  assert(starts[1] == 1 && out_sizes[1] == 2 && out_starts[1] == 3);
  *request = &kLast;
  static_cast<double*>(out)[0] = static_cast<const double*>(in)[1];
  return 0;
}
extern "C" int pointers_test(Object** request, int* done, void* status) {
  assert(*request == &kLast && status != nullptr);
  *done = 1;
  return 0;
}

template <class Function>
uintptr_t at(Function* function) {
  return reinterpret_cast<uintptr_t>(function);
}
intptr_t at(Object* object) { return reinterpret_cast<intptr_t>(object); }

const MPICall kAgreement{at(&ints_iallreduce), {-1, 0, 4, 4, 3, -77, 0}, -1, 1, 6};
const MPICall kData{at(&ints_iallreduce), {-1, 0, 3, 8, 5, -77, 0}, -1, 1, 6};
const MPICall kBlocking{at(&ints_allreduce), {-1, 0, 3, 8, 5, -77}, -1, 1, -1};
const MPICall kNothing{};
constexpr uint64_t kWord = 0x123456789abcdef0;

struct Rank {
  MPIGroup group{at(&ints_test), kAgreement, false};
  std::vector<double> data{1, 2, 3};

  Rank() {
    library.other = {kWord, ~kWord, 1, ~uint64_t{1}};
    library.tests = 3;
    library.is_open = true;
    library.hangs = false;
    library.error = 0;
    library.counts.clear();
  }
  Status run(const MPICall& call, uint64_t word = kWord, uint64_t even = 1) {
    Buffers buffers{};
    buffers.output = reinterpret_cast<char*>(data.data());
    return group.run(call, buffers, {word, even}, nullptr);
  }
  // On a busy machine each call may wait for longer than a moment.
  Status finish(Status status) {
    while (status.code == Code::waiting) status = group.go_on();
    return status;
  }
  Status run_all(const MPICall& call, uint64_t word = kWord, uint64_t even = 1) {
    return finish(run(call, word, even));
  }
  bool is(double first) const { return data == std::vector<double>{first, first + 1, first + 2}; }
};

void test_calls() {
  Rank rank;
  assert(rank.run_all(kData).is_ok() && rank.is(2) && rank.group.finished() == 1);
  library.tests = 10'000;
  assert(rank.run_all(kBlocking).is_ok() && rank.is(3) && rank.group.finished() == 2);
  // The ranks have agreed already: no agreement, and no call that counts.
  library.counts.clear();
  assert(rank.run_all(kData, 0).is_ok() && rank.is(4) && rank.group.finished() == 2);
  assert(library.counts == std::vector<int>{3});
  // Only an agreement: the caller makes the rest of the call.
  assert(rank.run_all(kNothing).is_ok() && rank.is(4) && rank.group.finished() == 2);
  assert(!rank.group.is_moving());
}

// Nothing is written.
void test_disagreement() {
  Rank rank;
  for (const uint64_t word : {kWord - 1, kWord + 1}) {
    assert(rank.run_all(kData, word).code == Code::mismatch && rank.is(1));
  }
  for (const uint64_t even : {uint64_t{0}, uint64_t{2}, ~uint64_t{0}}) {
    assert(rank.run_all(kData, kWord, even).code == Code::uneven && rank.is(1));
  }
  // 0 means that the sizes are not even, also if all ranks have it.
  library.other = {kWord, ~kWord, 0, ~uint64_t{0}};
  assert(rank.run_all(kData, kWord, 0).code == Code::uneven && rank.is(1));
}

void test_long_waits() {
  Rank rank;
  library.tests = -1;
  assert(rank.run(kData).code == Code::waiting && !rank.group.is_moving() && rank.is(1));
  // The caller has left a call that MPI still has.
  assert(rank.group.is_under_way() && rank.run(kData).code == Code::closed);
  assert(rank.group.go_on().code == Code::waiting);
  library.tests = 2;
  assert(rank.finish(rank.group.go_on()).is_ok() && rank.is(2) && rank.group.finished() == 1);
  library.is_open = false;
  assert(rank.run(kBlocking).code == Code::waiting);
  while (!rank.group.is_moving()) assert(rank.group.go_on().code == Code::waiting);
  assert(rank.group.is_in_mpi() && rank.is(2));
  assert(rank.group.go_on().code == Code::waiting && rank.group.finished() == 1);
  library.is_open = true;
  assert(rank.finish(rank.group.go_on()).is_ok() && rank.is(3) && rank.group.finished() == 2);
  assert(!rank.group.is_under_way() && !rank.group.is_in_mpi());
  rank.group.close();
  assert(!rank.group.is_in_mpi());
}

// The caller looks for a rank that has given up before a call that took long ends.
void test_late_data() {
  Rank rank;
  library.is_open = false;
  Status status = rank.run(kBlocking);
  const int64_t end_ns = now_ns() + 60'000'000;
  while (now_ns() < end_ns) status = rank.group.go_on();
  assert(status.code == Code::waiting && !rank.group.has_arrived());
  library.is_open = true;
  while (!rank.group.has_arrived()) assert(rank.group.go_on().code == Code::waiting);
  assert(rank.is(2) && rank.group.finished() == 0);
  assert(rank.group.go_on().is_ok() && rank.group.finished() == 1);
}

// A caller gives up a call that never returns, and closes the group.
void test_stuck() {
  Rank rank;
  library.hangs = true;
  library.returned = 0;
  assert(rank.run(kNothing).code == Code::waiting && rank.group.go_on().code == Code::waiting);
  library.hangs = false;
  assert(rank.finish(rank.group.go_on()).is_ok());
  library.is_open = false;
  assert(rank.run(kBlocking, 0).code == Code::waiting);
  while (!rank.group.is_moving()) assert(rank.group.go_on().code == Code::waiting);
  assert(rank.group.give_up() && rank.group.is_under_way());
  rank.group.close();
  assert(rank.group.is_in_mpi() && library.returned == 0);
  library.is_open = true;
  while (rank.group.is_in_mpi()) std::this_thread::yield();
  assert(library.returned == 1 && rank.is(2));
}

// MPI gets no array of a call that the caller has given up, although the ranks agree.
void test_given_up() {
  Rank rank;
  library.hangs = true;
  assert(rank.run(kData).code == Code::waiting);
  assert(!rank.group.give_up() && rank.group.is_under_way());
  library.hangs = false;
  assert(rank.finish(rank.group.go_on()).code == Code::closed && rank.is(1));
  assert(rank.run(kData).code == Code::closed && rank.group.finished() == 0);
  assert(library.counts == std::vector<int>{4} || library.counts.empty());
}

void test_errors() {
  Rank rank;
  library.error = 16;
  for (const MPICall& call : {kData, kBlocking}) {
    const Status status = rank.run_all(call);
    assert(status.code == Code::library && status.peer == 16 && !rank.group.is_moving());
  }
}

void test_pointers() {
  library.other = {kWord, ~kWord, 1, ~uint64_t{1}};
  const MPICall agreement{
    at(&pointers_iallreduce), {-1, 0, 4, at(&kType), at(&kMin), at(&kComm), 0}, -1, 1, 6};
  const std::array<int, 2> sizes{1, 1}, starts{0, 1}, out_sizes{1, 2}, out_starts{0, 3};
  const auto address = [](const auto& array) { return reinterpret_cast<intptr_t>(array.data()); };
  const MPICall call{at(&pointers_ialltoallv),
                     {0, address(sizes), address(starts), at(&kType), 0, address(out_sizes),
                      address(out_starts), at(&kType), at(&kComm), 0},
                     0,
                     4,
                     9};
  MPIGroup group(at(&pointers_test), agreement, true);
  const std::vector<double> in{4, 5};
  std::vector<double> out{0};
  Buffers buffers{};
  buffers.input = reinterpret_cast<const char*>(in.data());
  buffers.output = reinterpret_cast<char*>(out.data());
  Status status = group.run(call, buffers, {kWord, 1}, nullptr);
  while (status.code == Code::waiting) status = group.go_on();
  assert(status.is_ok() && out[0] == 5);
}

uint32_t bits_of(float number) {
  uint32_t bits = 0;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}

void test_own_ops() {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> odd{0.f, -0.f, 1.f, -2.f, kNan, -kNan, INFINITY, -INFINITY, 1e-45f};
  for (const RedOp op : {RedOp::min, RedOp::max}) {
    const MPIOpFunction function = own_op(DType::f32, op);
    for (float a : odd) {
      for (float b : odd) {
        float one = a, other = b;
        int count = 1;
        function(&b, &one, &count, nullptr);
        function(&a, &other, &count, nullptr);
        assert(bits_of(one) == bits_of(other));
        assert(std::isnan(one) == (std::isnan(a) || std::isnan(b)));
        if (std::isnan(one)) continue;
        assert(one == (op == RedOp::min ? std::min(a, b) : std::max(a, b)));
        const bool both = std::signbit(a) && std::signbit(b);
        const bool any = std::signbit(a) || std::signbit(b);
        if (a == 0 && b == 0) assert(std::signbit(one) == (op == RedOp::min ? any : both));
      }
    }
  }
  std::vector<int8_t> lower{100, -100, 5}, into{100, -100, 6};
  int count = 3;
  own_op(DType::i8, RedOp::sum)(lower.data(), into.data(), &count, nullptr);
  assert(into == (std::vector<int8_t>{-56, 56, 11}));
  assert(own_op(DType::c64, RedOp::min) == nullptr);
}

}  // namespace

int main() {
  test_calls();
  test_disagreement();
  test_long_waits();
  test_late_data();
  test_stuck();
  test_given_up();
  test_errors();
  test_pointers();
  test_own_ops();
  std::printf("ok\n");
}
