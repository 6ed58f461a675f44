#include "store/server.hpp"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <set>
#include <stdexcept>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "store/connection.hpp"

namespace unisono::store {

namespace {

constexpr std::size_t kChunk = 256 * 1024;
// After this many chunks of a client the server handles the other clients.
constexpr int kChunksPerTurn = 8;
constexpr int kAcceptsPerTurn = 64;
// From this many unsent bytes on, the server reads no requests of the client.
constexpr std::size_t kUnsent = 1024 * 1024;
// How long a client may take to identify itself.
constexpr int64_t kGreetingNs = 30'000'000'000;
// By how much that time is shortened if no descriptors are left: silent strangers must not keep the
// job's own clients out.
constexpr int64_t kHurryNs = kGreetingNs - 1'000'000'000;
constexpr int kRetryAcceptMs = 100;
constexpr int kEvents = 256;

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void set_option(int fd, int level, int name, int value) {
  setsockopt(fd, level, name, &value, sizeof value);
}

}  // namespace

// Holds the locks of all servers across a fork, because the child must find every socket to close
// its copy. Otherwise the child would keep the port open without a server, and the clients of a
// killed parent would wait for ever.
class ForkHandlers {
 public:
  static void add(Server* server) {
    static const int once = pthread_atfork(&before, &in_parent, &in_child);
    static_cast<void>(once);
    const std::lock_guard<std::mutex> held(lock());
    servers().insert(server);
  }
  static void remove(Server* server) {
    const std::lock_guard<std::mutex> held(lock());
    servers().erase(server);
  }

 private:
  // Never destroyed, because a server may outlive the statics of this file.
  static std::mutex& lock() {
    static auto* lock = new std::mutex;
    return *lock;
  }
  static std::set<Server*>& servers() {
    static auto* servers = new std::set<Server*>;
    return *servers;
  }
  static void before() {
    lock().lock();
    for (Server* server : servers()) server->connections_lock_.lock();
  }
  static void in_parent() {
    for (Server* server : servers()) server->connections_lock_.unlock();
    lock().unlock();
  }
  static void in_child() {
    for (Server* server : servers()) {
      server->close_sockets();
      server->connections_lock_.unlock();
    }
    // For good: when this child forks, the descriptors may be those of its own files.
    servers().clear();
    lock().unlock();
  }
};

Server::Owner Server::start(std::vector<int> listeners, int log_fd, Options options) {
  Owner server(new Server(std::move(listeners), log_fd, std::move(options)));
  if (server->epoll_ < 0 || server->wake_ < 0) {
    server->close_sockets();
    throw std::runtime_error("no descriptors for a store server");
  }
  ForkHandlers::add(server.get());
  // Signals must reach Python's main thread: taken here, they would not interrupt its wait.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    server->thread_ = std::thread(&Server::run, server.get());
  } catch (const std::system_error&) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return server;
}

