// Finds the user id of the local peer of a connection; the twin of
// src/unisono/core/platform/peer_user.py.
#include <cerrno>
#include <cstring>

#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "store/address.hpp"

namespace unisono::store {

namespace {

struct Question {
  nlmsghdr head{};
  inet_diag_req_v2 body{};
};

// Ask the kernel (sock_diag). False: it gives no answer.
bool ask(const Question& question, char* answer, std::size_t size) {
  const int fd = socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
  if (fd < 0) return false;
  const timeval patience{1, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  const bool is_answered = send(fd, &question, sizeof question, 0) == sizeof question &&
                           recv(fd, answer, size, 0) >= static_cast<ssize_t>(sizeof(nlmsghdr) + 4);
  close(fd);
  return is_answered;
}

}  // namespace

bool PeerAddress::is_foreign(int fd) const {
  sockaddr_storage found{};
  socklen_t found_size = sizeof found;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&found), &found_size) != 0) return true;
  const PeerAddress own(found);
  Question question;
  question.head.nlmsg_len = sizeof question;
  question.head.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  question.head.nlmsg_flags = NLM_F_REQUEST;
  question.body.sdiag_family = static_cast<__u8>(family_);
  question.body.sdiag_protocol = IPPROTO_TCP;
  question.body.idiag_states = ~0u;
  inet_diag_sockid& id = question.body.id;
  id.idiag_sport = htons(port_);
  id.idiag_dport = htons(own.port_);
  std::memcpy(id.idiag_src, bytes_, sizeof bytes_);
  std::memcpy(id.idiag_dst, own.bytes_, sizeof own.bytes_);
  id.idiag_cookie[0] = id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;

  alignas(nlmsghdr) char answer[1024] = {};
  if (!ask(question, answer, sizeof answer)) return false;
  nlmsghdr head;
  std::memcpy(&head, answer, sizeof head);
  if (head.nlmsg_type == NLMSG_ERROR) {
    nlmsgerr error;
    std::memcpy(&error, answer + NLMSG_HDRLEN, sizeof error);
    return error.error == -ENOENT;
  }
  inet_diag_msg message;
  std::memcpy(&message, answer + NLMSG_HDRLEN, sizeof message);
  // In place of a socket that is gone the kernel may report a listening socket, or user 0.
  return message.idiag_state != TCP_ESTABLISHED || message.idiag_uid != geteuid();
}

}  // namespace unisono::store
