#include "shared/process_handle.hpp"

#include <atomic>
#include <map>
#include <mutex>

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/fork_guard.hpp"

namespace unisono {

namespace {

struct Table {
  ForkGuard guard;
  std::mutex lock;
  std::map<int, std::weak_ptr<const ProcessHandle>> handles;
};

// The table of this process. A thread of the parent may hold the lock at a fork, so the child makes
// a table of its own.
Table& table() {
  static std::atomic<Table*> current{new Table};
  Table* found = current.load(std::memory_order_acquire);  // pairs with the exchange below
  if (found->guard.is_forked()) {
    auto* own = new Table;
    if (current.compare_exchange_strong(found, own, std::memory_order_acq_rel)) return *own;
    delete own;
  }
  return *found;
}

}  // namespace

ProcessHandle::ProcessHandle(int pid) : fd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {}

ProcessHandle::~ProcessHandle() {
  if (fd_ >= 0) close(fd_);
}

std::shared_ptr<const ProcessHandle> ProcessHandle::of(int pid) {
  Table& all = table();
  const std::lock_guard<std::mutex> held(all.lock);
  auto& known = all.handles[pid];
  auto handle = known.lock();
  // The process that had this id may have ended, and another process may have got the id.
  if (handle == nullptr || handle->fd_ < 0 || handle->has_ended()) {
    handle = std::make_shared<const ProcessHandle>(pid);
    known = handle;
  }
  return handle;
}

bool ProcessHandle::has_ended() const {
  pollfd end{fd_, POLLIN, 0};
  return fd_ >= 0 && poll(&end, 1, 0) == 1;
}

}  // namespace unisono
