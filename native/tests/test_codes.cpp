// Codes stay inside their arrays, and are those nearest to the quotients, in every instruction set.
#include "kernels/codes.hpp"

#include "kernels/kernels.hpp"

#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

using namespace unisono;

namespace {

constexpr std::size_t kLengths[] = {0, 1, 5, 127, 128, 129, 1000};

std::vector<float> numbers(std::size_t count) {
  std::mt19937 random(static_cast<unsigned>(count));
  std::normal_distribution<float> normal;
  std::vector<float> x(count);
  for (float& each : x) each = std::ldexp(normal(random), static_cast<int>(random() % 20) - 10);
  return x;
}

// Whether each value is within half a step of the number: 1/252 of the largest, 1/16 or 1/256.
void check(Codec codec, std::size_t count) {
  const bool has_scales = codec != Codec::bf16;
  const std::vector<float> x = numbers(count);
  std::vector<float> scales(has_scales ? (count + kBlock - 1) / kBlock : 0), y(count);
  std::vector<uint8_t> codes(has_scales ? count : 2 * count);
  const CodecFns fns = codec_fns(codec);
  fns.encode(x.data(), scales.data(), codes.data(), count);
  fns.decode(scales.data(), codes.data(), y.data(), count);
  for (std::size_t i = 0; i < count; i++) {
    float largest = 0;
    for (std::size_t k = i / kBlock * kBlock; k < count && k / kBlock == i / kBlock; k++) {
      largest = std::fmax(largest, std::fabs(x[k]));
    }
    const float size = std::fabs(x[i]);
    const float bound = codec == Codec::int8  ? largest / 252
                        : codec == Codec::fp8 ? std::fmax(size / 16, largest / 245760)
                                              : size / 256;
    assert(std::fabs(y[i] - x[i]) <= bound * 1.000001f);
  }
  std::vector<float> twice = y;
  fns.add(scales.data(), codes.data(), twice.data(), count);
  for (std::size_t i = 0; i < count; i++) assert(twice[i] == 2 * y[i]);
}

}  // namespace

int main() {
  for (int i = 0; available_isa(i) != nullptr; i++) {
    assert(set_isa(available_isa(i)));
    for (Codec codec : {Codec::int8, Codec::fp8, Codec::bf16}) {
      for (const std::size_t count : kLengths) check(codec, count);
    }
    assert(codec_fns(static_cast<Codec>(3)).encode == nullptr);
  }
  std::puts("ok");
}
