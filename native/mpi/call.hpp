// Calls of a C library that is found at run time: MPI, without mpi.h.
//
// The interface of MPI differs by library. A handle is an int (MPICH and relatives) or a pointer
// (Open MPI). A count is an int, or has 64 bits (functions with the suffix _c). But each argument
// of the functions that are called here is one integer in a register, or in one place of the stack.
// A function that takes fewer arguments ignores the rest. So a call is an address and integers, which
// Python looks up. This holds for the calling conventions of 64-bit x86 (System V) and ARM.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace unisono {

// MPI_Status has up to 32 bytes.
constexpr size_t kStatusBytes = 128;

// MPI_Test
using MPITest = int (*)(void* request, int* flag, void* status);

struct MPICall {
  static constexpr size_t kArguments = 10;

  std::uintptr_t function = 0;  // 0: there is no call
  std::array<std::intptr_t, kArguments> arguments{};
  // Indices of the arguments that are set for each call; -1: none.
  int input_at = -1;
  int output_at = -1;
  int request_at = -1;  // -1: the function blocks until MPI needs the memory no more

  // The call ends when it has ended on all ranks, because MPI may hide that a rank has died in it.
  bool ends_together = false;

  bool blocks() const { return request_at < 0; }
  void set(int at, const void* address) {
    if (at >= 0) arguments[static_cast<size_t>(at)] = reinterpret_cast<std::intptr_t>(address);
  }
  // Make the call and return MPI's error code; 0: success.
  int make() const {
    using I = std::intptr_t;
    const auto call = reinterpret_cast<int (*)(I, I, I, I, I, I, I, I, I, I)>(function);
    const auto& a = arguments;
    return call(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]);
  }
};

}  // namespace unisono
