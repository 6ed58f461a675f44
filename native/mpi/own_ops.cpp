#include "mpi/own_ops.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace unisono {

namespace {

template <int kPair>
void reduce(void* in, void* both, int* count, void* /*datatype*/) {
  constexpr auto kDType = static_cast<DType>(kPair / kRedOps);
  constexpr auto kOp = static_cast<RedOp>(kPair % kRedOps);
  reduce_fn(kDType, kOp)(both, in, both, static_cast<size_t>(*count));
}

template <int... kPairs>
constexpr std::array<MPIOpFunction, sizeof...(kPairs)> functions(
  std::integer_sequence<int, kPairs...> /*pairs*/) {
  return {&reduce<kPairs>...};
}

constexpr auto kFunctions = functions(std::make_integer_sequence<int, kDTypes * kRedOps>{});

// As integers, floats of one sign are ordered as their values are, or in reverse.
template <class Bits, Bits kInfinity, bool kGreater>
void take_extreme(void* in, void* both, int* count, void* /*datatype*/) {
  constexpr Bits kSign = Bits{1} << (8 * sizeof(Bits) - 1);
  constexpr Bits kQuiet = kInfinity | ((kInfinity & (~kInfinity + 1)) >> 1);
  constexpr Bits kRest = static_cast<Bits>(~kSign);
  const auto key = [](Bits x) { return static_cast<Bits>((x & kSign) != 0 ? ~x : x | kSign); };
  const auto* other = static_cast<const char*>(in);
  auto* into = static_cast<char*>(both);
  for (int i = 0; i < *count; ++i, other += sizeof(Bits), into += sizeof(Bits)) {
    Bits a, b;
    std::memcpy(&a, other, sizeof a);
    std::memcpy(&b, into, sizeof b);
    const Bits least = std::min(key(a), key(b)), most = std::max(key(a), key(b));
    const Bits taken = kGreater ? most : least;
    Bits result = static_cast<Bits>((taken & kSign) != 0 ? taken & kRest : ~taken);
    if ((a & kRest) > kInfinity || (b & kRest) > kInfinity) result = kQuiet;
    std::memcpy(into, &result, sizeof result);
  }
}

template <bool kGreater>
MPIOpFunction extreme_of(DType dtype) {
  switch (dtype) {
    case DType::f16: return &take_extreme<uint16_t, 0x7c00, kGreater>;
    case DType::bf16: return &take_extreme<uint16_t, 0x7f80, kGreater>;
    case DType::f32: return &take_extreme<uint32_t, 0x7f80'0000, kGreater>;
    case DType::f64: return &take_extreme<uint64_t, uint64_t{0x7ff} << 52, kGreater>;
    default: return nullptr;
  }
}

}  // namespace

MPIOpFunction own_op(DType dtype, RedOp op) {
  if (reduce_fn(dtype, op) == nullptr) return nullptr;
  MPIOpFunction found = nullptr;
  if (op == RedOp::min) found = extreme_of<false>(dtype);
  if (op == RedOp::max) found = extreme_of<true>(dtype);
  return found != nullptr
           ? found
           : kFunctions[static_cast<size_t>(dtype) * kRedOps + static_cast<size_t>(op)];
}

}  // namespace unisono
