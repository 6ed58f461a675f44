// The TCPStore server: one thread and one epoll, without the interpreter lock. It serves clients of
// torch and of unisono.
//
// Only the server's thread uses the table and the bytes of clients. The set of connections changes
// under a lock, because a fork must find it complete.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include <sys/types.h>

#include "store/buffer.hpp"
#include "store/log_limit.hpp"
#include "store/table.hpp"
#include "store/token.hpp"
#include "store/wire.hpp"
#include "tls/session.hpp"

namespace unisono::store {

class Server {
 public:
  // The clients that must speak TLS.
  enum class Tls : char { none, other_hosts, all };
  struct Options {
    std::string token;      // which clients must prove to know; empty: there is none
    bool serves_strangers;  // serve clients without a token also from other machines
    uint64_t max_reply_bytes = kMaxReplyBytes;
    // A client that has not identified itself is closed after this many later clients.
    std::size_t max_greetings = 4096;
    // Within this time a few lines are logged; the others are summed up.
    int64_t log_window_ns = 60'000'000'000;
    Tls tls = Tls::none;
    std::shared_ptr<const TlsContext> context = nullptr;
    // gcc warns if an initializer leaves it out.
    TlsSession::Secrets secrets = {};  // NOLINT(readability-redundant-member-init)
  };
  struct Stopper {
    void operator()(Server* server) const;
  };
  using Owner = std::unique_ptr<Server, Stopper>;

  // Start the thread. The server then owns the listening sockets, and a pipe for log lines.
  static Owner start(std::vector<int> listeners, int log_fd, Options options);
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // End the thread and close every socket. Waiting clients see the end of the connection.
  void stop();
  std::size_t clients() const { return client_count_.load(std::memory_order_relaxed); }

 private:
  struct Connection;
  struct Greeting {  // the time in which a client must identify itself
    int64_t until_ns;
    int fd;
    uint64_t id;
  };
  friend class ForkHandlers;

  Server(std::vector<int> listeners, int log_fd, Options options);
  ~Server() = default;
  void run();
  int timeout_ms();
  void accept_some();
  bool accept_from(int listener);
  void serve(Connection& client);
  void receive(Connection& client);
  void take_kept(Connection& client);
  std::size_t take(Connection& client, const char* data, std::size_t size);
  bool sniff(Connection& client);
  bool lacks_tls(const Connection& client) const;
  std::size_t greet(Connection& client, std::string_view data);
  void admit(Connection& client, std::string_view client_nonce);
  void note_refused(const Connection& client);
  void note_refusal(const Connection& client, const std::string& why);
  void refuse(Connection& client, Answer answer, const std::string& why);
  void flush(Connection& client);
  void handle(Connection& client);
  void answer_more(Connection& client);
  void answer_multi_get(Connection& client);
  void doom(Connection& client, const std::string& why = {});
  void tidy();
  void drop(Connection& client);
  void log(std::string_view line);
  void sum_up_log(int64_t until_ns);
  void write_log(std::string_view line);
  void close_sockets();

  std::vector<int> listeners_;
  int log_fd_;
  const Options options_;
  LogLimit log_limit_;
  const pid_t pid_;
  int epoll_ = -1;
  int wake_ = -1;
  std::atomic<bool> stopping_{false};
  std::atomic<std::size_t> client_count_{0};

  // Held to add or remove a connection, and across a fork.
  std::mutex connections_lock_;
  std::unordered_map<int, std::unique_ptr<Connection>> connections_;

  Table table_;
  Request request_;
  std::deque<Greeting> greetings_;
  std::vector<Connection*> dirty_;   // have replies to send
  std::vector<Connection*> later_;   // have more to read, after the other clients
  std::vector<Connection*> doomed_;  // to be closed when no pointer to them is left
  std::unique_ptr<char[]> chunk_;
  bool may_accept_ = false;
  bool out_of_descriptors_ = false;
  uint64_t next_id_ = 0;
  std::thread thread_;
};

}  // namespace unisono::store
