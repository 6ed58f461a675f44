// Where a client comes from.
#pragma once

#include <cstdint>
#include <string>

#include <sys/socket.h>

namespace unisono::store {

class Address {
 public:
  explicit Address(const sockaddr_storage& from);

  // "10.0.0.1:4242"; an IPv6 address stands in brackets.
  std::string text() const;
  // Whether it is a process of this machine, connected to it by socket `fd`.
  bool is_local(int fd) const;
  // Whether such a process belongs to another user, or has gone; false if the system does not tell.
  bool is_foreign(int fd) const;

 private:
  bool is_loopback() const;

  unsigned char bytes_[16] = {};
  uint16_t port_ = 0;
  sa_family_t family_ = AF_UNSPEC;
};

}  // namespace unisono::store