Server::Server(std::vector<int> listeners, int log_fd, Options options)
    : listeners_(std::move(listeners)),
      log_fd_(log_fd),
      options_(std::move(options)),
      log_limit_(options_.log_window_ns),
      pid_(getpid()),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      chunk_(new char[kChunk]) {
  for (int listener : listeners_) {
    fcntl(listener, F_SETFL, fcntl(listener, F_GETFL) | O_NONBLOCK);
    // Accepted sockets inherit these options. A client whose machine died is detected after 90 s.
    set_option(listener, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(listener, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(listener, IPPROTO_TCP, TCP_KEEPIDLE, 60);
    set_option(listener, IPPROTO_TCP, TCP_KEEPINTVL, 10);
    set_option(listener, IPPROTO_TCP, TCP_KEEPCNT, 3);
    epoll_event event{};
    event.events = EPOLLIN | EPOLLET;
    event.data.ptr = &listeners_;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, listener, &event);
  }
  epoll_event event{};
  event.events = EPOLLIN;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
}

void Server::Stopper::operator()(Server* server) const {
  server->stop();
  ForkHandlers::remove(server);
  // The child has no thread to join, and its table may be incomplete: the copy stays as it is.
  if (getpid() == server->pid_) delete server;
}

void Server::stop() {
  if (getpid() != pid_ || stopping_.exchange(true)) return;
  const uint64_t one = 1;
  if (write(wake_, &one, sizeof one) < 0) return;  // impossible: the counter is at 0
  if (thread_.joinable()) thread_.join();          // the thread may not have started
  sum_up_log(LogLimit::kNever - 1);
  const std::lock_guard<std::mutex> held(connections_lock_);
  close_sockets();
  connections_.clear();
}

void Server::close_sockets() {
  for (int& fd : listeners_) close(std::exchange(fd, -1));
  for (const auto& item : connections_) close(item.first);
  for (int* fd : {&epoll_, &wake_, &log_fd_}) close(std::exchange(*fd, -1));
  client_count_ = 0;
}

void Server::run() try {
  epoll_event events[kEvents];
  while (!stopping_.load(std::memory_order_relaxed)) {
    const int count = epoll_wait(epoll_, events, kEvents, timeout_ms());
    for (int i = 0; i < count; ++i) {
      if (events[i].data.ptr == &listeners_) may_accept_ = true;
      if (events[i].data.ptr == nullptr || events[i].data.ptr == &listeners_) continue;
      auto& client = *static_cast<Connection*>(events[i].data.ptr);
      if (events[i].events & ~uint32_t{EPOLLOUT}) client.has_input = true;
      if (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) client.has_ended = true;
      serve(client);
    }
    if (!later_.empty()) {
      for (Connection* client : std::exchange(later_, {})) {
        client->is_later = false;
        serve(*client);
      }
    }
    if (may_accept_) accept_some();
    tidy();
  }
} catch (...) {
  // No memory for a few bytes, perhaps in the middle of a change. Every client sees its connection
  // end, so that no client waits for ever or reads an incomplete change.
  log("the server ends: out of memory");
  const std::lock_guard<std::mutex> held(connections_lock_);
  for (int& fd : listeners_) close(std::exchange(fd, -1));
  for (const auto& item : connections_) close(item.first);
  connections_.clear();
  client_count_ = 0;
}

int Server::timeout_ms() {
  if (!later_.empty()) return 0;
  if (may_accept_) return out_of_descriptors_ ? kRetryAcceptMs : 0;
  int64_t until_ns = log_limit_.due_ns();
  if (!greetings_.empty()) until_ns = std::min(until_ns, greetings_.front().until_ns);
  if (until_ns == LogLimit::kNever) return -1;
  const int64_t left_ns = until_ns - now_ns();
  return static_cast<int>(std::max<int64_t>(left_ns, 0) / 1'000'000) + 1;
}

void Server::accept_some() {
  const std::lock_guard<std::mutex> held(connections_lock_);
  may_accept_ = out_of_descriptors_ = false;
  for (int listener : listeners_) {
    for (int accepted = 0; accept_from(listener); ++accepted) {
      if (accepted < kAcceptsPerTurn) continue;
      may_accept_ = true;
      break;
    }
  }
}

bool Server::accept_from(int listener) {
  sockaddr_storage from{};
  socklen_t size = sizeof from;
  const int fd =
    accept4(listener, reinterpret_cast<sockaddr*>(&from), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      // The connection stays queued, and a descriptor may be free later.
      if (!out_of_descriptors_) log("accept failed: too many open files");
      may_accept_ = out_of_descriptors_ = true;
    }
    return errno == ECONNABORTED || errno == EINTR;
  }
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  try {
    auto client = std::make_unique<Connection>(this, fd, next_id_++, from);
    event.data.ptr = client.get();
    greetings_.push_back({now_ns() + kGreetingNs, fd, client->id});
    connections_.emplace(fd, std::move(client));
  } catch (const std::bad_alloc&) {
    log("accept failed: out of memory");
    close(fd);
    return true;
  }
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) {
    connections_.erase(fd);
    close(fd);
    return true;
  }
  client_count_.store(connections_.size(), std::memory_order_relaxed);
  return true;
}

// Read and answer requests as far as possible. Short replies are sent after all clients were
// handled: a client that waits on several connections then finds many replies at once.
void Server::serve(Connection& client) try {
  int chunks = 0;
  while (!client.is_doomed) {
    if (chunks > 0 || client.out.size() > kUnsent) flush(client);
    if (client.out.size() > kUnsent) return;  // continues when the client has read replies
    if (client.is_held) {
      take_kept(client);
      continue;
    }
    if (!client.has_input) break;
    if (++chunks > kChunksPerTurn) {
      if (!client.is_later) later_.push_back(&client);
      client.is_later = true;
      break;
    }
    receive(client);
  }
  if (client.has_output()) client.send_soon();
} catch (const std::bad_alloc&) {
  doom(client, "out of memory");
}

