// Sums up log lines, so that strangers that knock by the thousand do not fill the log; the twin of
// LogLimit in src/unisono/core/base/log.py.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

namespace unisono::store {

class LogLimit {
 public:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  explicit LogLimit(int64_t window_ns) : window_ns_(window_ns) {}

  // Return whether to log this line now. A line that is not logged counts in the next summary.
  bool admits(std::string_view line, int64_t now_ns);
  // When a summary is due; kNever if there is nothing to sum up.
  int64_t due_ns() const { return hidden_ > 0 ? ends_ns_ : kNever; }
  // Return the summary, and count anew.
  std::string sum_up();

 private:
  static constexpr int kLines = 5;  // that a window shows; more would hide other lines of the log

  const int64_t window_ns_;
  int64_t ends_ns_ = 0;
  int shown_ = 0;
  uint64_t hidden_ = 0;
  std::string last_;
};

}  // namespace unisono::store
