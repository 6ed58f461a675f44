// The outcomes of messages, for Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <tuple>
#include <utility>

#include "bindings/interpreter_lock.hpp"
#include "messages/messages.hpp"

namespace unisono {

// (number, code, source, nbytes, info, tag, message or None)
using OutcomeTuple = std::tuple<uint64_t, int, int, uint64_t, uint32_t, int64_t, nanobind::object>;

// An array over the memory of a message, which it then owns.
inline nanobind::object array_of(Outcome outcome) {
  if (outcome.memory == nullptr) return nanobind::none();
  char* const data = outcome.memory.release();
  const nanobind::capsule owner(data,
                                [](void* bytes) noexcept { delete[] static_cast<char*>(bytes); });
  return nanobind::cast(
    nanobind::ndarray<nanobind::numpy, uint8_t, nanobind::ndim<1>>(data, {outcome.nbytes}, owner));
}

inline OutcomeTuple to_tuple(Outcome outcome) {
  if (outcome.code == Code::interrupted) throw nanobind::python_error();
  const auto& [number, code, source, nbytes, info, tag, memory] = outcome;
  return {number, static_cast<int>(code), source, nbytes, info, tag, array_of(std::move(outcome))};
}

// Call a function without the interpreter lock.
template <class Function>
Outcome unlocked(Function function) {
  InterpreterUnlock unlocked;
  return function();
}

}  // namespace unisono
