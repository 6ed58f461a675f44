#include "kernels/copy_out.hpp"

#include <cstring>

#include "core/clock.hpp"
#include "kernels/kernels.hpp"

namespace unisono {

namespace {

// Ordinary stores slower than this fetch lines from a distant core. Measured: 2 to 6 GB/s from
// another socket, 20 and more from a shared cache.
constexpr std::size_t kFarBytesPerNs = 8;

// So many slow copies in a row show a distant core. A few also have page faults or lose their core.
constexpr int kSlowCopies = 4;

// Copies between measurements. A virtual machine's cores can move at any time.
constexpr int kNearCopies = 16;
constexpr int kFarCopies = 256;

}  // namespace

void CopyOut::copy_small(void* to, const void* from, std::size_t nbytes) {
  if (nbytes != 0) std::memcpy(to, from, nbytes);
}

void CopyOut::copy_large(void* to, const void* from, std::size_t nbytes) {
  if (left_ > 0) {
    --left_;
    return (is_far_ ? copy_past_cache : copy_chunked)(to, from, nbytes);
  }
  const int64_t start_ns = now_ns();
  copy_chunked(to, from, nbytes);
  const auto elapsed_ns = static_cast<std::size_t>(now_ns() - start_ns);
  slow_ = nbytes < elapsed_ns * kFarBytesPerNs ? slow_ + 1 : 0;
  is_far_ = slow_ >= kSlowCopies;
  if (is_far_) slow_ = kSlowCopies - 1;  // if the next one is slow, too, the core is still far
  left_ = is_far_ ? kFarCopies : slow_ == 0 ? kNearCopies : 0;
}

}  // namespace unisono
