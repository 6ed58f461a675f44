// The words that all ranks of a call compare before any array is written.
#pragma once

#include <cstdint>

namespace unisono {

struct AgreementWords {
  uint64_t fingerprint;  // 64 bits over everything that must be equal; 0: agreed already
  uint64_t even;         // a word of the caller, which reports whether it is equal on all ranks
  uint64_t direct = 0;   // bits of DirectReading
};

}  // namespace unisono
