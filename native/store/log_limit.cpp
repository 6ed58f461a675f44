#include "store/log_limit.hpp"

#include <utility>

#include <sys/uio.h>

#include "core/clock.hpp"
#include "store/server.hpp"

namespace unisono::store {

bool LogLimit::admits(std::string_view line, int64_t now_ns) {
  if (now_ns >= ends_ns_ && hidden_ == 0) {
    ends_ns_ = now_ns + window_ns_;
    shown_ = 0;
  }
  if (shown_ < kLines) {
    ++shown_;
    return true;
  }
  ++hidden_;
  last_ = line;
  return false;
}

std::string LogLimit::sum_up() {
  const std::string count = std::to_string(std::exchange(hidden_, 0));
  return count + " more lines like these, the last: " + std::exchange(last_, {});
}

void Server::log(std::string_view line) {
  if (log_limit_.admits(line, now_ns())) write_log(line);
}

// Log the summary if it is due before `until_ns`.
void Server::sum_up_log(int64_t until_ns) {
  if (log_limit_.due_ns() <= until_ns) write_log(log_limit_.sum_up());
}

void Server::write_log(std::string_view line) {
  char end = '\n';
  const iovec parts[] = {{const_cast<char*>(line.data()), line.size()}, {&end, 1}};
  // If the pipe is full the line is lost: strangers must not be able to block the server.
  if (writev(log_fd_, parts, 2) < 0) return;
}

}  // namespace unisono::store
