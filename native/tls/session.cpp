#include "tls/session.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>

#include <sys/socket.h>

namespace unisono {

namespace {

using openssl::Functions;

// Constants of OpenSSL's headers.
constexpr int kSetMode = 33, kSetLeast = 123, kSetMost = 124;
constexpr long kMovingBuffer = 2;
constexpr long kTls13 = 0x0304;
constexpr unsigned long kNoTicket = 1ul << 14, kNoCompression = 1ul << 17;
constexpr int kVerifyPeer = 1, kNeedsCertificate = 2;
constexpr int kPem = 1;
constexpr int kFlush = 11;
constexpr int kRetryRead = 1 | 8;
constexpr int kRetryAll = 15;
constexpr int kSourceSink = 0x0400 | 0xff;  // a type that OpenSSL leaves to programs

constexpr std::size_t kRecordBytes = 16 * 1024;
constexpr std::size_t kRecordHeadBytes = 5;
// Encrypted bytes of a system call. With more they leave the cache before they are sent; with fewer
// the other end wakes for each record.
constexpr std::size_t kBatchBytes = 16 * kRecordBytes;
// A system call receives up to this beside what OpenSSL asks for. A call for each record of a large
// message would cost more than to copy them. The buffer is small until OpenSSL asks for a long one.
constexpr std::size_t kBufferBytes = 16 * kRecordBytes;
constexpr std::size_t kGreetingBytes = 4096;
// From this many bytes on a connection takes new keys. AES-GCM needs them after 2^24.5 records.
constexpr std::size_t kUpdateBytes = std::size_t{1} << 36;

const Functions& loaded() {
  const Functions* found = openssl::functions();
  if (found == nullptr) throw std::runtime_error("no OpenSSL: " + openssl::why_absent());
  return *found;
}

bool would_block(int code) { return code == EAGAIN || code == EWOULDBLOCK || code == EINTR; }

}  // namespace

// What OpenSSL calls.
struct Callbacks {
  static TlsSession& of(openssl::Session* session) {
    return *static_cast<TlsSession*>(openssl::functions()->SSL_get_ex_data(session, 0));
  }
  static TlsSession& of(openssl::Stream* stream) {
    return *static_cast<TlsSession*>(openssl::functions()->BIO_get_data(stream));
  }

  static unsigned give(const std::string& from, unsigned char* key, unsigned size) {
    if (from.size() > size) return 0;
    std::copy(from.begin(), from.end(), key);
    return static_cast<unsigned>(from.size());
  }
  static unsigned ask_secret(openssl::Session* session, const char* /*hint*/, char* identity,
                             unsigned identity_size, unsigned char* key, unsigned key_size) {
    const TlsSession& here = of(session);
    if (here.secrets_.empty() || here.secrets_[0].first.size() >= identity_size) return 0;
    std::memcpy(identity, here.secrets_[0].first.c_str(), here.secrets_[0].first.size() + 1);
    return give(here.secrets_[0].second, key, key_size);
  }
  static unsigned find_secret(openssl::Session* session, const char* identity, unsigned char* key,
                              unsigned key_size) {
    TlsSession& here = of(session);
    for (const auto& [name, secret] : here.secrets_) {
      if (name != identity) continue;
      here.secret_name_ = name;
      return give(secret, key, key_size);
    }
    return 0;
  }

  // A key file with a password would ask for it at the terminal.
  static int no_password(char* /*into*/, int /*size*/, int /*is_for_writing*/, void* /*user*/) {
    return 0;
  }

  static int write(openssl::Stream* stream, const char* data, int nbytes) {
    TlsSession& here = of(stream);
    try {
      here.out_.insert(here.out_.end(), data, data + nbytes);
    } catch (const std::bad_alloc&) {
      return -1;
    }
    return nbytes;
  }
  static int read(openssl::Stream* stream, char* into, int nbytes) {
    TlsSession& here = of(stream);
    openssl::functions()->BIO_clear_flags(stream, kRetryAll);
    const int count = here.hand_over(into, static_cast<std::size_t>(nbytes));
    if (count < 0 && would_block(here.errno_)) {
      openssl::functions()->BIO_set_flags(stream, kRetryRead);
    }
    return count;
  }
  static long control(openssl::Stream* /*stream*/, int what, long /*number*/, void* /*pointer*/) {
    return what == kFlush ? 1 : 0;
  }

