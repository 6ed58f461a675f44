// The client of `benchmarks/store.py` for throughput, in C++ so that the server is the bottleneck.
//
//     store_load COUNT FD... < request
//
// Sends the request COUNT times over inherited connections, with one request in flight on each, and
// prints the seconds until the last reply. A reply must be short enough to arrive in one piece.

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int kEvents = 256;
constexpr int kTimeoutMs = 60'000;

std::string read_request() {
  std::string request(4096, '\0');
  request.resize(std::fread(request.data(), 1, request.size(), stdin));
  return request;
}

void put(int fd, const std::string& request) {
  if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(request.size())) {
    throw std::runtime_error("the store server accepts no further requests");
  }
}

double drive(const std::vector<int>& connections, const std::string& request, uint64_t count) {
  const int poll = epoll_create1(EPOLL_CLOEXEC);
  for (int fd : connections) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event) != 0) throw std::runtime_error("epoll failed");
  }
  const auto start = std::chrono::steady_clock::now();
  uint64_t sent = 0;
  for (; sent < connections.size(); ++sent) put(connections[sent], request);
  epoll_event events[kEvents];
  char reply[256];
  for (uint64_t done = 0; done < count;) {
    const int ready = epoll_wait(poll, events, kEvents, kTimeoutMs);
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) throw std::runtime_error("the store server does not answer");
    for (int i = 0; i < ready; ++i) {
      const int fd = events[i].data.fd;
      if (recv(fd, reply, sizeof reply, 0) <= 0) throw std::runtime_error("the store server ended");
      ++done;
      if (sent >= count) continue;
      put(fd, request);
      ++sent;
    }
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> connections;
  for (int i = 2; i < argc; ++i) connections.push_back(std::atoi(argv[i]));
  try {
    std::printf("%.9f\n", drive(connections, read_request(), std::strtoull(argv[1], nullptr, 10)));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
