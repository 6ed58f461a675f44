#include "store/address.hpp"

#include <cstring>

#include <arpa/inet.h>
#include <netinet/in.h>

namespace unisono::store {

PeerAddress::PeerAddress(const sockaddr_storage& from) {
  if (from.ss_family == AF_INET) {
    sockaddr_in v4;
    std::memcpy(&v4, &from, sizeof v4);
    family_ = AF_INET;
    std::memcpy(bytes_, &v4.sin_addr, 4);
    port_ = ntohs(v4.sin_port);
  } else if (from.ss_family == AF_INET6) {
    sockaddr_in6 v6;
    std::memcpy(&v6, &from, sizeof v6);
    // An IPv4 address in its IPv6 form is stored as IPv4.
    const bool is_v4 = IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr) != 0;
    family_ = is_v4 ? AF_INET : AF_INET6;
    std::memcpy(bytes_, v6.sin6_addr.s6_addr + (is_v4 ? 12 : 0), is_v4 ? 4 : 16);
    port_ = ntohs(v6.sin6_port);
  }
}

std::string PeerAddress::text() const {
  char text[INET6_ADDRSTRLEN] = "?";
  inet_ntop(family_, bytes_, text, sizeof text);
  const std::string port = ":" + std::to_string(port_);
  return family_ == AF_INET6 ? "[" + std::string(text) + "]" + port : text + port;
}

bool PeerAddress::is_loopback() const {
  if (family_ == AF_INET) return bytes_[0] == 127;
  in6_addr v6;
  std::memcpy(&v6, bytes_, sizeof v6);
  return family_ == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&v6);
}

bool PeerAddress::is_local(int fd) const {
  if (is_loopback()) return true;
  // A connection to one of this machine's own addresses also comes from that address. No other
  // machine can have the address and receive the answers.
  sockaddr_storage found{};
  socklen_t size = sizeof found;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&found), &size) != 0) return false;
  const PeerAddress own(found);
  return family_ != AF_UNSPEC && family_ == own.family_ &&
         std::memcmp(bytes_, own.bytes_, sizeof bytes_) == 0;
}

}  // namespace unisono::store
