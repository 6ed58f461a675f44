#include "store/wire.hpp"

namespace unisono::store {

namespace {

constexpr const char* kRequests[kOpcodes] = {
  "u", "kv", "kvv", "k", "ki", "K", "K", "", "k", "kv", "K", "P", "", "u", "kv", "k", "k", "", "ki",
};
constexpr const char* kReplies[kOpcodes] = {
  "", "", "v", "v", "i", "f", "f", "i", "i", "", "V", "", "f", "u", "", "q", "i", "K", "f",
};

}  // namespace

const char* request_fields(Opcode op) { return kRequests[static_cast<int>(op)]; }
const char* reply_fields(Opcode op) { return kReplies[static_cast<int>(op)]; }

void Scanner::start(const char* fields, const Limits& limits, uint64_t values) {
  fields_ = fields;
  limits_ = &limits;
  items_left_ = values;
  at_ = 0;
  announced_ = 0;
  counted_ = key_taken_ = false;
}

Scanner::State Scanner::refuse(const char* error) {
  error_ = error;
  return State::bad;
}

Scanner::State Scanner::take_number(const char* data, std::size_t size, uint64_t* number) {
  if (size - at_ < sizeof *number) return State::partial;
  *number = load<uint64_t>(data + at_);
  at_ += sizeof *number;
  return State::whole;
}

Scanner::State Scanner::take_sized(const char* data, std::size_t size, uint64_t limit) {
  uint64_t nbytes;
  if (size - at_ < sizeof nbytes) return State::partial;
  nbytes = load<uint64_t>(data + at_);
  if (nbytes > limit) {
    return refuse(limit == limits_->key_bytes ? "a key is too long" : "a value is too long");
  }
  if (announced_ + nbytes > limits_->total_bytes) return refuse("a message is too long");
  if (size - at_ - sizeof nbytes < nbytes) return State::partial;
  announced_ += nbytes;
  at_ += sizeof nbytes + static_cast<std::size_t>(nbytes);
  return State::whole;
}

// Take keys (K), keys with values (P), or values alone (V, whose number is known).
Scanner::State Scanner::take_items(const char* data, std::size_t size) {
  const bool has_keys = *fields_ != 'V', has_values = *fields_ != 'K';
  if (has_keys && !counted_) {
    if (take_number(data, size, &items_left_) != State::whole) return State::partial;
    if (items_left_ > limits_->keys) return refuse("a list is too long");
    counted_ = true;
  }
  for (; items_left_ > 0; --items_left_) {
    if (has_keys && !key_taken_) {
      const State state = take_sized(data, size, limits_->key_bytes);
      if (state != State::whole) return state;
      key_taken_ = true;
    }
    if (has_values) {
      const State state = take_sized(data, size, limits_->value_bytes);
      if (state != State::whole) return state;
    }
    key_taken_ = false;
  }
  return State::whole;
}

Scanner::State Scanner::take_popped(const char* data, std::size_t size) {
  uint64_t before = 1;
  if (!counted_ && take_number(data, size, &before) != State::whole) return State::partial;
  if (before == 0) return State::whole;
  counted_ = true;
  return take_sized(data, size, limits_->value_bytes);
}

Scanner::State Scanner::scan_request(const char* data, std::size_t size) {
  if (fields_ == nullptr) {
    if (size == 0) return State::partial;
    const auto code = static_cast<unsigned char>(data[0]);
    if (code >= kOpcodes) return refuse("the request is unknown");
    start(kRequests[code], kRequestLimits);
    at_ = 1;
  }
  return scan(data, size);
}

Scanner::State Scanner::scan(const char* data, std::size_t size) {
  for (; *fields_ != '\0'; ++fields_) {
    State state = State::whole;
    std::size_t nbytes = 0;
    switch (*fields_) {
      case 'k': state = take_sized(data, size, limits_->key_bytes); break;
      case 'v': state = take_sized(data, size, limits_->value_bytes); break;
      case 'i': nbytes = 8; break;
      case 'u': nbytes = 4; break;
      case 'f': nbytes = 1; break;
      case 'q': state = take_popped(data, size); break;
      default: state = take_items(data, size); break;
    }
    if (state != State::whole) return state;
    if (size - at_ < nbytes) return State::partial;
    at_ += nbytes;
  }
  return State::whole;
}

void decode(const char* data, Request& request) {
  const auto code = static_cast<unsigned char>(data[0]);
  request.op = static_cast<Opcode>(code);
  request.keys.clear();
  request.values.clear();
  Cursor cursor(data + 1);
  bool has_value = false;
  for (const char* field = kRequests[code]; *field != '\0'; ++field) {
    switch (*field) {
      case 'k': request.key = cursor.sized(); break;
      case 'v':
        (has_value ? request.other : request.value) = cursor.sized();
        has_value = true;
        break;
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
