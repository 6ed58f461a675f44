// Proves knowledge of the job's token: HMAC-SHA256 over fresh random numbers of both ends. The twin
// of src/unisono/core/stores/tcp/token.py, which has the messages of the handshake.
#pragma once

#include <array>
#include <string_view>

namespace unisono::store {

constexpr std::string_view kHello{"UNISONO\x01", 8};
constexpr std::size_t kNonceBytes = 32;
constexpr std::size_t kHelloBytes = kHello.size() + kNonceBytes;

// A server's answer to a hello, to a proof, or to a client that sent neither.
enum Answer : char {
  kChallenge = 1,
  kWelcome = 2,
  kWrongToken = 3,
  kTokenNeeded = 4,
  kNoTokenHere = 5,
  kLocalOnly = 6,
  kTlsNeeded = 7,
  kNoTlsHere = 8,
};

using Digest = std::array<unsigned char, 32>;

Digest sha256(std::string_view data);
Digest hmac_sha256(std::string_view key, std::string_view data);

// Return the proof that `end` ("server" or "client") knows the token.
Digest proof(std::string_view token, std::string_view end, std::string_view client_nonce,
             std::string_view server_nonce);
// Compare in a time that does not depend on the position of a difference.
bool is_same(const Digest& digest, std::string_view other);
// Fill `nonce` with random bytes. False: the system has none.
bool fresh_nonce(std::array<char, kNonceBytes>& nonce);

}  // namespace unisono::store
