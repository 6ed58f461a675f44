// The address of a client.
#pragma once

#include <cstdint>
#include <string>

#include <sys/socket.h>

namespace unisono::store {

class PeerAddress {
 public:
  explicit PeerAddress(const sockaddr_storage& from);

  // Return "10.0.0.1:4242"; an IPv6 address is in brackets.
  std::string text() const;
  // Whether the client is a process of this machine that is connected by socket `fd`.
  bool is_local(int fd) const;
  // Whether a client on this machine belongs to another user or has ended. False if the kernel
  // gives no answer.
  bool is_foreign(int fd) const;

 private:
  bool is_loopback() const;

  unsigned char bytes_[16] = {};
  uint16_t port_ = 0;
  sa_family_t family_ = AF_UNSPEC;
};

}  // namespace unisono::store
