#include "shared/segment.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shared/numa.hpp"

namespace unisono {

namespace {

constexpr uint64_t kMagic = 0x316f6e6f73696e75;  // "unisono1"

// How much memory a rank has for the slots of each parity.
size_t room_bytes(size_t ranks, size_t slot_bytes) {
  return slot_bytes + kTurnBytes / ranks / kPageBytes * kPageBytes;
}

size_t total_bytes(size_t ranks, size_t slot_bytes) {
  return sizeof(Header) + ranks * sizeof(RankWords) + ranks * 2 * room_bytes(ranks, slot_bytes);
}

}  // namespace

Segment::~Segment() {
  close_fd();
  if (base_ != nullptr) munmap(base_, bytes_);
}

void Segment::close_fd() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

int Segment::create(int ranks, size_t slot_bytes, const unsigned char* nonce) {
  fd_ = memfd_create("unisono", MFD_CLOEXEC);
  if (fd_ < 0) return errno;
  bytes_ = total_bytes(static_cast<size_t>(ranks), slot_bytes);
  if (ftruncate(fd_, static_cast<off_t>(bytes_)) != 0) return errno;
  if (int error = map(fd_)) return error;
  auto* header = new (base_) Header{};
  header->magic = kMagic;
  header->ranks = static_cast<uint64_t>(ranks);
  header->slot_bytes = slot_bytes;
  std::memcpy(header->nonce, nonce, sizeof(header->nonce));
  locate();
  for (int rank = 0; rank < ranks; ++rank) new (&words_[rank]) RankWords{};
  return 0;
}

int Segment::attach(int pid, int fd, const unsigned char* nonce) {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, fd);
  int opened = open(path, O_RDWR | O_CLOEXEC);
  if (opened < 0) return errno;
  struct stat info;
  int error = 0;
  if (fstat(opened, &info) != 0) {
    error = errno;
  } else if (!S_ISREG(info.st_mode) || static_cast<size_t>(info.st_size) < sizeof(Header)) {
    error = EXDEV;
  } else {
    bytes_ = static_cast<size_t>(info.st_size);
    error = map(opened);
  }
  close(opened);
  if (error != 0) return error;
  auto* header = static_cast<Header*>(base_);
  if (header->magic != kMagic || std::memcmp(header->nonce, nonce, sizeof(header->nonce)) != 0 ||
      bytes_ != total_bytes(header->ranks, header->slot_bytes)) {
    return EXDEV;
  }
  locate();
  return 0;
}

void Segment::place_slots(int rank, int node) const {
  prefer_node(slot(rank, 0, 0), 2 * room_bytes_, node);
}

int Segment::map(int fd) {
  void* base = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return errno;
  base_ = base;
  return 0;
}

void Segment::locate() {
  header_ = static_cast<Header*>(base_);
  words_ = reinterpret_cast<RankWords*>(static_cast<char*>(base_) + sizeof(Header));
  slots_ = reinterpret_cast<char*>(words_ + header_->ranks);
  slot_bytes_ = header_->slot_bytes;
  room_bytes_ = room_bytes(header_->ranks, slot_bytes_);
}

}  // namespace unisono
