#include "store/load.hpp"

#include <cerrno>
#include <chrono>
#include <stdexcept>

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

namespace unisono::store {

namespace {

constexpr int kEvents = 256;
constexpr int kPatienceMs = 60'000;

struct Poll {
  const int fd = epoll_create1(EPOLL_CLOEXEC);
  ~Poll() { close(fd); }
};

void put(int fd, std::string_view request) {
  if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(request.size())) {
    throw std::runtime_error("the store server does not take requests any more");
  }
}

}  // namespace

double drive(const std::vector<int>& connections, std::string_view request, uint64_t count) {
  const Poll poll;
  for (int fd : connections) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (epoll_ctl(poll.fd, EPOLL_CTL_ADD, fd, &event) != 0) throw std::runtime_error("no epoll");
  }
  const auto start = std::chrono::steady_clock::now();
  uint64_t sent = 0;
  for (; sent < connections.size(); ++sent) put(connections[sent], request);
  epoll_event events[kEvents];
  char reply[256];
  for (uint64_t done = 0; done < count;) {
    const int ready = epoll_wait(poll.fd, events, kEvents, kPatienceMs);
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

}  // namespace unisono::store
