// Where in the user's program a call is made.
#pragma once

#include "core/recorder.hpp"

namespace unisono {

// Return the code object and the instruction of the innermost frame outside this library. The
// calling thread holds the interpreter lock.
Site caller_site();

}  // namespace unisono
