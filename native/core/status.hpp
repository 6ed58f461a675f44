// How a program ended. C++ returns numbers only; Python knows the names and writes the text.
#pragma once

namespace unisono {

enum class Code : int {
  ok = 0,
  mismatch = 1,      // the peer is in another call: the fingerprints differ
  timeout = 2,       // the deadline passed during the wait for the peer
  lost = 3,          // the peer's process ended
  left = 7,          // the peer closed the group
  aborted = 4,       // abort() was called, here or by another rank
  interrupted = 6,   // the caller's poll function returned true
  uneven = 8,        // the ranks' words `even` differ; nothing was written
  no_memory = 9,     // this rank has no memory left for the program
  bad_program = 5,   // a step names a buffer, peer, range or opcode that does not exist
  closed = 12,       // this rank closed its endpoint
  cancelled = 13,    // the caller cancelled the operation
  unreachable = 14,  // the peer's memory cannot be opened; nothing was sent
  divided = 16,      // the ranks do not all want direct reading; nothing was written
  unknown = 15,      // the operation does not exist or has ended
  waiting = 17,      // the call goes on; the caller decides for how long
  postponed = 19,    // an Idler wants no long wait; the call can be run again
  library = 18,      // an MPI library returned an error, which is in place of the rank
};

struct Status {
  Code code = Code::ok;
  int peer = -1;  // the rank to blame; -1: none
  int step = -1;  // index of the step that failed; -1: before the first step

  bool is_ok() const { return code == Code::ok; }
};

}  // namespace unisono
