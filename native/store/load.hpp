// The client side of a benchmark, cheap enough that the server is the limit.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace unisono::store {

// Make `count` equal requests over connections, with one open request on each. Returns the time in
// seconds. A reply must be short enough to come in one piece.
double drive(const std::vector<int>& connections, std::string_view request, uint64_t count);

}  // namespace unisono::store
