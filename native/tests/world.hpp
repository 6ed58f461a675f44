// Threads as ranks, for tests of messages.
#pragma once

#include "messages/messages.hpp"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <thread>

#include <sys/socket.h>
#include <unistd.h>

using namespace unisono;

namespace {

constexpr int64_t kMinute = 60'000'000'000;
constexpr int64_t kMoment = 30'000'000;

enum Ways { kRings, kWires, kBoth };
Ways ways = kRings;
int channels = 1;  // wires between two ranks

struct World {
  explicit World(int ranks, bool connected = true) {
    for (int rank = 0; rank < ranks; ++rank) {
      all.push_back(std::make_unique<Messages>(rank, ranks));
      Address address;
      address.nonce[0] = static_cast<unsigned char>(rank + 1);
      address.pid = getpid();
      address.fd = all.back()->create(address.nonce);
      assert(address.fd >= 0);
      address.channels = channels;
      addresses.push_back(address);
    }
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<Address> known(addresses);
      for (int other = 0; other < ranks; ++other) {
        if (is_wired(rank, other)) known[static_cast<size_t>(other)].pid = 0;
        if (connected && other < rank && is_wired(rank, other)) connect(rank, other);
      }
      (*this)[rank].introduce(known, true);
    }
  }
  ~World() {
    for (auto& messages : all) end(*messages, 0);
  }
  static bool is_wired(int a, int b) {
    return ways == kWires || (ways == kBoth && (a + b) % 2 == 0);
  }
  void connect(int a, int b) {
    for (int channel = 0; channel < channels; ++channel) connect(a, b, channel);
  }
  // The socket buffers are small, so that frames are split at every position.
  void connect(int a, int b, int channel) {
    int fds[2];
    assert(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
    const int bytes = 8 * 1024;
    for (int fd : fds) assert(setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes)) == 0);
    sockets[std::minmax(a, b)].push_back(fds[0]);
    (*this)[a].add_wire(b, channel, fds[0]);
    (*this)[b].add_wire(a, channel, fds[1]);
  }
  // Break a wire for both ends, as a network may.
  void cut(int a, int b, size_t wire) { shutdown(sockets[std::minmax(a, b)][wire], SHUT_RDWR); }
  static void end(Messages& messages, int64_t timeout_ns) {
    for (int fd : messages.close(timeout_ns)) ::close(fd);
  }
  Messages& operator[](int rank) { return *all[static_cast<size_t>(rank)]; }

  // Run a body and a server thread per rank.
  void run(const std::function<void(Messages&, int)>& body) {
    std::vector<std::thread> bodies, servers;
    for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
      bodies.emplace_back([&, rank] { body((*this)[rank], rank); });
      servers.emplace_back([&, rank] {
        while (!(*this)[rank].serve().empty()) continue;
      });
    }
    for (auto& each : bodies) each.join();
    std::vector<int> fds;
    for (auto& messages : all) {
      for (int fd : messages->close(kMinute)) fds.push_back(fd);
    }
    for (auto& each : servers) each.join();
    for (int fd : fds) ::close(fd);
  }

  std::vector<std::unique_ptr<Messages>> all;
  std::vector<Address> addresses;
  std::map<std::pair<int, int>, std::vector<int>> sockets;  // in the order of creation
};

inline Envelope envelope(int64_t tag, uint64_t nbytes, uint64_t context = 7) {
  return {context, tag, nbytes, 5};
}

inline std::vector<char> pattern(size_t nbytes, unsigned seed) {
  std::vector<char> bytes(nbytes);
  for (size_t i = 0; i < nbytes; ++i) bytes[i] = static_cast<char>((i * 7 + seed * 31) % 251);
  return bytes;
}

inline Ranks both() { return std::make_shared<const std::vector<int>>(std::vector<int>{0, 1}); }

}  // namespace