// Receive one chunk.
void Server::receive(Connection& client) {
  if (!client.is_sniffed && !sniff(client)) return;
  const bool in_place = !client.in.is_empty();
  // As many bytes as are there, so that memory grows with the bytes sent, not with an announced
  // size.
  const std::size_t asked =
    in_place ? std::clamp<std::size_t>(client.in.size(), 4096, 16 * kChunk) : kChunk;
  char* into = in_place ? client.in.space(asked) : chunk_.get();
  const ssize_t count = client.get(into, asked);
  if (count <= 0) {
    if (count < 0 && errno == EINTR) return;
    client.has_input = false;
    if (count != 0 && errno == EAGAIN) return;
    if (client.tls && client.tls->is_other_secret()) note_refusal(client, client.tls->why());
    doom(client, client.tls ? client.tls->why() : "");
    return;
  }
  const auto size = static_cast<std::size_t>(count);
  if (size < asked && !client.has_ended) client.has_input = false;
  if (in_place) {
    client.in.added(size);
    take_kept(client);
  } else {
    const std::size_t taken = take(client, into, size);
    client.in.append({into + taken, size - taken});
  }
}

// Handle bytes that came earlier.
void Server::take_kept(Connection& client) {
  client.in.drop_front(take(client, client.in.data(), client.in.size()));
}

// Handle the complete requests at the start of `data`; return their size.
std::size_t Server::take(Connection& client, const char* data, std::size_t size) {
  std::size_t at = 0;
  while (at < size && !client.is_doomed && client.out.size() <= kUnsent) {
    if (client.phase < Connection::Phase::validating) {
      const std::size_t taken = greet(client, {data + at, size - at});
      at += taken;
      if (taken == 0 && client.phase < Connection::Phase::validating) break;
      continue;
    }
    const Scanner::State state = client.scanner.scan_request(data + at, size - at);
    if (state == Scanner::State::partial) break;
    if (state == Scanner::State::bad) {
      doom(client, client.scanner.error());
      break;
    }
    decode(data + at, request_);
    at += client.scanner.length();
    client.scanner.reset();
    handle(client);
  }
  client.is_held = at < size && client.out.size() > kUnsent;
  return at;
}

void Server::flush(Connection& client) {
  while (client.has_output() && !client.is_doomed) {
    const ssize_t sent = client.put();
    if (sent >= 0) {
      client.out.drop_front(static_cast<std::size_t>(sent));
    } else if (errno != EINTR) {
      if (errno != EAGAIN) doom(client);
      return;
    }
  }
}

// Mark a client to be closed. It is not served afterwards.
void Server::doom(Connection& client, const std::string& why) {
  if (client.is_doomed) return;
  client.is_doomed = true;
  doomed_.push_back(&client);
  if (!why.empty()) log("closing " + client.peer.text() + ": " + why);
  // At once, because the next request must not find the client in a barrier.
  table_.forget(client);
  if (const auto promised = table_.take_promise(client)) table_.end_promise(*promised);
}

// Send replies to woken clients and close marked clients. Both can wake or mark further clients.
void Server::tidy() {
  sum_up_log(now_ns());
  while (!greetings_.empty()) {
    const Greeting& oldest = greetings_.front();
    auto found = connections_.find(oldest.fd);
    const bool waits = found != connections_.end() && found->second->id == oldest.id &&
                       found->second->phase != Connection::Phase::open;
    const bool is_crowded = greetings_.size() > options_.max_greetings;
    if (waits && !is_crowded && oldest.until_ns - (out_of_descriptors_ ? kHurryNs : 0) > now_ns()) {
      break;
    }
    if (waits) doom(*found->second, "it did not identify itself in time");
    greetings_.pop_front();
  }
  while (!dirty_.empty() || !doomed_.empty()) {
    for (Connection* client : std::exchange(dirty_, {})) {
      client->is_dirty = false;
      flush(*client);
    }
    for (Connection* client : std::exchange(doomed_, {})) drop(*client);
  }
}

void Server::drop(Connection& client) {
  dirty_.erase(std::remove(dirty_.begin(), dirty_.end(), &client), dirty_.end());
  later_.erase(std::remove(later_.begin(), later_.end(), &client), later_.end());
  const int fd = client.fd;
  const std::lock_guard<std::mutex> held(connections_lock_);
  connections_.erase(fd);
  close(fd);
  client_count_.store(connections_.size(), std::memory_order_relaxed);
  may_accept_ = may_accept_ || out_of_descriptors_;
}

}  // namespace unisono::store
