#include "store/token.hpp"

#include <cstdint>
#include <cstring>
#include <string>

#include <sys/random.h>

namespace unisono::store {

namespace {

constexpr std::size_t kBlock = 64;

constexpr uint32_t kRound[64] = {
  0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
  0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
  0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
  0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
  0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
  0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
  0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
  0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

uint32_t rotate(uint32_t word, int by) { return (word >> by) | (word << (32 - by)); }

void mix(uint32_t state[8], const unsigned char* block) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) {
    w[i] = uint32_t{block[4 * i]} << 24 | uint32_t{block[4 * i + 1]} << 16 |
           uint32_t{block[4 * i + 2]} << 8 | uint32_t{block[4 * i + 3]};
  }
  for (int i = 16; i < 64; ++i) {
    const uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  uint32_t v[8];
  std::memcpy(v, state, sizeof v);
  for (int i = 0; i < 64; ++i) {
    const uint32_t s1 = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25);
    const uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
    const uint32_t first = v[7] + s1 + choice + kRound[i] + w[i];
    const uint32_t s0 = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22);
    const uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
    std::memmove(v + 1, v, 7 * sizeof *v);
    v[4] += first;
    v[0] = first + s0 + majority;
  }
  for (int i = 0; i < 8; ++i) state[i] += v[i];
}

std::string_view as_text(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace

// Source: FIPS 180-4.
Digest sha256(std::string_view data) {
  uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                       0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  // One bit, zeros, and the length in bits at the end of a block.
  std::string padded(data);
  padded.push_back('\x80');
  padded.append((2 * kBlock - 8 - padded.size() % kBlock) % kBlock, '\0');
  const uint64_t bits = uint64_t{data.size()} * 8;
  for (int shift = 56; shift >= 0; shift -= 8) padded.push_back(static_cast<char>(bits >> shift));
  for (std::size_t at = 0; at < padded.size(); at += kBlock) {
    mix(state, reinterpret_cast<const unsigned char*>(padded.data()) + at);
  }
  Digest digest;
  for (std::size_t i = 0; i < digest.size(); ++i) {
    digest[i] = static_cast<unsigned char>(state[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

// Source: RFC 2104.
Digest hmac_sha256(std::string_view key, std::string_view data) {
  std::string inner(key.size() > kBlock ? as_text(sha256(key)) : key);
  inner.resize(kBlock, '\0');
  std::string outer = inner;
  for (char& c : inner) c = static_cast<char>(c ^ 0x36);
  for (char& c : outer) c = static_cast<char>(c ^ 0x5c);
  const Digest digest = sha256(inner.append(data));
  return sha256(outer.append(as_text(digest)));
}

Digest proof(std::string_view token, std::string_view end, std::string_view client_nonce,
             std::string_view server_nonce) {
  std::string message("unisono store ");
  message.append(end).append(client_nonce).append(server_nonce);
  return hmac_sha256(token, message);
}

bool is_same(const Digest& digest, std::string_view other) {
  if (other.size() != digest.size()) return false;
  unsigned char difference = 0;
  for (std::size_t i = 0; i < digest.size(); ++i) {
    difference =
      static_cast<unsigned char>(difference | (digest[i] ^ static_cast<unsigned char>(other[i])));
  }
  return difference == 0;
}

bool fresh_nonce(std::array<char, kNonceBytes>& nonce) {
  return getrandom(nonce.data(), nonce.size(), 0) == static_cast<ssize_t>(nonce.size());
}

}  // namespace unisono::store
