// The memory and the dtype of an array, for messages.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

namespace unisono {

// The memory of an array, held until the destructor.
class View {
 public:
  View(nanobind::handle array, int flags)
      : held_(PyObject_GetBuffer(array.ptr(), &view_, flags) == 0) {}
  ~View() {
    if (held_) PyBuffer_Release(&view_);
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  // Whether the memory is contiguous, and writable if the flags ask for it.
  bool is_held() const { return held_; }
  char* data() const { return static_cast<char*>(view_.buf); }
  uint64_t nbytes() const { return static_cast<uint64_t>(view_.len); }
  uint64_t itemsize() const {
    return static_cast<uint64_t>(std::max<Py_ssize_t>(view_.itemsize, 1));
  }
  uint64_t count() const { return nbytes() / itemsize(); }
  const char* format() const { return view_.format == nullptr ? "B" : view_.format; }

 private:
  Py_buffer view_{};
  bool held_;
};

// The memory of an array that Python has checked.
class Bytes : public View {
 public:
  Bytes(nanobind::handle array, int flags) : View(array, flags) {
    if (!is_held()) throw nanobind::python_error();
  }
};

// The words of a buffer format. 0: Python handles such messages.
struct Format {
  uint32_t word = 0;                    // in the `info` of a message
  std::pair<uint32_t, uint32_t> kinds;  // of the records of a send and a receive
};

// The formats of one letter, and of complex numbers.
class Formats {
 public:
  Format& of(const char* format) {
    const bool complex = format[0] == 'Z' && format[1] != 0;
    const char letter = complex ? format[1] : format[0];
    const bool simple = letter != 0 && format[complex ? 2 : 1] == 0;
    return formats_[complex ? 1 : 0][simple ? static_cast<unsigned char>(letter) : 0];
  }

 private:
  std::array<std::array<Format, 256>, 2> formats_{};  // [1]: complex formats
};

}  // namespace unisono
