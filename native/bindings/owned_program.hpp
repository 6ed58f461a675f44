// A copy of a program in Python's arrays, made once for all calls that repeat the program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/program.hpp"

namespace unisono {

struct OwnedProgram {
  std::vector<Step> steps;
  std::vector<Loop> loops;
  int64_t scratch_count;

  OwnedProgram(std::uintptr_t steps_at, std::size_t step_count, std::uintptr_t loops_at,
               std::size_t loop_count, int64_t scratch)
      : steps(reinterpret_cast<const Step*>(steps_at),
              reinterpret_cast<const Step*>(steps_at) + step_count),
        loops(reinterpret_cast<const Loop*>(loops_at),
              reinterpret_cast<const Loop*>(loops_at) + loop_count),
        scratch_count(scratch) {}

  Program view() const { return {steps.data(), steps.size(), loops.data(), loops.size()}; }
};

}  // namespace unisono
