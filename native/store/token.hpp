// Who knows the job's token: HMAC-SHA256 over fresh random numbers of both ends. The twin of
// src/unisono/stores/tcp/token.py, which says what is sent when.
#pragma once

#include <array>
#include <string_view>

namespace unisono::store {

constexpr std::string_view kHello{"UNISONO\x01", 8};
constexpr std::size_t kNonceBytes = 32;
constexpr std::size_t kHelloBytes = kHello.size() + kNonceBytes;

// What a server answers to a hello, a proof, or to a client that showed neither.
enum Answer : char {
  kChallenge = 1,
  kWelcome = 2,
  kWrongToken = 3,
  kTokenNeeded = 4,
  kNoTokenHere = 5,
  kLocalOnly = 6,
};

using Digest = std::array<unsigned char, 32>;

Digest sha256(std::string_view data);
Digest hmac_sha256(std::string_view key, std::string_view data);

// What an end (the word "server" or "client") shows to prove that it knows the token.
Digest proof(std::string_view token, std::string_view end, std::string_view client_nonce,
             std::string_view server_nonce);
// Takes equally long wherever the two differ.
bool is_same(const Digest& digest, std::string_view other);
// Fills `nonce` with random bytes; false if the system has none.
bool fresh_nonce(std::array<char, kNonceBytes>& nonce);

}  // namespace unisono::store
