// The words that all ranks of a call compare before any rank writes an array.
#pragma once

#include <cstdint>

namespace unisono {

struct AgreementWords {
  uint64_t fingerprint;  // hash of all that must be equal; 0: the ranks have agreed already
  uint64_t even;         // may differ; the result reports whether all ranks have the same
  uint32_t direct = 0;   // bits of DirectReading
  uint32_t slot_at = 0;  // where this rank's slot of the epoch begins; see Segment::slot

  // The words of the call with this number. Ranks that are in different calls then disagree, though
  // the calls are equal in everything else.
  AgreementWords of_call(uint64_t number) const {
    if (fingerprint == 0) return *this;
    const uint64_t mixed = fingerprint + number * 0x9e3779b97f4a7c15u;
    return {mixed != 0 ? mixed : 1, even, direct};
  }
};

}  // namespace unisono
