#include "kernels/copy_out.hpp"

#include <algorithm>

#include "core/clock.hpp"
#include "kernels/kernels.hpp"

namespace unisono {

namespace {

// Ordinary stores slower than this fetch lines from a distant core. Measured: 2 to 6 GB/s from
// another socket, 20 and more from a shared cache.
constexpr int64_t kFarBytesPerNs = 8;

// So many slow copies in a row show a distant core. A few also have page faults or lose their core.
constexpr int kSlowCopies = 4;

// Copies between measurements. A virtual machine's cores can move at any time.
constexpr int kNearCopies = 16;
constexpr int kFarCopies = 256;

}  // namespace

void CopyOut::copy_large(void* to, const void* from, std::size_t nbytes) {
  if (!is_measured_next()) return copy_part(to, from, nbytes);
  const int64_t start_ns = now_ns();
  copy_chunked(to, from, nbytes);
  note(nbytes, now_ns() - start_ns);
}

void CopyOut::copy_part(void* to, const void* from, std::size_t nbytes) const {
  (is_far_ ? copy_past_cache : copy_chunked)(to, from, nbytes);
}

void CopyOut::note(std::size_t nbytes, int64_t elapsed_ns) {
  const bool is_slow = static_cast<int64_t>(nbytes) < elapsed_ns * kFarBytesPerNs;
  slow_ = is_slow ? std::min(slow_ + 1, kSlowCopies) : 0;
  is_far_ = slow_ == kSlowCopies;
  left_ = is_far_ ? kFarCopies : is_slow ? 0 : kNearCopies;
}

}  // namespace unisono
