// Calls a function at the end of a scope, also if an exception ends the scope.
#pragma once

namespace unisono {

template <class End>
class [[nodiscard]] Finally {
 public:
  explicit Finally(End end) : end_(end) {}
  ~Finally() { end_(); }
  Finally(const Finally&) = delete;
  Finally& operator=(const Finally&) = delete;

 private:
  End end_;
};

}  // namespace unisono
