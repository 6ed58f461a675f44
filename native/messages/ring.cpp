#include "messages/ring.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/futex.hpp"
#include "kernels/kernels.hpp"
#include "shared/numa.hpp"

namespace unisono {

namespace {

constexpr uint64_t kMagic = 0x786f626e6f73696e;  // "nisonbox"

size_t inbox_bytes(uint64_t ranks) { return kPageBytes + ranks * kRingStride; }

int open_file_of(int pid, int fd) {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, fd);
  return open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
}

}  // namespace

void Ring::choose_bytes(size_t bytes) {
  bytes_ = bytes;
  words->bytes.store(bytes, std::memory_order_relaxed);  // with `joined`
}

void Ring::write(const void* from, size_t nbytes) {
  const size_t at = place();
  const size_t first = std::min(nbytes, bytes_ - at);
  copy_out_.copy(data_ + at, from, first);
  if (first < nbytes) copy_out_.copy(data_, static_cast<const char*>(from) + first, nbytes - first);
  at_ += nbytes;
}

void Ring::abort_frame() {
  words->aborted_at.store(at_, std::memory_order_relaxed);  // with `tail`
  // At least one byte, so that the receiver finds bytes to read.
  ++at_;
  pad();
  abort_end_ = at_;
  publish();
}

void Ring::read(void* into, size_t nbytes, bool past_cache) {
  const size_t at = place();
  const size_t first = std::min(nbytes, bytes_ - at);
  auto copy = [past_cache](void* to, const char* from, size_t count) {
    past_cache ? copy_past_cache(to, from, count) : copy_bytes(to, from, count);
  };
  copy(into, data_ + at, first);
  if (first < nbytes) copy(static_cast<char*>(into) + first, data_, nbytes - first);
  at_ += nbytes;
}

Mapping::~Mapping() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

int Mapping::map(int fd, size_t offset, size_t nbytes) {
  void* base =
    mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (base == MAP_FAILED) return errno;
  base_ = static_cast<char*>(base);
  bytes_ = nbytes;
  return 0;
}

int Inbox::create(int ranks, const unsigned char* nonce, int node) {
  fd_ = memfd_create("unisono-inbox", MFD_CLOEXEC);
  if (fd_ < 0) return errno;
  const size_t nbytes = inbox_bytes(static_cast<uint64_t>(ranks));
  if (ftruncate(fd_, static_cast<off_t>(nbytes)) != 0) return errno;
  if (int error = memory_.map(fd_, 0, nbytes)) return error;
  prefer_node(memory_.base(), nbytes, node);
  // The rings must begin as zeros, as they are. Writing zeros would allocate their pages.
  auto* head = new (memory_.base()) InboxHead{};
  head->magic = kMagic;
  head->ranks = static_cast<uint64_t>(ranks);
  std::memcpy(head->nonce, nonce, sizeof(head->nonce));
  return 0;
}

void Inbox::close_fd() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

Outbox::~Outbox() {
  if (pipe_ >= 0) close(pipe_);
}

void Outbox::write_to_pipe() {
  Bells& bells = head().bells;
  // acquire, for `pipe`: pairs with the stores of 1 in waiting.cpp
  if (bells.polls.exchange(0, std::memory_order_acquire) == 0) return;
  // Opened for both directions, because a write to a pipe without a reader would end this process.
  if (pipe_ < 0) pipe_ = open_file_of(pid_, bells.pipe.load(std::memory_order_relaxed));
  // A full pipe wakes as well.
  if (pipe_ < 0) return;
  [[maybe_unused]] const ssize_t written = write(pipe_, "!", 1);
}

int Outbox::attach(int pid, int fd, const unsigned char* nonce, int me, size_t ring_bytes) {
  pid_ = pid;
  const int opened = open_file_of(pid, fd);
  if (opened < 0) return errno;
  struct stat info;
  int error = 0;
  if (fstat(opened, &info) != 0) {
    error = errno;
  } else if (!S_ISREG(info.st_mode) || static_cast<size_t>(info.st_size) < kPageBytes) {
    error = EXDEV;
  } else {
    error = head_.map(opened, 0, kPageBytes);
  }
  if (error == 0) {
    const InboxHead& found = head();
    const bool same = found.magic == kMagic &&
                      std::memcmp(found.nonce, nonce, sizeof(found.nonce)) == 0 &&
                      static_cast<uint64_t>(me) < found.ranks &&
                      static_cast<size_t>(info.st_size) == inbox_bytes(found.ranks);
    const size_t offset = kPageBytes + static_cast<size_t>(me) * kRingStride;
    error = same ? ring_.map(opened, offset, kRingStride) : EXDEV;
  }
  close(opened);
  if (error == 0) {
    ring = Ring(ring_.base());
    ring.choose_bytes(ring_bytes);
  }
  return error;
}

}  // namespace unisono