  static const openssl::Method* method() {
    static const openssl::Method* const method = [] {
      const Functions& call = loaded();
      openssl::Method* made = call.BIO_meth_new(kSourceSink, "unisono");
      call.BIO_meth_set_write(made, &write);
      call.BIO_meth_set_read(made, &read);
      call.BIO_meth_set_ctrl(made, &control);
      return made;
    }();
    return method;
  }
};

TlsContext::TlsContext(bool certificate) : has_certificate(certificate) {
  const Functions& call = loaded();
  context_ = call.SSL_CTX_new(call.TLS_method());
  if (context_ == nullptr) throw std::runtime_error("OpenSSL makes no context");
  call.SSL_CTX_ctrl(context_, kSetMode, kMovingBuffer, nullptr);
  call.SSL_CTX_set_options(context_, kNoTicket | kNoCompression);
  call.SSL_CTX_set_num_tickets(context_, 0);
  // The key of both ends goes with SHA-256. This suite is the fastest on processors with AES.
  if (call.SSL_CTX_ctrl(context_, kSetLeast, kTls13, nullptr) != 1 ||
      call.SSL_CTX_ctrl(context_, kSetMost, kTls13, nullptr) != 1 ||
      call.SSL_CTX_set_ciphersuites(context_, "TLS_AES_128_GCM_SHA256") != 1) {
    call.SSL_CTX_free(context_);
    throw std::runtime_error("this OpenSSL has no TLS 1.3 with AES-GCM");
  }
  // A context for keys knows no authority, so a server that shows a certificate is refused.
  call.SSL_CTX_set_verify(context_, kVerifyPeer | (certificate ? kNeedsCertificate : 0), nullptr);
  call.SSL_CTX_set_default_passwd_cb(context_, &Callbacks::no_password);
  if (certificate) return;
  call.SSL_CTX_set_psk_client_callback(context_, &Callbacks::ask_secret);
  call.SSL_CTX_set_psk_server_callback(context_, &Callbacks::find_secret);
}

TlsContext::TlsContext(const std::string& certificate, const std::string& key,
                       const std::string& authority)
    : TlsContext(true) {
  const Functions& call = loaded();
  const auto check = [&](int result, const std::string& path) {
    if (result == 1) return;
    const char* reason = call.ERR_reason_error_string(call.ERR_peek_error());
    call.ERR_clear_error();
    throw std::runtime_error(path + ": " + (reason == nullptr ? "of no use" : reason));
  };
  call.ERR_clear_error();
  check(call.SSL_CTX_use_certificate_chain_file(context_, certificate.c_str()), certificate);
  check(call.SSL_CTX_use_PrivateKey_file(context_, key.c_str(), kPem), key);
  check(call.SSL_CTX_load_verify_locations(context_, authority.c_str(), nullptr), authority);
}

TlsContext::~TlsContext() { openssl::functions()->SSL_CTX_free(context_); }

TlsSession::TlsSession(std::shared_ptr<const TlsContext> context, int fd, bool is_server,
                       Secrets secrets, const std::string& name)
    : call_(loaded()),
      context_(std::move(context)),
      fd_(fd),
      is_server_(is_server),
      secrets_(std::move(secrets)),
      session_(call_.SSL_new(context_->get())) {
  in_.resize(kGreetingBytes);
  openssl::Stream* stream = session_ == nullptr ? nullptr : call_.BIO_new(Callbacks::method());
  if (stream == nullptr) {
    call_.SSL_free(session_);
    throw std::runtime_error("OpenSSL makes no session");
  }
  call_.BIO_set_data(stream, this);
  call_.BIO_set_init(stream, 1);
  call_.SSL_set_bio(session_, stream, stream);
  call_.SSL_set_ex_data(session_, 0, this);
  is_server ? call_.SSL_set_accept_state(session_) : call_.SSL_set_connect_state(session_);
  // For a server a key of both ends counts as an earlier session, which must have a context.
  constexpr unsigned char kName[] = "unisono";
  if (is_server) call_.SSL_set_session_id_context(session_, kName, sizeof(kName));
  if (is_server || name.empty()) return;
  openssl::Checks* checks = call_.SSL_get0_param(session_);
  if (call_.X509_VERIFY_PARAM_set1_ip_asc(checks, name.c_str()) != 1 &&
      call_.X509_VERIFY_PARAM_set1_host(checks, name.c_str(), name.size()) != 1) {
    call_.SSL_free(session_);
    throw std::runtime_error("OpenSSL takes no certificate for this name");
  }
}

TlsSession::~TlsSession() {
  for (auto& [name, secret] : secrets_) call_.OPENSSL_cleanse(secret.data(), secret.size());
  call_.SSL_free(session_);
}

bool TlsSession::has_unread() const {
  if (!is_ready_) return false;
  if (!why_.empty()) return true;  // which the next read reports
  return !is_partial_ && (taken_ != got_ || call_.SSL_has_pending(session_) != 0);
}

// Continue the handshake; false: errno has the reason.
bool TlsSession::shake(int flags) {
  if (is_ready_) return true;
  if (!why_.empty()) {
    errno = EPROTO;
    return false;
  }
  flags_ = flags & MSG_DONTWAIT;
  call_.ERR_clear_error();
  const int result = call_.SSL_do_handshake(session_);
  if (result != 1) return failure(result) >= 0;
  // The other end has shown that it knows the key, or a certificate of the authority.
  is_ready_ = context_->has_certificate || call_.SSL_session_reused(session_) == 1;
  if (!is_ready_) {
    why_ = "the other end did not use the job's key";
    is_other_secret_ = true;
    errno = EPROTO;
  }
  return is_ready_;
}

ssize_t TlsSession::read(const iovec* parts, int count, int flags) {
  if (!shake(flags)) return -1;
  flags_ = flags;
  // Most looks at a wire find nothing, and OpenSSL takes as long to say so as the system.
  if (why_.empty() && taken_ == got_ && call_.SSL_has_pending(session_) == 0) {
    fetch(nullptr, 0);
    errno = errno_;
    if (would_block(errno)) return -1;
  }
  call_.ERR_clear_error();  // of other users of OpenSSL in this thread
  ssize_t got = 0;
  for (const iovec* part = parts; part != parts + count; ++part) {
    for (std::size_t at = 0; at != part->iov_len;) {
      const std::size_t most = std::min<std::size_t>(part->iov_len - at, 1u << 30);
      const int result =
        call_.SSL_read(session_, static_cast<char*>(part->iov_base) + at, static_cast<int>(most));
      is_partial_ = result <= 0;
      if (result <= 0) {
        const ssize_t failed = failure(result);
        return got != 0 ? got : failed;
      }
      at += static_cast<std::size_t>(result);
      got += result;
      flags_ |= MSG_DONTWAIT;
      if (was_short_ && taken_ == got_ && call_.SSL_has_pending(session_) == 0) return got;
    }
  }
  return got;
}

ssize_t TlsSession::write(const iovec* parts, int count, int flags) {
  if (!shake(flags) || !flush(flags)) return -1;
  call_.ERR_clear_error();
  ssize_t taken = 0;
  // A head and a short payload are one record. A long payload loses its odd bytes to the head's
  // record, because what is joined is copied.
  std::size_t skip = 0;
  if (count > 1 && parts[0].iov_len != 0 && parts[0].iov_len < kRecordBytes / 4) {
    const char* head = static_cast<const char*>(parts[0].iov_base);
    const char* payload = static_cast<const char*>(parts[1].iov_base);
    const std::size_t room = kRecordBytes - parts[0].iov_len;
    skip = parts[1].iov_len;
    if (skip > room) skip = std::min(skip % kRecordBytes, room);
    record_.assign(head, head + parts[0].iov_len);
    if (skip != 0) record_.insert(record_.end(), payload, payload + skip);
    if (!put(record_.data(), record_.size())) return -1;
    taken = static_cast<ssize_t>(record_.size());
    ++parts;
    --count;
  }
  for (; count != 0; ++parts, --count, skip = 0) {
    while (skip != parts->iov_len) {
      if (out_.size() >= kBatchBytes && !flush(flags | MSG_MORE)) return taken;
      const std::size_t nbytes = std::min(parts->iov_len - skip, kRecordBytes);
      const char* data = static_cast<const char*>(parts->iov_base) + skip;
      if (!put(data, nbytes)) return taken != 0 ? taken : -1;
      skip += nbytes;
      taken += static_cast<ssize_t>(nbytes);
    }
  }
  // If the socket has broken, the next call reports it.
  if (taken != 0) flush(flags);
  return taken;
}

// Encrypt up to a record. False: errno has the reason.
bool TlsSession::put(const char* data, std::size_t nbytes) {
  since_update_ += nbytes;
  if (since_update_ >= kUpdateBytes) {
    since_update_ = 0;
    call_.SSL_key_update(session_, 0);
  }
  const int result = call_.SSL_write(session_, data, static_cast<int>(nbytes));
  if (result == static_cast<int>(nbytes)) return true;
  failure(result);
  return false;
}

// Receive into `into`, and what does not fit there into in_, which is empty. As recv() for `into`;
// the error is errno_.
int TlsSession::fetch(char* into, std::size_t nbytes) {
  // The system reports the end of a connection, or why it broke, only once.
  errno_ = lost_;
  if (has_ended_ || lost_ != 0) return has_ended_ ? 0 : -1;
  taken_ = got_ = 0;
  iovec parts[2] = {{into, nbytes}, {in_.data(), in_.size()}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  const ssize_t count = recvmsg(fd_, &message, flags_);
  errno_ = count < 0 ? errno : 0;
  was_short_ = count < static_cast<ssize_t>(nbytes + in_.size());
  has_ended_ = count == 0;
  if (count < 0 && !would_block(errno_)) lost_ = errno_;
  if (count <= 0) return static_cast<int>(count);
  // The caller, who has a deadline, waits for the rest of the record.
  flags_ |= MSG_DONTWAIT;
  const std::size_t direct = std::min(static_cast<std::size_t>(count), nbytes);
  got_ = static_cast<std::size_t>(count) - direct;
  if (first_ < 0) first_ = static_cast<unsigned char>(direct != 0 ? *into : in_[0]);
  return static_cast<int>(direct);
}

// Receive what OpenSSL asks for: the head of a record, or its rest. As recv(), the error is errno_.
int TlsSession::receive(char* into, std::size_t nbytes) {
  const bool is_short = nbytes < kGreetingBytes;
  // A connection of small messages keeps the small buffer: a server may have thousands.
  if (is_ready_ && !is_short && in_.size() < kBufferBytes) in_.resize(kBufferBytes);
  if (taken_ == got_) {
    const int direct = fetch(into, is_short ? 0 : nbytes);
    if (direct != 0 || got_ == 0) return direct;
  }
  const std::size_t count = std::min(nbytes, got_ - taken_);
  std::copy_n(in_.begin() + static_cast<ptrdiff_t>(taken_), count, into);
  taken_ += count;
  return static_cast<int>(count);
}

// As receive(), and look at what OpenSSL gets: the ends of records, and a stranger's first message.
int TlsSession::hand_over(char* into, std::size_t nbytes) {
  // A record begins where OpenSSL asks for a head after it got all of something else.
  const bool begins = was_whole_ && nbytes == kRecordHeadBytes;
  const int count = receive(into, nbytes);
  if (count == 0) is_cut_ = !begins;
  if (count <= 0) return count;
  was_whole_ = static_cast<std::size_t>(count) == nbytes;
  const bool is_greeting = is_server_ && !is_ready_;
  if (!is_greeting || !is_huge_hello(into, static_cast<std::size_t>(count))) return count;
  errno_ = EMSGSIZE;
  return -1;
}

// Send what is encrypted. False: errno has the reason.
bool TlsSession::flush(int flags) {
  if (sent_ != out_.size()) {
    const ssize_t count = send(fd_, out_.data() + sent_, out_.size() - sent_, flags | MSG_NOSIGNAL);
    if (count < 0) return false;
    sent_ += static_cast<std::size_t>(count);
    // The socket is full, or a blocking call has ended at its limit or by a signal.
    errno = EAGAIN;
    if (sent_ != out_.size()) return false;
  }
  out_.clear();
  sent_ = 0;
  return true;
}

// Return 0 at the end of the connection, else -1 with errno.
ssize_t TlsSession::failure(int result) {
  const int error = call_.SSL_get_error(session_, result);
  const int code = errno_;
  // The next part of the handshake, or an alert for the other end.
  if (has_unsent()) flush(MSG_DONTWAIT);
  if (error == openssl::kWantsRead || error == openssl::kWantsWrite) {
    errno = code == EINTR ? EINTR : EAGAIN;
    return -1;
  }
  if (has_ended_ && is_ready_ && !is_cut_) return 0;
  if (why_.empty()) explain();
  call_.ERR_clear_error();
  // A server that ends may accept and hang up; the caller may try again.
  const bool is_lost = code != 0 && !would_block(code);
  const int kind = is_ready_ ? EBADMSG : has_ended_ ? ECONNRESET : EPROTO;
  errno = is_plain() ? EPROTO : is_lost ? code : kind;
  return -1;
}

}  // namespace unisono
