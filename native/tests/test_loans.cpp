// Payloads read from the sender's memory: cancelled sends, refused loans, and ranks that are gone.
#include "tests/world.hpp"

#include <csignal>

#include <sys/mman.h>
#include <sys/wait.h>

namespace {

constexpr size_t kBytes = 1'000'000;  // more than a ring

Outcome receive(Messages& messages, int tag, std::vector<char>* in, int64_t timeout_ns = kMinute) {
  return messages.recv(0, envelope(tag, in->size()), in->data(), nullptr, timeout_ns);
}

void test_a_payload_is_read_from_the_sender() {
  World world(2);
  std::vector<char> out = pattern(kBytes, 1), in(kBytes);
  const uint64_t number = world[0].start_send(1, envelope(1, kBytes), out.data()).number;
  // Forbidden in a program. Here it shows when the memory is read.
  std::fill(out.begin(), out.end(), 'x');
  assert(receive(world[1], 1, &in).code == Code::ok && in == out);
  assert(world[0].wait(number, kMinute).code == Code::ok);
  // A payload that fits into the ring need not wait.
  assert(world[0].start_send(1, envelope(2, 100'000), out.data()).number == 0);
}

// A loan without a receive is not read while the receive may still come, and is read before all
// ranks sleep.
void test_both_send_first() {
  World world(2);
  world.run([](Messages& messages, int rank) {
    for (unsigned round = 0; round < 10; ++round) {
      const std::vector<char> out = pattern(kBytes, round);
      std::vector<char> in(kBytes), small(8);
      assert(messages.send(1 - rank, envelope(1, kBytes), out.data(), kMinute).code == Code::ok);
      assert(messages.send(1 - rank, envelope(2, 8), out.data(), kMinute).code == Code::ok);
      // The second message first.
      assert(messages.recv(-1, envelope(2, 8), small.data(), both(), kMinute).code == Code::ok);
      assert(messages.recv(-1, envelope(1, kBytes), in.data(), both(), kMinute).code == Code::ok);
      assert(in == out);
    }
  });
}

void test_a_revoked_loan_is_no_message() {
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

// A send times out at any moment, and its memory is changed or unmapped at once. A receive that
// ends well has the payload. A send that ends well was received.
void test_a_send_that_times_out_spoils_nothing() {
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

// A receive whose frame was aborted is posted again at its old place.
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

// For rank 1, the process id of rank 0 is another process, as in another container.
void test_a_refused_loan_comes_in_the_ring() {
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

// Cancelled after the receiver has refused the loan: the receiver gets the payload, although the
// memory changes.
void test_a_refused_loan_comes_after_a_cancel() {
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

// A process that is killed while its loan is open.
void test_a_killed_lender() {
  World world(2);
  int ready[2];
  assert(pipe(ready) == 0);
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
    is_fine = is_fine && write(ready[1], "!", 1) == 1;
    if (is_fine) pause();
    _exit(1);
  }
  char byte;
  assert(read(ready[0], &byte, 1) == 1);
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
  for (int fd : ready) close(fd);
}

// A send whose receiver leaves right after the receive has ended well.
void test_a_receiver_that_leaves_has_read() {
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

// close() revokes open loans.
void test_close_revokes_loans() {
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
  test_a_killed_lender();
  test_a_payload_is_read_from_the_sender();
  test_both_send_first();
  test_a_revoked_loan_is_no_message();
  test_a_send_that_times_out_spoils_nothing();
  test_receives_keep_their_order();
  test_a_refused_loan_comes_in_the_ring();
  test_a_refused_loan_comes_after_a_cancel();
  test_a_receiver_that_leaves_has_read();
  test_close_revokes_loans();
  std::puts("ok");
  return 0;
}
