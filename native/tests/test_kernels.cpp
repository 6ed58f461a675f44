// The reduction loops of every instruction set against references. A reference computes one element
// at a time and shares no code with the loops. tests/core/engines/test_native_kernels.py compares with
// NumPy.
#include "kernels/kernels.hpp"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

using namespace unisono;

namespace {

uint64_t random_state = 0x9E3779B97F4A7C15u;

uint64_t random_bits() {  // xorshift64*
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  return random_state * 0x2545F4914F6CDD1Du;
}

std::vector<unsigned char> random_bytes(std::size_t nbytes, bool is_bool) {
  std::vector<unsigned char> bytes(nbytes);
  for (unsigned char& byte : bytes) {
    byte = static_cast<unsigned char>(random_bits() >> 56);
    if (is_bool) byte &= 1;
  }
  return bytes;
}

// Apply `op` to `count` elements at an odd address, as in a slice of a byte buffer. The result must
// be the same at any address.
std::vector<unsigned char> reduced(ReduceFn fn, const std::vector<unsigned char>& into,
                                   const std::vector<unsigned char>& other, std::size_t count) {
  std::vector<unsigned char> a(into.size() + 1), b(other.size() + 1);
  if (!into.empty()) std::memcpy(a.data() + 1, into.data(), into.size());
  if (!other.empty()) std::memcpy(b.data() + 1, other.data(), other.size());
  std::vector<unsigned char> apart(a.size()), onto_b = b;
  fn(apart.data() + 1, a.data() + 1, b.data() + 1, count);
  fn(onto_b.data() + 1, a.data() + 1, onto_b.data() + 1, count);
  fn(a.data() + 1, a.data() + 1, b.data() + 1, count);
  assert(std::equal(a.begin() + 1, a.end(), apart.begin() + 1));
  assert(std::equal(a.begin() + 1, a.end(), onto_b.begin() + 1));
  return {a.begin() + 1, a.end()};
}

template <class T>
T at(const std::vector<unsigned char>& bytes, std::size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}

// The integer result, computed in 128 bits and cut to T.
template <class T>
T expected_integer(RedOp op, T a, T b) {
  __extension__ using Wide = unsigned __int128;
  switch (op) {
    case RedOp::product: return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
    case RedOp::min: return a < b ? a : b;
    case RedOp::max: return a > b ? a : b;
    case RedOp::band: return static_cast<T>(a & b);
    case RedOp::bor: return static_cast<T>(a | b);
    case RedOp::bxor: return static_cast<T>(a ^ b);
    default: return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
  }
}

template <class T>
void check_integer(DType dtype) {
  for (int op = 0; op < static_cast<int>(RedOp::premul_sum); op++) {
    for (std::size_t count : {0, 1, 3, 16, 67, 257}) {
      auto a = random_bytes(count * sizeof(T), false);
      auto b = random_bytes(count * sizeof(T), false);
      auto got = reduced(reduce_fn(dtype, static_cast<RedOp>(op)), a, b, count);
      for (std::size_t i = 0; i < count; i++) {
        assert(at<T>(got, i) ==
               expected_integer<T>(static_cast<RedOp>(op), at<T>(a, i), at<T>(b, i)));
      }
    }
  }
  assert(reduce_fn(dtype, RedOp::premul_sum) == nullptr);
}

double half_value(uint16_t bits) {
  int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 31) return fraction != 0 ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

double bfloat_value(uint16_t bits) {
  uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Whether `bits` is the 16-bit value nearest to `exact`, and the even value if two are equally
// near. The check compares both neighbours, so that it shares no rounding code with the loops.
bool is_nearest(uint16_t bits, double exact, double (*value)(uint16_t), double limit) {
  if (std::isnan(exact)) return std::isnan(value(bits));
  if (std::signbit(value(bits)) != std::signbit(exact)) return false;
  if (std::fabs(exact) >= limit) return std::isinf(value(bits));
  if (std::isinf(value(bits))) return false;
  double error = std::fabs(value(bits) - exact);
  for (int step : {-1, 1}) {
    if ((bits & 0x7FFF) == 0 && step < 0) continue;
    double neighbour = value(static_cast<uint16_t>(bits + step));
    if (std::isinf(neighbour)) continue;
    double other = std::fabs(neighbour - exact);
    if (other < error || (other == error && (bits & 1) != 0)) return false;
  }
  return true;
}

// A 16-bit sum is, by definition, the float sum rounded once more.
void check_16_bits(DType dtype, double (*value)(uint16_t), double limit) {
  constexpr std::size_t count = 40'000;
  auto a = random_bytes(count * 2, false), b = random_bytes(count * 2, false);
  auto sums = reduced(reduce_fn(dtype, RedOp::sum), a, b, count);
  auto least = reduced(reduce_fn(dtype, RedOp::min), a, b, count);
  auto most = reduced(reduce_fn(dtype, RedOp::max), a, b, count);
  for (std::size_t i = 0; i < count; i++) {
    double x = value(at<uint16_t>(a, i)), y = value(at<uint16_t>(b, i));
    float sum = static_cast<float>(x) + static_cast<float>(y);
    assert(is_nearest(at<uint16_t>(sums, i), sum, value, limit));
    double low = value(at<uint16_t>(least, i)), high = value(at<uint16_t>(most, i));
    if (std::isnan(x) || std::isnan(y)) {
      assert(std::isnan(low) && std::isnan(high));
    } else {
      assert(low == std::fmin(x, y) && high == std::fmax(x, y));
    }
  }
}

// An accumulation is a sum of floats, rounded once, at any address and also into an operand.
void check_accumulations(DType dtype, double (*value)(uint16_t), double limit) {
  const ReduceFns fns = reduce_fns(dtype, RedOp::sum);
  assert(fns.is_wide() && reduce_fns(dtype, RedOp::avg).is_wide());
  assert(!reduce_fns(dtype, RedOp::max).is_wide() && !reduce_fns(DType::f32, RedOp::sum).is_wide());
  for (std::size_t count : {0, 1, 7, 8, 9, 67, 20'000}) {
    std::vector<unsigned char> x[4];
    for (auto& each : x) each = random_bytes(count * 2 + 1, false);
    std::vector<float> sum(count);
    const auto before = x[0];
    fns.wide.begin(sum.data(), x[0].data() + 1, x[1].data() + 1, count);
    fns.wide.add(sum.data(), x[2].data() + 1, count);
    fns.wide.end(x[0].data() + 1, sum.data(), x[3].data() + 1, count);
    for (std::size_t i = 0; i < count; i++) {
      const auto operand = [i, value](const std::vector<unsigned char>& bytes) {
        uint16_t bits;
        std::memcpy(&bits, bytes.data() + 1 + 2 * i, 2);
        return static_cast<float>(value(bits));
      };
      const float total = ((operand(before) + operand(x[1])) + operand(x[2])) + operand(x[3]);
      uint16_t got;
      std::memcpy(&got, x[0].data() + 1 + 2 * i, 2);
      assert(is_nearest(got, total, value, limit));
    }
  }
}

// Every 16-bit value plus negative zero is the value itself, so both conversions are right.
void check_round_trip(DType dtype, double (*value)(uint16_t)) {
  std::vector<unsigned char> a(65536 * 2), b(65536 * 2);
  for (unsigned i = 0; i < 65536; i++) {
    const uint16_t bits = static_cast<uint16_t>(i), zero = 0x8000;
    std::memcpy(a.data() + i * 2, &bits, 2);
    std::memcpy(b.data() + i * 2, &zero, 2);
  }
  auto got = reduced(reduce_fn(dtype, RedOp::sum), a, b, 65536);
  for (unsigned i = 0; i < 65536; i++) {
    if (std::isnan(value(static_cast<uint16_t>(i)))) {
      assert(std::isnan(value(at<uint16_t>(got, i))));
    } else {
      assert(at<uint16_t>(got, i) == i);
    }
  }
}

template <class T>
void check_float(DType dtype) {
  const T nan = std::numeric_limits<T>::quiet_NaN();
  const T values[] = {T(0),
                      -T(0),
                      T(1),
                      T(-3.5),
                      std::numeric_limits<T>::denorm_min(),
                      std::numeric_limits<T>::max(),
                      T(INFINITY),
                      T(-INFINITY),
                      nan};
  for (T x : values) {
    for (T y : values) {
      auto apply = [&](RedOp op) {
        T into = x;
        reduce_fn(dtype, op)(&into, &into, &y, 1);
        return into;
      };
      auto same = [](T got, T want) { return got == want || (got != got && want != want); };
      const bool has_nan = x != x || y != y;
      assert(same(apply(RedOp::sum), x + y) && same(apply(RedOp::product), x * y));
      assert(same(apply(RedOp::min), has_nan ? nan : std::fmin(x, y)));
      assert(same(apply(RedOp::max), has_nan ? nan : std::fmax(x, y)));
    }
  }
  assert(reduce_fn(dtype, RedOp::band) == nullptr);
}

// Every product is rounded before the addition, which a fused multiply-add would not do.
template <class T>
void check_unfused(DType dtype) {
  constexpr std::size_t count = 300;
  std::vector<T> a(2 * count), b(2 * count), got;
  for (T& value : a) value = static_cast<T>(random_bits()) / 3;
  for (T& value : b) value = static_cast<T>(random_bits()) / 3;
  got = a;
  reduce_fn(dtype, RedOp::product)(got.data(), got.data(), b.data(), count);
  for (std::size_t i = 0; i < 2 * count; i += 2) {
    volatile T rr = a[i] * b[i], ii = a[i + 1] * b[i + 1];
    volatile T ri = a[i] * b[i + 1], ir = a[i + 1] * b[i];
    assert(got[i] == rr - ii && got[i + 1] == ri + ir);
  }
}

template <class T>
void check_complex(DType dtype) {
  T into[4] = {1, 2, 3, -4};
  const T other[4] = {5, 7, T(0.5), 2};
  reduce_fn(dtype, RedOp::product)(into, into, other, 2);
  assert(into[0] == -9 && into[1] == 17 && into[2] == T(9.5) && into[3] == 4);
  reduce_fn(dtype, RedOp::sum)(into, into, other, 2);
  assert(into[0] == -4 && into[1] == 24 && into[2] == 10 && into[3] == 6);
  check_unfused<T>(dtype);
  assert(reduce_fn(dtype, RedOp::min) == nullptr && reduce_fn(dtype, RedOp::bxor) == nullptr);
}

void check_bool() {
  for (int op = 0; op < kRedOps; op++) {
    ReduceFn fn = reduce_fn(DType::bool8, static_cast<RedOp>(op));
    const auto code = static_cast<RedOp>(op);
    assert((fn == nullptr) == (code == RedOp::avg || code == RedOp::premul_sum));
    for (int bits = 0; fn != nullptr && bits < 4; bits++) {
      unsigned char a = bits & 1, b = static_cast<unsigned char>(bits >> 1);
      const bool is_and = code == RedOp::product || code == RedOp::min || code == RedOp::band;
      const int want = code == RedOp::bxor ? a ^ b : is_and ? a & b : a | b;
      fn(&a, &a, &b, 1);
      assert(a == want);
    }
  }
}

void check_copy() {
  for (std::size_t nbytes : {0, 1, 1023, 1024, 1025, 1343, 4096, 4097, 32'768, 32'769, 262'143,
                             262'144, 262'145, 700'001}) {
    auto from = random_bytes(nbytes, false);
    std::vector<unsigned char> to(nbytes + 1, 0xEE);
    copy_chunked(to.data(), from.data(), nbytes);
    assert(to.back() == 0xEE);
    to.pop_back();
    assert(to == from);
  }
  auto from = random_bytes(5000, false);
  for (std::size_t shift = 0; shift < 64; shift++) {
    std::vector<unsigned char> to(5200, 0xEE);
    copy_chunked(to.data() + shift + 1, from.data() + shift, 4096);
    assert(to[shift] == 0xEE && to[shift + 4097] == 0xEE);
    assert(std::equal(to.begin() + shift + 1, to.begin() + shift + 4097, from.begin() + shift));
  }
}

}  // namespace

int main() {
  assert(!set_isa("no such thing") && std::string(available_isa(0)) == "plain");
  for (int i = 0; available_isa(i) != nullptr; i++) {
    assert(set_isa(available_isa(i)) && std::string(isa()) == available_isa(i));
    check_integer<int8_t>(DType::i8);
    check_integer<int16_t>(DType::i16);
    check_integer<int32_t>(DType::i32);
    check_integer<int64_t>(DType::i64);
    check_integer<uint8_t>(DType::u8);
    check_integer<uint16_t>(DType::u16);
    check_integer<uint32_t>(DType::u32);
    check_integer<uint64_t>(DType::u64);
    check_16_bits(DType::f16, half_value, 65520.0);
    check_round_trip(DType::f16, half_value);
    check_accumulations(DType::f16, half_value, 65520.0);
    check_16_bits(DType::bf16, bfloat_value, std::ldexp(511.0, 119));
    check_round_trip(DType::bf16, bfloat_value);
    check_accumulations(DType::bf16, bfloat_value, std::ldexp(511.0, 119));
    check_float<float>(DType::f32);
    check_float<double>(DType::f64);
    check_complex<float>(DType::c64);
    check_complex<double>(DType::c128);
    check_bool();
  }
  assert(reduce_fn(static_cast<DType>(-1), RedOp::sum) == nullptr);
  assert(reduce_fn(DType::f32, static_cast<RedOp>(99)) == nullptr);
  check_copy();
  std::puts("kernels: ok");
}
