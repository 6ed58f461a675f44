// Payloads that are read where they lie: who gives up, who cannot read, and who is gone.
#include "tests/world.hpp"

#include <csignal>

#include <sys/mman.h>
#include <sys/wait.h>

namespace {

constexpr size_t kBytes = 1'000'000;  // more than a ring

Outcome receive(Messages& messages, int tag, std::vector<char>* in, int64_t timeout_ns = kMinute) {
  return messages.recv(0, envelope(tag, in->size()), in->data(), nullptr, timeout_ns);
}

void test_it_is_read_where_it_lies() {
  World world(2);
  std::vector<char> out = pattern(kBytes, 1), in(kBytes);
  const uint64_t number = world[0].start_send(1, envelope(1, kBytes), out.data()).number;
  // Nobody may do this, except to find out when it is read.
  std::fill(out.begin(), out.end(), 'x');
  assert(receive(world[1], 1, &in).code == Code::ok && in == out);
  assert(world[0].wait(number, kMinute).code == Code::ok);
  // What fits into the ring need not wait.
  assert(world[0].start_send(1, envelope(2, 100'000), out.data()).number == 0);
}

// A message that nobody asks for is left alone while there is hope, and taken in before all sleep.
void test_both_send_first() {
  World world(2);
  world.run([](Messages& messages, int rank) {
    for (unsigned round = 0; round < 10; ++round) {
      const std::vector<char> out = pattern(kBytes, round);
      std::vector<char> in(kBytes), small(8);
      assert(messages.send(1 - rank, envelope(1, kBytes), out.data(), kMinute).code == Code::ok);
      assert(messages.send(1 - rank, envelope(2, 8), out.data(), kMinute).code == Code::ok);
      // The later one first.
      assert(messages.recv(-1, envelope(2, 8), small.data(), both(), kMinute).code == Code::ok);
      assert(messages.recv(-1, envelope(1, kBytes), in.data(), both(), kMinute).code == Code::ok);
      assert(in == out);
    }
  });
}

void test_what_is_taken_back_never_was() {
  World world(2);
  std::vector<char> out = pattern(kBytes, 1), in(kBytes);
  const std::vector<char> untouched(in), next = pattern(kBytes, 2);
  assert(world[0].send(1, envelope(1, kBytes), out.data(), kMoment).code == Code::timeout);
  const uint64_t number = world[0].start_send(1, envelope(1, kBytes), out.data()).number;
  assert(world[0].cancel(number).code == Code::cancelled);
  std::fill(out.begin(), out.end(), 'x');
  assert(receive(world[1], 1, &in, kMoment).code == Code::timeout && in == untouched);
  const uint64_t later = world[0].start_send(1, envelope(1, kBytes), next.data()).number;
  assert(receive(world[1], 1, &in).code == Code::ok && in == next);
  assert(world[0].wait(later, kMinute).code == Code::ok);
}

// The sender gives up at any time and changes its memory at once, or gives it back: whoever has received
// has what was sent. A send that ended well was received.
void test_who_gives_up_spoils_nothing() {
  std::mt19937 random(1);
  int ended_well = 0;
  for (int round = 0; round < 100; ++round) {
    World world(2);
    const size_t nbytes = 4'000'000;
    const auto timeout_ns = static_cast<int64_t>(random() % 2'000'000);
    std::vector<char> in(nbytes);
    std::atomic<bool> is_there{false};
    Outcome got;
    std::thread receiver([&] {
      is_there = true;
      got = receive(world[1], 1, &in, kMoment);
    });
    void* const memory =
      mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert(memory != MAP_FAILED);
    char* const out = static_cast<char*>(memory);
    std::fill_n(out, nbytes, 'y');
    while (!is_there) std::this_thread::yield();
    const Code sent = world[0].send(1, envelope(1, nbytes), out, timeout_ns).code;
    std::fill_n(out, nbytes, 'x');
    if (round % 2 == 0) munmap(memory, nbytes);
    receiver.join();
    if (round % 2 == 1) munmap(memory, nbytes);
    assert(got.code == sent && (sent == Code::ok || sent == Code::timeout));
    if (sent == Code::ok) assert(in == std::vector<char>(nbytes, 'y'));
    ended_well += sent == Code::ok;
  }
  assert(ended_well != 0);
}

// A receive that is not served after all is where it was among the others.
void test_receives_keep_their_order() {
  World world(3);
  Matching matching(3);
  Operation ops[3];
  for (Operation& op : ops) {
    op.envelope = envelope(1, 8);
    matching.post(&op);
  }
  assert(matching.take_posted(0, envelope(1, 8)) == &ops[0]);
  assert(matching.take_posted(0, envelope(1, 8)) == &ops[1]);
  matching.post(&ops[1]);
  matching.post(&ops[0]);
  for (Operation& op : ops) assert(matching.take_posted(0, envelope(1, 8)) == &op);
}

// To rank 1, rank 0 seems to be another process, as in another container.
void test_who_cannot_read_gets_it_in_the_ring() {
  World world(2);
  std::vector<Address> addresses = world.addresses;
  addresses[0].pid = 1;
  world[1].introduce(addresses, true);
  std::vector<std::vector<char>> out;
  for (unsigned i = 0; i < 4; ++i) out.push_back(pattern(kBytes, i));
  std::thread sender([&] {
    for (const auto& each : out) {
      assert(world[0].send(1, envelope(1, kBytes), each.data(), kMinute).code == Code::ok);
    }
  });
  std::vector<char> in(kBytes);
  for (const auto& each : out) assert(receive(world[1], 1, &in).code == Code::ok && in == each);
  sender.join();
}

// Given up when the receiver has already asked for the rest: it gets that, whatever becomes of the memory.
void test_who_cannot_read_gets_what_is_given_up() {
  World world(2);
  std::vector<Address> addresses = world.addresses;
  addresses[0].pid = 1;
  world[1].introduce(addresses, true);
  std::vector<char> out = pattern(kBytes, 1), in(kBytes);
  const uint64_t number = world[0].start_send(1, envelope(1, kBytes), out.data()).number;
  assert(receive(world[1], 2, &in, kMoment).code == Code::timeout);
  assert(world[0].cancel(number).code == Code::cancelled);
  std::fill(out.begin(), out.end(), 'x');
  std::thread helper([&] { World::end(world[0], kMinute); });
  assert(receive(world[1], 1, &in).code == Code::ok && in == pattern(kBytes, 1));
  helper.join();
}

// A process that is killed after it has lent something.
void test_who_is_gone_cannot_be_read() {
  World world(2);
  int told[2];
  assert(pipe(told) == 0);
  const int child = fork();
  if (child == 0) {
    // Another rank 0, with memory of its own.
    Messages messages(0, 2);
    std::vector<Address> addresses = world.addresses;
    bool is_fine = messages.create(addresses[0].nonce) == 0;
    messages.introduce(addresses, true);
    messages.ignore_pages();
    static char out[kBytes];
    is_fine = is_fine && messages.start_send(1, envelope(1, kBytes), out).number != 0;
    is_fine = is_fine && write(told[1], "!", 1) == 1;
    if (is_fine) pause();
    _exit(1);
  }
  char byte;
  assert(read(told[0], &byte, 1) == 1);
  kill(child, SIGKILL);
  int status = 0;
  assert(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
  world.addresses[0].pid = child;
  world[1].introduce(world.addresses, true);
  std::vector<char> in(kBytes);
  assert(receive(world[1], 1, &in, kMoment).code == Code::timeout);
  world[1].peer_down(0, Code::lost);
  const Outcome got = receive(world[1], 1, &in);
  assert(got.code == Code::lost && got.source == 0);
  for (int fd : told) close(fd);
}

// A send whose receiver leaves right after it has received has ended well.
void test_who_leaves_has_read() {
  World world(2);
  const std::vector<char> out = pattern(kBytes, 1);
  std::vector<char> in(kBytes);
  const uint64_t number = world[0].start_send(1, envelope(1, kBytes), out.data()).number;
  const uint64_t other = world[0].start_send(1, envelope(2, kBytes), out.data()).number;
  assert(receive(world[1], 1, &in).code == Code::ok && in == out);
  World::end(world[1], 0);
  world[0].peer_down(1, Code::left);
  assert(world[0].wait(number, kMinute).code == Code::ok);
  assert(world[0].wait(other, kMinute).code == Code::left);
}

// What others could still read is theirs no more.
void test_who_closes_takes_back() {
  World world(2);
  std::vector<char> out = pattern(kBytes, 1), in(kBytes);
  assert(world[0].start_send(1, envelope(1, kBytes), out.data()).number != 0);
  World::end(world[0], 0);
  std::fill(out.begin(), out.end(), 'x');
  assert(receive(world[1], 1, &in, kMoment).code == Code::timeout);
  assert(in == std::vector<char>(kBytes));
}

}  // namespace

int main() {
  lends = true;
  test_who_is_gone_cannot_be_read();
  test_it_is_read_where_it_lies();
  test_both_send_first();
  test_what_is_taken_back_never_was();
  test_who_gives_up_spoils_nothing();
  test_receives_keep_their_order();
  test_who_cannot_read_gets_it_in_the_ring();
  test_who_cannot_read_gets_what_is_given_up();
  test_who_leaves_has_read();
  test_who_closes_takes_back();
  std::puts("ok");
  return 0;
}
