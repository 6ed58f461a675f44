// The store server: frames in pieces and out of bounds, the table's waiters, proofs, and clients on
// real sockets that wait, leave and send nonsense.
#include <atomic>
#include <cassert>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "store/link.hpp"
#include "store/server.hpp"
#include "store/table.hpp"
#include "store/token.hpp"
#include "store/wire.hpp"

using namespace unisono::store;

namespace {

// How many allocations of the server's thread succeed before one fails. Below 0 none fails.
std::atomic<int64_t> allocations_left{-1};
thread_local bool is_test_thread = false;

}  // namespace

void* operator new(std::size_t nbytes) {
  if (!is_test_thread && allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
  if (void* memory = std::malloc(nbytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {
template <typename T>
std::string bytes_of(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
std::string sized(std::string_view text) { return bytes_of(uint64_t{text.size()}).append(text); }
std::string frame(Opcode op, const std::string& fields = {}) {
  return std::string(1, static_cast<char>(op)) + fields;
}
constexpr int64_t kMinuteNs = 60'000'000'000;
const std::string kValidate = frame(Opcode::validate, bytes_of(kMagic));

void test_frames_in_pieces() {
  const std::string frames[] = {
    kValidate,
    frame(Opcode::set, sized("key") + sized("value")),
    frame(Opcode::compare_set, sized("k") + sized("") + sized("new")),
    frame(Opcode::add, sized("n") + bytes_of(int64_t{-5})),
    frame(Opcode::wait, bytes_of(uint64_t{2}) + sized("a") + sized("bc")),
    frame(Opcode::multi_set,
          bytes_of(uint64_t{2}) + sized("a") + sized("1") + sized("b") + sized("")),
    frame(Opcode::list_keys),
  };
  for (const std::string& whole : frames) {
    Scanner scanner;
    for (std::size_t size = 0; size < whole.size(); ++size) {
      assert(scanner.scan_request(whole.data(), size) == Scanner::State::partial);
    }
    assert(scanner.scan_request(whole.data(), whole.size()) == Scanner::State::whole);
    assert(scanner.length() == whole.size());
  }
  Request request;
  decode(frames[2].data(), request);
  assert(request.key == "k" && request.value.empty() && request.other == "new");
  decode(frames[3].data(), request);
  assert(request.key == "n" && request.number == -5);
  decode(frames[5].data(), request);
  assert(request.keys.size() == 2 && request.keys[1] == "b" && request.values[0] == "1");
}

void test_frames_out_of_bounds() {
  const std::string bad[] = {
    std::string(1, '\x13'),
    frame(Opcode::get, bytes_of(kMaxKeyBytes + 1)),
    frame(Opcode::get, bytes_of(~uint64_t{0})),
    frame(Opcode::set, sized("k") + bytes_of(kMaxValueBytes + 1)),
    frame(Opcode::wait, bytes_of(kMaxKeys + 1)),
    frame(Opcode::multi_set, bytes_of(uint64_t{1}) + sized("k") + bytes_of(~uint64_t{0})),
  };
  for (const std::string& bytes : bad) {
    Scanner scanner;
    assert(scanner.scan_request(bytes.data(), bytes.size()) == Scanner::State::bad);
    assert(*scanner.error() != '\0');
  }
}

// The scanner stays inside any bytes, and decode() accepts each request that the scanner accepts.
void test_random_frames() {
  std::mt19937 random(1);
  Request request;
  for (int round = 0; round < 50'000; ++round) {
    std::string bytes = round % 2
                          ? frame(Opcode::multi_set, bytes_of(uint64_t{2}) + sized("a") +
                                                       sized("1") + sized("b") + sized(""))
                          : frame(static_cast<Opcode>(random() % kOpcodes), std::string(40, '\0'));
    for (unsigned change = 0; change < random() % 4; ++change) {
      bytes[random() % bytes.size()] = static_cast<char>(random() % 3 ? random() % 4 : random());
    }
    bytes.resize(random() % (bytes.size() + 1));
    // A copy of exactly that size, so that a sanitizer detects a read of one more byte.
    const std::vector<char> exact(bytes.begin(), bytes.end());
    Scanner scanner;
    if (scanner.scan_request(exact.data(), exact.size()) == Scanner::State::whole) {
      assert(scanner.length() <= exact.size());
      decode(exact.data(), request);
    }
  }
}

struct Client final : Waiter {
  int woken = 0;
  void wake() override { ++woken; }
};

void test_table() {
  Table table;
  int64_t total = 0;
  assert(table.add("n", 5, &total) && total == 5);
  assert(table.add("n", -7, &total) && total == -2 && *table.find("n") == "-2");
  for (const char* text : {"", "xyz", "12abc", "1 2", "+", "9223372036854775808"}) {
    table.set("n", text);
    assert(!table.add("n", 0, &total) && *table.find("n") == text);
  }
  table.set("n", " +9223372036854775808\n");
  assert(table.add("n", -1, &total) && total == 9223372036854775807);
  assert(!table.add("n", 1, &total));
  assert(table.compare_set("c", "x", "y") == "x" && table.find("c") == nullptr);
  assert(table.compare_set("c", "", "y") == "y" && table.compare_set("c", "x", "z") == "y");
  assert(table.delete_key("c") && !table.delete_key("c"));
}

void test_waiters() {
  Table table;
  Client first, second, third;
  assert(!table.wait(first, {"a", "b", "a"}));
  table.set("a", "");
  table.delete_key("a");
  table.set("b", "");
  assert(first.woken == 0);
  table.set("a", "");
  assert(first.woken == 1);

  // One push wakes one waiter, the oldest. If it does not take the value, the push wakes the next.
  assert(!table.wait(first, {"q"}) && !table.wait(second, {"q"}));
  table.queue_push("q", "1");
  assert(first.woken == 2 && second.woken == 0);
  const auto promised = table.take_promise(first);
  assert(promised == "q");
  table.end_promise(*promised);
  assert(second.woken == 1);
  std::string value;
  assert(table.queue_pop("q", &value) && value == "1" && !table.queue_pop("q", &value));
  table.end_promise(*table.take_promise(second));

  assert(table.arrive(first, "b", 2));
  table.forget(first);
  assert(table.arrive(second, "b", 2) && second.woken == 1);
  assert(!table.arrive(third, "b", 3));
  assert(table.arrive(first, "b", 2) && first.woken == 3 && second.woken == 2);
}

std::string hex(const Digest& digest) {
  std::string text;
  char digits[3];
  for (unsigned char byte : digest) {
    std::snprintf(digits, sizeof digits, "%02x", byte);
    text += digits;
  }
  return text;
}

// The examples of FIPS 180-4 and RFC 4231.
void test_proofs() {
  assert(hex(sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  assert(hex(sha256(std::string(1'000'000, 'a'))) ==
         "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  assert(hex(hmac_sha256("Jefe", "what do ya want for nothing?")) ==
         "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  assert(hex(hmac_sha256(std::string(131, '\xaa'),
                         "Test Using Larger Than Block-Size Key - Hash Key First")) ==
         "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  const Digest one = proof("token", "client", "a", "b");
  assert(is_same(one, {reinterpret_cast<const char*>(one.data()), one.size()}));
  assert(!is_same(one, "") && !is_same(one, std::string(one.size(), '\0')));
}

// A server on a port of its own, and its log.
struct Running {
  explicit Running(std::string token = {}) {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    int bound = bind(listener, reinterpret_cast<sockaddr*>(&address), size);
    bound |= listen(listener, 100);
    bound |= getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
    bound |= pipe2(log, O_NONBLOCK);
    assert(bound == 0);
    at = address;
    server = Server::start({listener}, log[1], {std::move(token), false});
  }
  ~Running() { close(log[0]); }

  int try_connect(bool* is_connected = nullptr) const {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    const timeval patience{20, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    const bool is_done = connect(fd, reinterpret_cast<const sockaddr*>(&at), sizeof at) == 0;
    if (is_connected != nullptr) *is_connected = is_done;
    return fd;
  }
  int connect_raw() const {
    bool is_connected = false;
    const int fd = try_connect(&is_connected);
    assert(is_connected);
    return fd;
  }

  sockaddr_in at{};
  int log[2];
  Server::Owner server;
};

void send_bytes(int fd, const std::string& bytes) {
  const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  assert(sent == static_cast<ssize_t>(bytes.size()));
}
std::string receive_bytes(int fd, std::size_t nbytes) {
  std::string answer(nbytes, '\0');
  const ssize_t count = recv(fd, answer.data(), nbytes, MSG_WAITALL);
  assert(count >= 0 || errno != EAGAIN);  // EAGAIN: the time-out has passed
  answer.resize(count < 0 ? 0 : static_cast<std::size_t>(count));
  return answer;
}

void test_clients() {
  Running running;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      const int fd = running.connect_raw();
      send_bytes(fd, kValidate);
      for (int round = 0; round < 200; ++round) {
        send_bytes(fd, frame(Opcode::add, sized("n") + bytes_of(int64_t{1})));
        assert(receive_bytes(fd, 8).size() == 8);
      }
      send_bytes(fd, frame(Opcode::barrier, sized("b") + bytes_of(int64_t{8})));
      assert(receive_bytes(fd, 1) == std::string(1, kStopWaiting));
      send_bytes(fd, frame(Opcode::get, sized("n")));
      assert(receive_bytes(fd, 12) == sized("1600"));
      close(fd);
    });
  }
  for (std::thread& thread : threads) thread.join();

  // A large value, a waiter that leaves, and a waiter that stays until the server ends.
  const int fd = running.connect_raw();
  const std::string large(3'000'000, 'x');
  send_bytes(fd, kValidate + frame(Opcode::set, sized("large") + sized(large)) +
                   frame(Opcode::get, sized("large")));
  assert(receive_bytes(fd, large.size() + 8) == sized(large));
  const int gone = running.connect_raw();
  send_bytes(gone, kValidate + frame(Opcode::barrier, sized("late") + bytes_of(int64_t{2})));
  close(gone);
  const int stranger = running.connect_raw();
  send_bytes(stranger, "GET / HTTP/1.1\r\n\r\n");
  assert(receive_bytes(stranger, 1).empty());
  close(stranger);
  send_bytes(fd, frame(Opcode::wait, bytes_of(uint64_t{1}) + sized("never")));
  running.server->stop();
  assert(receive_bytes(fd, 1).empty());
  close(fd);
  char logged[200] = {};
  assert(read(running.log[0], logged, sizeof logged - 1) > 0);
  assert(std::strstr(logged, "it is no client of a store") != nullptr);
}

// The client's end: several requests at once, long replies, a wait that ends in time or not.
void test_link() {
  Running running;
  const int fd = running.connect_raw();
  send_bytes(fd, kValidate);
  Link link(fd);
  const std::string large(500'000, 'y');
  link.begin();
  link.out().append(frame(Opcode::set, sized("k") + sized(large)) + frame(Opcode::get, sized("k")));
  link.out().append(frame(Opcode::multi_get, bytes_of(uint64_t{2}) + sized("k") + sized("none")));
  link.out().append(frame(Opcode::queue_pop, sized("q")) + frame(Opcode::list_keys));
  link.expect(Opcode::get);
  link.expect(Opcode::multi_get, 2);
  link.expect(Opcode::queue_pop);
  link.expect(Opcode::list_keys);
  assert(link.exchange(kMinuteNs) == Link::Result::ok);
  assert(Cursor(link.reply(0)).sized() == large && Cursor(link.reply(1)).sized() == large);
  assert(Cursor(link.reply(2)).number<int64_t>() == 0);
  assert(Cursor(link.reply(3)).number<uint64_t>() == 1);
  link.done();

  link.out().append(frame(Opcode::wait, bytes_of(uint64_t{1}) + sized("late")));
  link.expect(Opcode::wait);
  assert(link.exchange(1'000'000) == Link::Result::timeout);
  running.server->stop();
  // A reset, if the server had not read the request.
  const Link::Result end = link.exchange(kMinuteNs);
  assert(end == Link::Result::closed || end == Link::Result::error);
  close(fd);
}

void test_tokens() {
  Running running("secret");
  const std::string nonce(kNonceBytes, 'n');
  for (const bool right : {true, false}) {
    const int fd = running.connect_raw();
    send_bytes(fd, std::string(kHello) + nonce);
    const std::string answer = receive_bytes(fd, 1 + 2 * kNonceBytes);
    assert(answer.size() == 1 + 2 * kNonceBytes && answer[0] == kChallenge);
    const std::string theirs = answer.substr(1, kNonceBytes);
    assert(is_same(proof("secret", "server", nonce, theirs), answer.substr(1 + kNonceBytes)));
    const Digest mine = proof(right ? "secret" : "guess", "client", nonce, theirs);
    send_bytes(fd, std::string(mine.begin(), mine.end()) + kValidate + frame(Opcode::num_keys));
    assert(receive_bytes(fd, 1) == std::string(1, right ? kWelcome : kWrongToken));
    assert(receive_bytes(fd, 8).size() == (right ? 8 : 0));
    close(fd);
  }
}

// Memory runs out at any one allocation. Each client gets the right answer or loses its connection,
// no client waits for ever, and the process lives.
void test_no_memory() {
  const std::string key(100, 'k'), other(100, 'o'), value(200, 'v');
  bool has_failed = true;
  for (int64_t left = 0; has_failed; ++left) {
    Running running;
    allocations_left = left;
    const int waiter = running.try_connect(), second = running.try_connect(),
              third = running.try_connect();
    const auto try_send = [](int fd, const std::string& bytes) {
      const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      static_cast<void>(sent);
    };
    try_send(waiter,
             kValidate + frame(Opcode::wait, bytes_of(uint64_t{2}) + sized(key) + sized(other)));
    try_send(second, kValidate + frame(Opcode::barrier, sized(key) + bytes_of(int64_t{2})));
    try_send(third, kValidate + frame(Opcode::ping, bytes_of(uint32_t{7})));
    receive_bytes(third, 4);
    try_send(third, frame(Opcode::set, sized(key) + sized(value)) + frame(Opcode::get, sized(key)));
    const std::string got = receive_bytes(third, 8 + value.size());
    assert(got.empty() || got == sized(value));
    try_send(third, frame(Opcode::append, sized(other) + sized(value)) +
                      frame(Opcode::add, sized(other + "n") + bytes_of(int64_t{1} << 60)) +
                      frame(Opcode::queue_push, sized("q") + sized(value)) +
                      frame(Opcode::barrier, sized(key) + bytes_of(int64_t{2})) +
                      frame(Opcode::ping, bytes_of(uint32_t{7})));
    receive_bytes(third, 8 + 4);
    has_failed = allocations_left.exchange(-1) < 0;
    // Makes up for the requests of a lost client.
    const int helper = running.try_connect();
    try_send(helper, kValidate +
                       frame(Opcode::multi_set, bytes_of(uint64_t{2}) + sized(key) + sized("") +
                                                  sized(other) + sized("")) +
                       frame(Opcode::barrier, sized(key) + bytes_of(int64_t{2})));
    for (int fd : {waiter, second}) {
      const std::string answer = receive_bytes(fd, 1);
      assert(answer == std::string(1, kStopWaiting) || (answer.empty() && has_failed));
    }
    for (int fd : {helper, third, waiter, second}) close(fd);
  }
}

}  // namespace

int main() {
  is_test_thread = true;
  test_no_memory();
  test_frames_in_pieces();
  test_frames_out_of_bounds();
  test_random_frames();
  test_table();
  test_waiters();
  test_proofs();
  test_clients();
  test_link();
  test_tokens();
  std::puts("store: ok");
  return 0;
}
