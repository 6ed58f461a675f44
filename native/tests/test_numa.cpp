// On which NUMA node the kernel is asked to take the pages of slots and rings.
#include <cassert>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "messages/ring.hpp"
#include "shared/numa.hpp"
#include "shared/segment.hpp"

using namespace unisono;

namespace {

constexpr unsigned char kNonce[kNonceBytes] = {7};
constexpr unsigned long kBits = 1024;
constexpr int kDefault = 0, kPreferred = 1, kOfAddress = 2;  // MPOL_*

// The policy of the page at an address, and its nodes up to number 63. -1: the kernel does not tell.
int policy_of(const void* at, unsigned long* nodes) {
  int policy = -1;
  unsigned long all[kBits / (8 * sizeof(unsigned long))] = {};
  if (syscall(SYS_get_mempolicy, &policy, all, kBits, at, kOfAddress) != 0) return -1;
  *nodes = all[0];
  return policy;
}

blkcnt_t blocks_of(int fd) {
  struct stat info;
  assert(fstat(fd, &info) == 0);
  return info.st_blocks;
}

// Whether the kernel takes advice. In many containers it does not.
bool takes_advice() {
  Segment segment;
  assert(segment.create(2, 1 << 16, kNonce) == 0);
  segment.place_slots(1, 0);
  unsigned long nodes = 0;
  return policy_of(segment.slot(1, 0, kPageBytes), &nodes) == kPreferred;
}

void test_slots_of_one_rank() {
  Segment mine, theirs;
  assert(mine.create(3, 1 << 19, kNonce) == 0);
  assert(theirs.attach(getpid(), mine.fd(), kNonce) == 0);
  const blkcnt_t before = blocks_of(mine.fd());
  mine.place_slots(1, 0);
  assert(blocks_of(mine.fd()) == before);  // no page is touched, so that a start is not slower
  // Every process that has the memory sees it: here the other mapping.
  for (uint64_t epoch : {0, 1}) {
    for (int rank : {0, 1, 2}) {
      unsigned long nodes = 0;
      const int found = policy_of(theirs.slot(rank, epoch, kPageBytes), &nodes);
      assert(found == (rank == 1 ? kPreferred : kDefault));
      assert(nodes == (rank == 1 ? 1UL : 0UL));
    }
  }
  // The pages at both ends have bytes of other ranks.
  unsigned long nodes = 0;
  assert(policy_of(theirs.slot(1, 0, 0) - 1, &nodes) == kDefault);
  assert(policy_of(theirs.slot(2, 0, 0), &nodes) == kDefault);
  // The memory works as before.
  std::memset(theirs.slot(1, 0, 0), 5, 1 << 19);
  assert(mine.slot(1, 0, 0)[(1 << 19) - 1] == 5);
}

void test_rings() {
  for (int node : {0, -1}) {
    Inbox inbox;
    assert(inbox.create(4, kNonce, node) == 0);
    assert(blocks_of(inbox.fd()) * 512 <= static_cast<blkcnt_t>(kPageBytes));
    unsigned long nodes = 0;
    Outbox outbox;
    assert(outbox.attach(getpid(), inbox.fd(), kNonce, 2, kRingBytes) == 0);
    assert(policy_of(outbox.ring.words, &nodes) == (node == 0 ? kPreferred : kDefault));
    assert(nodes == (node == 0 ? 1UL : 0UL));
  }
}

void test_what_the_kernel_refuses_is_harmless() {
  Segment segment;
  assert(segment.create(2, 1 << 16, kNonce) == 0);
  for (int node : {-1, 63, 1023, 1024, 1 << 30}) segment.place_slots(1, node);
  prefer_node(segment.slot(0, 0, 0), 1, 0);  // no whole page
  unsigned long nodes = 0;
  assert(policy_of(segment.slot(1, 0, kPageBytes), &nodes) == kDefault);
  segment.slot(1, 1, 0)[0] = 1;
}

}  // namespace

int main() {
  if (!takes_advice()) {
    std::puts("the kernel takes no advice on NUMA nodes");
    return 0;
  }
  test_slots_of_one_rank();
  test_rings();
  test_what_the_kernel_refuses_is_harmless();
  std::puts("ok");
}
