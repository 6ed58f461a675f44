// One client of the server: its incomplete request, its unsent replies, its wait.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include "store/address.hpp"
#include "store/server.hpp"

namespace unisono::store {

struct Server::Connection final : Waiter {
  enum class Phase : char { greeting, proving, validating, open };
  using Nonce = std::array<char, kNonceBytes>;

  Connection(Server* server, int socket, uint64_t number, const sockaddr_storage& from)
      : owner(server), fd(socket), id(number), peer(from) {}

  void wake() override {
    // STOP_WAITING is the answer to WAIT and to BARRIER.
    out.append_number(kStopWaiting);
    send_soon();
  }

  bool has_output() const { return !out.is_empty() || (tls != nullptr && tls->has_unsent()); }

  // As recv() and send().
  ssize_t get(char* into, std::size_t nbytes) const {
    if (tls == nullptr) return recv(fd, into, nbytes, 0);
    const iovec part{into, nbytes};
    return tls->read(&part, 1, 0);
  }
  ssize_t put() {
    if (tls == nullptr) return send(fd, out.data(), out.size(), MSG_NOSIGNAL);
    const iovec part{const_cast<char*>(out.data()), out.size()};
    return tls->write(&part, 1, 0);
  }

  void send_soon() {
    if (!is_dirty) owner->dirty_.push_back(this);
    is_dirty = true;
  }

  Server* owner;
  const int fd;
  const uint64_t id;
  const PeerAddress peer;
  std::unique_ptr<TlsSession> tls;  // what its bytes pass through; nullptr: they are plain
  Buffer in;
  Buffer out;
  Scanner scanner;
  std::unique_ptr<Nonce> client_nonce;
  std::unique_ptr<Nonce> server_nonce;
  Phase phase = Phase::greeting;
  bool is_sniffed = false;
  bool has_input = false;  // the socket may have more to read
  bool has_ended = false;  // the peer will send no more
  bool is_held = false;    // requests are not handled until replies were sent
  bool is_dirty = false;
  bool is_later = false;
  bool is_doomed = false;
};

// Return text in quotes, shortened and safe for a log line.
std::string quoted(std::string_view text);

}  // namespace unisono::store
