// The words that all ranks of a call compare before any rank writes an array.
#pragma once

#include <cstdint>

namespace unisono {

struct AgreementWords {
  uint64_t fingerprint;  // hash of all that must be equal; 0: the ranks have agreed already
  uint64_t even;         // may differ; the result reports whether all ranks have the same
  uint64_t direct = 0;   // bits of DirectReading
};

}  // namespace unisono
