// The agreement of an MPI group in shared memory, and its all_reduce of messages. The ranks are
// threads, and the MPI library is imaginary.
#include "mpi/doubling.hpp"
#include "mpi/group.hpp"
#include "mpi/shared_agreement.hpp"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

using namespace unisono;

namespace {

constexpr uint64_t kWord = 0x123456789abcdef0;
std::atomic<int> error{0};  // that the library returns

template <class Function>
uintptr_t at(Function* function) {
  return reinterpret_cast<uintptr_t>(function);
}

std::shared_ptr<Segment> segment_of(int ranks) {
  const unsigned char nonce[kNonceBytes] = {};
  auto segment = std::make_shared<Segment>();
  assert(segment->create(ranks, 0, nonce) == 0);
  return segment;
}

// Each rank is a thread.
template <class Life>
void run_ranks(int ranks, const Life& life) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(life, rank);
  for (std::thread& thread : threads) thread.join();
}

Status finished(MPIGroup* group, Status status) {
  while (status.code == Code::waiting) status = group->go_on();
  return status;
}

std::atomic<int> probes{0};
extern "C" int ints_iprobe(int source, int tag, int comm, int* flag, char* status) {
  assert(source == -2 && tag == -1 && comm == -77);
  *flag = 0;
  status[4] = 9;
  ++probes;
  return error;
}
const MPICall kProbe{at(&ints_iprobe), {-2, -1, -77, 0, 0}, 3, 4, -1};

// An imaginary library whose ranks are threads: messages by sender and receiver, in their order.
struct Message {
  std::vector<double> numbers;
  double* into = nullptr;  // of the receiver that waits for it
  bool is_done = false;
};
struct Post {
  std::mutex mutex;
  using Link = std::pair<int, int>;  // sender, receiver
  std::map<Link, std::vector<std::shared_ptr<Message>>> queues;
  std::map<Link, size_t> taken;
} post_office;
struct Client {
  int rank = 0;
  std::atomic<int> next_request{0};
  std::vector<std::shared_ptr<Message>> requests;
};
Client only;  // in a test of one rank, whose group makes its calls on another thread
thread_local Client* client = &only;

extern "C" int post_isend(const double* from, int count, int type, int peer, int tag, int comm,
                          int* request) {
  assert(type == 8 && tag == 0 && comm == -77);
  const std::scoped_lock locked(post_office.mutex);
  auto message = std::make_shared<Message>();
  message->numbers.assign(from, from + count);
  post_office.queues[{client->rank, peer}].push_back(message);
  auto sent = std::make_shared<Message>();
  sent->is_done = true;
  client->requests.push_back(sent);
  *request = static_cast<int>(client->requests.size()) - 1;
  return error;
}
extern "C" int post_irecv(double* into, int count, int type, int peer, int tag, int comm,
                          int* request) {
  assert(count == 3 && type == 8 && tag == 0 && comm == -77);
  auto received = std::make_shared<Message>();
  received->into = into;
  received->numbers.assign(1, static_cast<double>(peer));
  client->requests.push_back(received);
  *request = static_cast<int>(client->requests.size()) - 1;
  return 0;
}
extern "C" int post_test(const int* request, int* flag, void* /*status*/) {
  const std::scoped_lock locked(post_office.mutex);
  Message& mine = *client->requests[static_cast<size_t>(*request)];
  if (!mine.is_done) {
    const Post::Link link{static_cast<int>(mine.numbers[0]), client->rank};
    if (post_office.taken[link] < post_office.queues[link].size()) {
      const Message& found = *post_office.queues[link][post_office.taken[link]++];
      std::copy(found.numbers.begin(), found.numbers.end(), mine.into);
      mine.is_done = true;
    }
  }
  *flag = mine.is_done ? 1 : 0;
  return 0;
}
extern "C" int post_reduce(const double* in, double* inout, int count, int type, int op) {
  assert(type == 8 && op == 5);
  for (int i = 0; i < count; ++i) inout[i] += in[i];
  return 0;
}

void test_shared_agreement() {
  constexpr int kRanks = 3;
  constexpr int kCalls = 2000;
  error = 0;
  const auto segment = segment_of(kRanks);
  // In each third call one rank differs: in the call, then in the sizes. All ranks find out.
  const auto live = [&](int rank) {
    MPIGroup group(at(&post_test), {}, true, SharedAgreement(segment, rank, kProbe));
    for (int i = 0; i < kCalls; ++i) {
      const bool is_odd = rank == i % kRanks;
      const uint64_t word = i % 3 == 1 && is_odd ? kWord + 1 : kWord;
      const uint64_t even = i % 3 == 2 ? (is_odd ? 2 : 1) : 1;
      const Status status = finished(&group, group.run({}, {}, {word, even}, nullptr));
      const Code codes[] = {Code::ok, Code::mismatch, Code::uneven};
      assert(status.code == codes[i % 3]);
    }
    // 0 means that the sizes are not even, also if all ranks have it.
    const Status status = finished(&group, group.run({}, {}, {kWord, 0}, nullptr));
    assert(status.code == Code::uneven);
  };
  run_ranks(kRanks, live);
}

