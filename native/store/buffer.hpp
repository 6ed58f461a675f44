// A buffer of bytes for a connection. An empty buffer holds at most 1 KiB, so that thousands of
// idle clients cost little.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string_view>

namespace unisono::store {

class Buffer {
 public:
  Buffer() = default;
  ~Buffer() { std::free(memory_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  const char* data() const { return memory_ + begin_; }
  std::size_t size() const { return end_ - begin_; }
  bool is_empty() const { return begin_ == end_; }

  void append(std::string_view bytes) {
    if (bytes.empty()) return;
    std::memcpy(space(bytes.size()), bytes.data(), bytes.size());
    end_ += bytes.size();
  }
  template <typename T>
  void append_number(T value) {
    std::memcpy(space(sizeof value), &value, sizeof value);
    end_ += sizeof value;
  }
  void append_sized(std::string_view bytes) {
    append_number(static_cast<uint64_t>(bytes.size()));
    append(bytes);
  }

  // Return where to write at least `nbytes` more bytes. Call added() with the number of bytes
  // written.
  char* space(std::size_t nbytes) {
    if (capacity_ - end_ < nbytes) make_room(nbytes);
    return memory_ + end_;
  }
  void added(std::size_t nbytes) { end_ += nbytes; }

  void drop_front(std::size_t nbytes) {
    begin_ += nbytes;
    if (begin_ < end_) return;
    begin_ = end_ = 0;
    if (capacity_ > kKept) {
      std::free(memory_);
      memory_ = nullptr;
      capacity_ = 0;
    }
  }

 private:
  static constexpr std::size_t kKept = 1024;

  void make_room(std::size_t nbytes) {
    if (begin_ > 0) {
      std::memmove(memory_, memory_ + begin_, size());
      end_ -= begin_;
      begin_ = 0;
      if (capacity_ - end_ >= nbytes) return;
    }
    const std::size_t doubled = capacity_ < 64 ? 64 : 2 * capacity_;
    const std::size_t capacity = std::max(doubled, end_ + nbytes);
    void* grown = std::realloc(memory_, capacity);
    if (grown == nullptr) throw std::bad_alloc();
    memory_ = static_cast<char*>(grown);
    capacity_ = capacity;
  }

  char* memory_ = nullptr;
  std::size_t capacity_ = 0;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

}  // namespace unisono::store
