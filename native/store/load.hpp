// The client side of a benchmark: so cheap that the server is what limits it.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace unisono::store {

// Makes `count` requests, all the same, over connections with one request in flight on each, and
// returns how many seconds they took. A reply has to be so short that it comes in one piece.
double drive(const std::vector<int>& connections, std::string_view request, uint64_t count);

}  // namespace unisono::store
