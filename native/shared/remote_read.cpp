#include "shared/remote_read.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

namespace unisono {

namespace {

// pm_scan_arg and page_region of <linux/fs.h>, which has them since Linux 6.7.
struct PageScan {
  uint64_t size = sizeof(PageScan);
  uint64_t flags = 0;
  uint64_t start = 0;
  uint64_t end = 0;
  uint64_t walk_end = 0;
  uint64_t regions = 0;
  uint64_t region_count = 0;
  uint64_t max_pages = 0;
  uint64_t inverted = 0;
  uint64_t mask = 0;
  uint64_t any_of = 0;
  uint64_t returned = 0;
};
struct PageRegion {
  uint64_t start;
  uint64_t end;
  uint64_t categories;
};
constexpr uint64_t kIsHuge = uint64_t{1} << 6;
// The page size of the machines that have huge pages to find. The kernel rejects the request on
// others.
constexpr uint64_t kPageSize = 4096;

bool is_huge_at(int page_map, uint64_t address) {
  PageRegion region{};
  PageScan scan;
  scan.start = address / kPageSize * kPageSize;
  scan.end = scan.start + kPageSize;
  scan.regions = reinterpret_cast<uintptr_t>(&region);
  scan.region_count = 1;
  scan.mask = scan.returned = kIsHuge;
  return ioctl(page_map, _IOWR('f', 16, PageScan), &scan) == 1;
}

}  // namespace

bool HugePages::covers(const void* data, size_t nbytes) {
  for (Entry& known : entries_) {
    if (known.data == data && known.nbytes == nbytes && known.uses++ < kUses) return known.is_huge;
  }
  // One probe per MiB, because memory often begins and ends with small pages.
  const auto probes = std::clamp<uint64_t>(nbytes >> 20, 2, 16);
  const auto at = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(data));
  // Opened each time, because a kept descriptor would be the parent's in the child of a fork.
  const int page_map = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  uint64_t found = 0;
  for (uint64_t i = 0; i < probes; ++i) {
    if (is_huge_at(page_map, at + nbytes * (2 * i + 1) / (2 * probes))) ++found;
  }
  if (page_map >= 0) close(page_map);
  const bool is_huge = found * 4 >= probes * 3;
  entries_[next_++ % std::size(entries_)] = {data, nbytes, is_huge, 0};
  return is_huge;
}

bool read_process(int pid, const ProcessProof* proof, void* into, uint64_t from, size_t nbytes) {
  // One call moves at most 2 GiB.
  constexpr size_t kPartBytes = size_t{1} << 30;
  const auto address = [](uint64_t at) {
    return reinterpret_cast<void*>(static_cast<uintptr_t>(at));
  };
  const ProcessProof nothing{nullptr, 0};
  const size_t token_bytes = proof == nullptr ? 0 : kNonceBytes;
  const ProcessProof& its = proof == nullptr ? nothing : *proof;
  do {
    const size_t part = std::min(nbytes, kPartBytes);
    unsigned char found[kNonceBytes];
    const iovec here[] = {{found, token_bytes}, {into, part}};
    const iovec there[] = {{address(its.at), token_bytes}, {address(from), part}};
    // Both ranges in one call, so that they come from one process.
    const ssize_t got = process_vm_readv(pid, here, 2, there, 2, 0);
    if (got != static_cast<ssize_t>(token_bytes + part)) return false;
    if (token_bytes != 0 && std::memcmp(found, its.bytes, token_bytes) != 0) return false;
    into = static_cast<char*>(into) + part;
    from += part;
    nbytes -= part;
  } while (nbytes != 0);
  return true;
}

RemoteReader::RemoteReader(Segment& segment, int rank, std::vector<int> pids)
    : segment_(segment), rank_(rank), pids_(std::move(pids)) {
  if (getrandom(nonce_, sizeof(nonce_), 0) != sizeof(nonce_)) can_read_all_ = kNo;
  RankWords& mine = segment_.words(rank_);
  std::memcpy(mine.nonce, nonce_, sizeof(nonce_));
  mine.nonce_at = reinterpret_cast<uintptr_t>(nonce_);
}

bool RemoteReader::can_read_all() {
  if (can_read_all_ != kUnknown) return can_read_all_ == kYes;
  can_read_all_ = kYes;
  for (int peer = 0; peer < segment_.ranks(); ++peer) {
    const RankWords& theirs = segment_.words(peer);
    const ProcessProof proof{theirs.nonce, theirs.nonce_at};
    if (!read_process(pids_[static_cast<size_t>(peer)], &proof, nullptr, 0, 0)) can_read_all_ = kNo;
  }
  return can_read_all_ == kYes;
}

}  // namespace unisono
