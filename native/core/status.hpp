// How a program ended. Numbers only: Python knows the names and writes the sentence.
#pragma once

namespace unisono {

enum class Code : int {
  ok = 0,
  mismatch = 1,      // the peer is in another call: its fingerprint differs from ours
  timeout = 2,       // the deadline passed while waiting for the peer
  lost = 3,          // the peer's process ended
  left = 7,          // the peer closed the group
  aborted = 4,       // abort() was called, here or by another rank
  interrupted = 6,   // the caller's poll function said so
  uneven = 8,        // the ranks' second words differ; nothing was written
  no_memory = 9,     // this rank has none for what the program needs
  bad_program = 5,   // an instruction names a buffer, peer, range or opcode that does not exist
  closed = 12,       // this rank closed its end
  cancelled = 13,    // the caller gave it up
  unreachable = 14,  // the peer's memory cannot be opened; nothing has happened
  divided = 16,      // the ranks do not all want to read directly; nothing was written
  unknown = 15,      // there is no such operation (any more)
};

struct Status {
  Code code = Code::ok;
  int peer = -1;  // the rank to blame; -1: none
  int step = -1;  // index of the instruction that failed; -1: before the first one

  bool is_ok() const { return code == Code::ok; }
};

}  // namespace unisono