// A rank that waits lets MPI move the data of the last call, and gets MPI's error.
void test_wait_in_shared_memory() {
  error = 0;
  MPIGroup group(at(&post_test), {}, false, SharedAgreement(segment_of(2), 0, kProbe));
  probes = 0;
  assert(group.run({}, {}, {kWord, 1}, nullptr).code == Code::waiting);
  assert(probes > 0 && group.is_under_way() && !group.is_moving());
  assert(group.run({}, {}, {kWord, 1}, nullptr).code == Code::closed);
  error = 16;
  const Status status = group.go_on();
  assert(status.code == Code::library && status.peer == 16);
  error = 0;
}

// A call has not ended while another rank has not ended its part, if MPI may hide a death in it.
extern "C" int no_data(int* request) {
  *request = client->next_request++;
  return 0;
}
const MPICall kData{at(&no_data), {0}, -1, -1, 0, true};
std::shared_ptr<Message> done() {
  auto message = std::make_shared<Message>();
  message->is_done = true;
  return message;
}
void test_end() {
  only.next_request = 0;
  only.requests = {done()};
  const auto segment = segment_of(2);
  SharedAgreement other(segment, 1, kProbe);
  MPIGroup group(at(&post_test), {}, false, SharedAgreement(segment, 0, kProbe));
  other.enter({kWord, 1});
  assert(group.run(kData, {}, {kWord, 1}, nullptr).code == Code::waiting);
  assert(group.is_under_way() && !group.is_moving() && group.finished() == 0);
  assert(group.go_on().code == Code::waiting);
  other.enter({1, 1});
  assert(finished(&group, group.go_on()).is_ok() && group.finished() == 1);
}

// The same in a group whose ranks agree by MPI: the third request is that of the end.
void test_end_by_mpi() {
  only.next_request = 0;
  only.requests = {done(), done(), std::make_shared<Message>()};
  only.requests[2]->numbers.assign(1, 1);
  MPIGroup group(at(&post_test), kData, false);
  assert(group.run(kData, {}, {kWord, 1}, nullptr).code == Code::waiting);
  while (only.next_request < 3) assert(group.go_on().code == Code::waiting);
  assert(group.is_under_way() && !group.is_moving() && group.finished() == 0);
  {
    const std::scoped_lock locked(post_office.mutex);
    only.requests[2]->is_done = true;
  }
  assert(finished(&group, group.go_on()).is_ok() && group.finished() == 1);
  // Another call ends by itself.
  only.requests = {done(), done()};
  only.next_request = 0;
  MPICall alone = kData;
  alone.ends_together = false;
  assert(finished(&group, group.run(alone, {}, {kWord, 1}, nullptr)).is_ok());
  assert(only.next_request == 2);
}

std::shared_ptr<Doubling> doubling_of(int rank, int ranks) {
  const MPICall send{at(&post_isend), {0, 3, 8, 0, 0, -77, 0}, -1, -1, 6};
  const MPICall receive{at(&post_irecv), {0, 3, 8, 0, 0, -77, 0}, -1, -1, 6};
  const MPICall reduce{at(&post_reduce), {0, 0, 3, 8, 5}, 0, 1, -1};
  return std::make_shared<Doubling>(send, receive, reduce, rank, ranks, 3 * sizeof(double));
}

void test_doubling(bool ends_together) {
  for (int ranks = 2; ranks <= 9; ++ranks) {
    post_office.queues.clear();
    post_office.taken.clear();
    const auto segment = segment_of(ranks);
    const auto live = [&](int rank) {
      Client mine;
      mine.rank = rank;
      client = &mine;
      MPIGroup group(at(&post_test), {}, true, SharedAgreement(segment, rank, kProbe));
      MPICall data_call;
      data_call.ends_together = ends_together;
      const auto doubling = doubling_of(rank, ranks);
      for (int call = 0; call < 3; ++call) {
        std::vector<double> data{1.0 * rank, 10.0 * rank + call, -1.0};
        Buffers buffers{};
        buffers.output = reinterpret_cast<char*>(data.data());
        const Status begun = group.run(data_call, buffers, {kWord, 1}, nullptr, doubling);
        const Status status = finished(&group, begun);
        const double sum = ranks * (ranks - 1) / 2.0;
        assert(status.is_ok());
        assert(data == (std::vector<double>{sum, 10 * sum + call * ranks, -1.0 * ranks}));
      }
      assert(group.finished() == 3);
    };
    run_ranks(ranks, live);
  }
}

// MPI keeps the array of the receive that has begun before a send fails.
void test_doubling_error() {
  only.requests.clear();
  std::vector<double> data{1, 2, 3};
  MPIGroup group(at(&post_test), {}, false);
  error = 16;
  Buffers buffers{};
  buffers.output = reinterpret_cast<char*>(data.data());
  const Status begun = group.run({}, buffers, {0, 1}, nullptr, doubling_of(0, 2));
  const Status status = finished(&group, begun);
  assert(status.code == Code::library && status.peer == 16 && group.is_under_way());
  assert(group.run({}, buffers, {0, 1}, nullptr).code == Code::closed);
  error = 0;
}

}  // namespace

int main() {
  test_shared_agreement();
  for (const bool ends_together : {false, true}) test_doubling(ends_together);
  test_end();
  test_end_by_mpi();
  test_wait_in_shared_memory();
  test_doubling_error();
  std::printf("ok\n");
}
