// Calls an MPI function in a loop, for benchmarks/mpi.py: what a C program would measure.
//
// Handles are integers or pointers, so each argument is passed as one integer.
#include <chrono>
#include <cstdint>

// Return the mean time of `reps` calls in microseconds, or -1 after an error.
extern "C" double loop(int (*function)(intptr_t, intptr_t, intptr_t, intptr_t, intptr_t, intptr_t),
                       const intptr_t* a, int reps) {
  const auto began = std::chrono::steady_clock::now();
  for (int i = 0; i < reps; ++i) {
    if (function(a[0], a[1], a[2], a[3], a[4], a[5]) != 0) return -1;
  }
  const std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - began;
  return taken.count() / reps;
}
