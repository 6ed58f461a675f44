// One end of a connection whose bytes pass through TLS 1.3.
//
// Both ends know a key of 32 bytes, which is derived from the job's token; or both have a
// certificate. Nothing is resumed, no early data is sent, and every connection has fresh keys.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <sys/types.h>
#include <sys/uio.h>

#include "tls/openssl.hpp"

namespace unisono {

// What the sessions of a process share.
class TlsContext {
 public:
  // For keys that both ends know. Throws std::runtime_error if OpenSSL is not there.
  TlsContext() : TlsContext(false) {}
  // For certificates: paths of PEM files. Throws std::runtime_error if a file is of no use.
  TlsContext(const std::string& certificate, const std::string& key, const std::string& authority);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  openssl::Context* get() const { return context_; }
  const bool has_certificate;

 private:
  explicit TlsContext(bool has_certificate);

  openssl::Context* context_ = nullptr;
};

// Used by one thread at a time. The socket, which the caller owns, may be blocking or not.
class TlsSession {
 public:
  // A name and the key that both ends know by it. A client has one.
  using Secrets = std::vector<std::pair<std::string, std::string>>;

  // `name`: host name or address that the certificate of a server must have.
  TlsSession(std::shared_ptr<const TlsContext> context, int fd, bool is_server, Secrets secrets,
             const std::string& name);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  // As readv() and sendmsg(), with `flags` of recv() and send(). EAGAIN also during the handshake,
  // which both continue; EPROTO if it has failed, EBADMSG if a record is not what the other end
  // sent, or the connection ended inside one. write() returns the bytes that it has taken, some of
  // which may be unsent; without parts it only sends them.
  ssize_t read(const iovec* parts, int count, int flags);
  ssize_t write(const iovec* parts, int count, int flags);
  bool has_unsent() const { return sent_ != out_.size(); }
  // Whether bytes may be read that have left the socket already.
  bool has_unread() const;
  bool is_ready() const { return is_ready_; }
  // Whether the connection ended inside a record.
  bool is_cut() const { return is_cut_; }
  // Why it has failed; empty: it has not.
  const std::string& why() const { return why_; }
  // Whether the handshake failed because the other end has another key, or none.
  bool is_other_secret() const { return is_other_secret_; }
  // The name of the key that a client has shown; empty: of none.
  const std::string& secret_name() const { return secret_name_; }
  // The first byte received; -1: none.
  int first_byte() const { return first_; }

 private:
  friend struct Callbacks;

  // Whether what came is no TLS, whose records have the types 20 to 23.
  bool is_plain() const { return first_ >= 0 && (first_ < 20 || first_ > 23); }
  bool shake(int flags);
  int fetch(char* into, std::size_t nbytes);
  int receive(char* into, std::size_t nbytes);
  int hand_over(char* into, std::size_t nbytes);
  bool is_huge_hello(const char* data, std::size_t nbytes);
  bool flush(int flags);
  ssize_t failure(int result);
  void explain();
  bool put(const char* data, std::size_t nbytes);

  const openssl::Functions& call_;
  std::shared_ptr<const TlsContext> context_;
  const int fd_;
  const bool is_server_;
  Secrets secrets_;
  openssl::Session* session_ = nullptr;
  std::vector<char> in_;   // [taken_, got_) is received, and OpenSSL has not asked for it
  std::vector<char> out_;  // [sent_, end) is encrypted and unsent
  std::vector<char> record_;
  std::size_t taken_ = 0;
  std::size_t got_ = 0;
  std::size_t sent_ = 0;
  std::size_t since_update_ = 0;
  unsigned char greeting_[9] = {};  // a client's first bytes
  std::size_t greeted_ = 0;
  int flags_ = 0;  // for recv()
  int errno_ = 0;
  int lost_ = 0;  // the error that ended the connection
  int first_ = -1;
  bool is_ready_ = false;
  bool was_short_ = false;   // the last read of the socket has emptied it
  bool is_partial_ = false;  // what is left is part of a record
  bool has_ended_ = false;
  bool was_whole_ = true;  // OpenSSL has got all bytes that it has asked for
  bool is_cut_ = false;
  bool is_other_secret_ = false;
  std::string secret_name_;
  std::string why_;
};

}  // namespace unisono
