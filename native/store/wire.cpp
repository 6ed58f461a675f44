#include "wire.hpp"

namespace unisono::store {

namespace {

// The fields of every request: k key, v value, i 64 bits, u 32 bits, K keys, P keys with values.
constexpr const char* kLayouts[kOps] = {
  "u", "kv", "kvv", "k", "ki", "K", "K", "", "k", "kv", "K", "P", "", "u", "kv", "k", "k", "", "ki",
};

// Reads fields of bytes that are known to be whole.
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

}  // namespace

Scanner::State Scanner::refuse(const char* error) {
  error_ = error;
  return State::bad;
}

bool Scanner::take_number(const char* data, std::size_t size, uint64_t* number) const {
  if (size - at_ < sizeof *number) return false;
  *number = load<uint64_t>(data + at_);
  return true;
}

Scanner::State Scanner::take_sized(const char* data, std::size_t size, uint64_t limit) {
  uint64_t nbytes;
  if (!take_number(data, size, &nbytes)) return State::partial;
  if (nbytes > limit) {
    return refuse(limit == kMaxKeyBytes ? "a key beyond 8 KiB" : "a value beyond 64 MiB");
  }
  if (announced_ + nbytes > kMaxRequestBytes) return refuse("a request beyond 256 MiB");
  if (size - at_ - sizeof nbytes < nbytes) return State::partial;
  announced_ += nbytes;
  at_ += sizeof nbytes + static_cast<std::size_t>(nbytes);
  return State::whole;
}

Scanner::State Scanner::take_items(const char* data, std::size_t size, bool with_values) {
  if (!counted_) {
    if (!take_number(data, size, &items_left_)) return State::partial;
    if (items_left_ > kMaxKeys) return refuse("a list beyond 131072 keys");
    at_ += sizeof items_left_;
    counted_ = true;
  }
  for (; items_left_ > 0; --items_left_) {
    if (!key_taken_) {
      if (State state = take_sized(data, size, kMaxKeyBytes); state != State::whole) return state;
      key_taken_ = with_values;
    }
    if (with_values) {
      if (State state = take_sized(data, size, kMaxValueBytes); state != State::whole) return state;
      key_taken_ = false;
    }
  }
  return State::whole;
}

Scanner::State Scanner::scan(const char* data, std::size_t size) {
  if (layout_ == nullptr) {
    if (size == 0) return State::partial;
    const auto code = static_cast<unsigned char>(data[0]);
    if (code >= kOps) return refuse("an unknown request");
    layout_ = kLayouts[code];
    at_ = 1;
  }
  for (; *layout_ != '\0'; ++layout_) {
    State state = State::whole;
    switch (*layout_) {
      case 'k': state = take_sized(data, size, kMaxKeyBytes); break;
      case 'v': state = take_sized(data, size, kMaxValueBytes); break;
      case 'K': state = take_items(data, size, false); break;
      case 'P': state = take_items(data, size, true); break;
      default: {
        const std::size_t nbytes = *layout_ == 'i' ? 8 : 4;
        if (size - at_ < nbytes) return State::partial;
        at_ += nbytes;
      }
    }
    if (state != State::whole) return state;
  }
  return State::whole;
}

void decode(const char* data, Request& request) {
  const auto code = static_cast<unsigned char>(data[0]);
  request.op = static_cast<Op>(code);
  request.keys.clear();
  request.values.clear();
  Cursor cursor(data + 1);
  bool has_value = false;
  for (const char* field = kLayouts[code]; *field != '\0'; ++field) {
    switch (*field) {
      case 'k': request.key = cursor.sized(); break;
      case 'v': (has_value ? request.other : request.value) = cursor.sized(); has_value = true; break;
      case 'i': request.number = cursor.number<int64_t>(); break;
      case 'u': request.word = cursor.number<uint32_t>(); break;
      default:
        for (auto left = cursor.number<uint64_t>(); left > 0; --left) {
          request.keys.push_back(cursor.sized());
          if (*field == 'P') request.values.push_back(cursor.sized());
        }
    }
  }
}

}  // namespace unisono::store
