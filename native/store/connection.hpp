// One client of the server: its incomplete request, its unsent replies, its wait.
#pragma once

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

  void send_soon() {
    if (!is_dirty) owner->dirty_.push_back(this);
    is_dirty = true;
  }

  Server* owner;
  const int fd;
  const uint64_t id;
  const PeerAddress peer;
  Buffer in;
  Buffer out;
  Scanner scanner;
  std::unique_ptr<Nonce> client_nonce;
  std::unique_ptr<Nonce> server_nonce;
  Phase phase = Phase::greeting;
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
