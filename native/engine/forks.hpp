// Who is in the child of a fork. What it shares with its parent's peers is the parent's alone: it
// must not write there, nor wait for a lock that a thread of its parent holds.
#pragma once

namespace unisono {

// Remembers in which process it was made.
class Origin {
 public:
  Origin();
  bool is_forked() const;

 private:
  int forks_;
};

}  // namespace unisono
