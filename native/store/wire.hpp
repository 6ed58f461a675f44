// torch's TCPStore protocol: the end of a request, and its fields. No socket, no clock. The twin of
// src/unisono/core/stores/tcp/wire.py, which has the table of fields.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace unisono::store {

constexpr uint32_t kMagic = 0x3C85F7CE;
constexpr uint64_t kMaxKeyBytes = 8 * 1024;
constexpr uint64_t kMaxKeys = 128 * 1024;
constexpr uint64_t kMaxValueBytes = 64 * 1024 * 1024;
// Without a limit on the sum, a multi_set could have 128 Ki values of 64 MiB each.
constexpr uint64_t kMaxRequestBytes = 256 * 1024 * 1024;
// A small multi_get may name one large value many times.
constexpr uint64_t kMaxReplyBytes = 1024 * 1024 * 1024;

constexpr char kReady = 0, kNotReady = 1;
constexpr char kStopWaiting = 0, kWaitCanceled = 1;

enum class Opcode : uint8_t {
  validate,
  set,
  compare_set,
  get,
  add,
  check,
  wait,
  num_keys,
  delete_key,
  append,
  multi_get,
  multi_set,
  cancel_wait,
  ping,
  queue_push,
  queue_pop,
  queue_len,
  list_keys,
  barrier,
};
constexpr int kOpcodes = 19;

template <typename T>
T load(const char* at) {
  T value;
  __builtin_memcpy(&value, at, sizeof value);  // little-endian, as all supported machines
  return value;
}

// One request. The views point into the decoded bytes.
struct Request {
  Opcode op{};
  std::string_view key;
  std::string_view value;  // compare_set: the expected value
  std::string_view other;  // compare_set: the new value
  int64_t number = 0;
  uint32_t word = 0;
  std::vector<std::string_view> keys;
  std::vector<std::string_view> values;
};

// The fields of a request and of its reply. k: key, v: value, i: 64 bits, u: 32 bits, f: 8 bits, K:
// keys, P: keys with values. V: as many values as the request has keys. q: the length of a queue,
// and a value unless the length is 0.
const char* request_fields(Opcode op);
const char* reply_fields(Opcode op);

struct Limits {
  uint64_t key_bytes, keys, value_bytes, total_bytes;
};
constexpr Limits kRequestLimits{kMaxKeyBytes, kMaxKeys, kMaxValueBytes, kMaxRequestBytes};
// The client trusts the server's totals (the keys of a large store), but not its sizes.
constexpr Limits kReplyLimits{1 << 16, 1 << 24, kMaxReplyBytes, 2 * kMaxReplyBytes};

// Finds the end of a message that may arrive in pieces. Scans no piece twice, and refuses a size as
// soon as it is announced.
class Scanner {
 public:
  enum class State { partial, whole, bad };

  // Both take all available bytes of the message.
  State scan_request(const char* data, std::size_t size);
  State scan(const char* data, std::size_t size);
  // Begin a message with these fields. `values`: the number of values of V.
  void start(const char* fields, const Limits& limits, uint64_t values = 0);
  // The size of the complete message in bytes.
  std::size_t length() const { return at_; }
  const char* error() const { return error_; }
  void reset() { fields_ = nullptr; }

 private:
  State take_number(const char* data, std::size_t size, uint64_t* number);
  State take_sized(const char* data, std::size_t size, uint64_t limit);
  State take_items(const char* data, std::size_t size);
  State take_popped(const char* data, std::size_t size);
  State refuse(const char* error);

  const char* fields_ = nullptr;  // the fields still to come
  std::size_t at_ = 0;
  uint64_t announced_ = 0;
  uint64_t items_left_ = 0;
  const Limits* limits_ = nullptr;
  const char* error_ = "";
  bool counted_ = false;
  bool key_taken_ = false;
};

// Reads the fields of a complete message.
class Cursor {
 public:
  explicit Cursor(const char* at) : at_(at) {}

  template <typename T>
  T number() {
    T value = load<T>(at_);
    at_ += sizeof value;
    return value;
  }
  std::string_view sized() {
    const auto size = static_cast<std::size_t>(number<uint64_t>());
    at_ += size;
    return {at_ - size, size};
  }

 private:
  const char* at_;
};

// Decode a request that a Scanner found complete.
void decode(const char* data, Request& request);

}  // namespace unisono::store
