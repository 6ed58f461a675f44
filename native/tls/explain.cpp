// What a session refuses of a stranger, and why it has failed, in words.
#include <algorithm>
#include <cstring>

#include "tls/session.hpp"

namespace unisono {

namespace {

// Reasons, the alerts of the other end above 1000.
constexpr unsigned long kReason = 0xfff;
constexpr unsigned long kVerifyFailed = 134;
constexpr unsigned long kSecretReasons[] = {118, 253, 1040, 1047, 1051, 1115};
constexpr unsigned long kOldReasons[] = {258, 266, 1070};

constexpr std::size_t kRecordHeadBytes = 5;
constexpr std::size_t kMostHelloBytes = 4096;

template <std::size_t n>
bool contains(const unsigned long (&reasons)[n], unsigned long reason) {
  return std::find(std::begin(reasons), std::end(reasons), reason) != std::end(reasons);
}

}  // namespace

// Whether the first message announces more than any client of ours sends. OpenSSL would allocate it.
bool TlsSession::is_huge_hello(const char* data, std::size_t nbytes) {
  // Of the record: type, version (2), length (2); of the message: type, length (3).
  while (nbytes-- != 0 && greeted_ != sizeof(greeting_)) greeting_[greeted_++] = *data++;
  if (greeted_ < kRecordHeadBytes) return false;
  // A record that ends before the length of the message would hide it.
  if (greeting_[3] == 0 && greeting_[4] < 4) return true;
  if (greeted_ < sizeof(greeting_)) return false;
  return greeting_[6] != 0 || greeting_[7] >= kMostHelloBytes >> 8;
}

void TlsSession::explain() {
  const unsigned long error = call_.ERR_peek_error();
  const unsigned long reason = error & kReason;
  const char* text = error == 0 ? nullptr : call_.ERR_reason_error_string(error);
  is_other_secret_ = !is_ready_ && !is_plain() && !has_ended_ && !context_->has_certificate &&
                     contains(kSecretReasons, reason);
  if (is_ready_ && is_cut_) {
    why_ = "the connection was cut inside a TLS record";
  } else if (is_ready_) {
    if (text == nullptr) return;  // errno says it
    why_ = "a TLS record was changed, lost, repeated or reordered on the way (";
    why_.append(text).append(")");
  } else if (is_plain()) {
    why_ = "the other end does not encrypt";
  } else if (has_ended_) {
    why_ = "the other end hung up during the TLS handshake";
  } else if (is_other_secret_) {
    why_ = "the other end has another token, or none";
  } else if (contains(kOldReasons, reason)) {
    why_ = "the other end has no TLS 1.3";
  } else if (reason == kVerifyFailed) {
    why_ = "its certificate is refused: ";
    why_ += call_.X509_verify_cert_error_string(call_.SSL_get_verify_result(session_));
  } else {
    why_ = "the TLS handshake failed: ";
    why_ += text == nullptr ? std::strerror(errno_) : text;
  }
}

}  // namespace unisono
