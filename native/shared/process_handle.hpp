// A descriptor of a process of this host, by which its end is detected.
#pragma once

#include <memory>

namespace unisono {

// A pidfd. All groups of this process share it. With a descriptor per group and rank, 4 groups of
// 256 ranks would use up the usual limit of 1,024 descriptors.
class ProcessHandle {
 public:
  // The process that has this id now. Call it while that process is known to run.
  static std::shared_ptr<const ProcessHandle> of(int pid);

  explicit ProcessHandle(int pid);
  ~ProcessHandle();
  ProcessHandle(const ProcessHandle&) = delete;
  ProcessHandle& operator=(const ProcessHandle&) = delete;

  // Whether the process has ended. False if this system has no pidfds (kernels before 5.3): then
  // the end of a rank is detected at the deadline.
  bool has_ended() const;

 private:
  int fd_;
};

}  // namespace unisono
