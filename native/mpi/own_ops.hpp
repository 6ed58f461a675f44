// Reduce ops in C, for what MPI libraries compute wrongly or do not have.
#pragma once

#include "kernels/kernels.hpp"

namespace unisono {

// The type of a function for MPI_Op_create: both = in (op) both. The type of the elements is known
// to the function.
using MPIOpFunction = void (*)(void* in, void* both, int* count, void* datatype);

// Return the function of a pair; nullptr: the pair has no meaning. MIN and MAX of floats have equal
// bits in either order of the operands: -0 is less than +0, and each NaN becomes one NaN.
MPIOpFunction own_op(DType dtype, RedOp op);

}  // namespace unisono
