// From the arguments of a public function to the call that they stand for.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

#include "bindings/calls.hpp"

namespace unisono {

// How a call without a group finds the default one; under the interpreter lock.
struct Global {
  PyObject* world = nullptr;   // context variable of the current world; None: the process's
  PyObject* stream = nullptr;  // context variable of the current stream; None: no explicit one
  PyObject* group_type = nullptr;
  PyObject* work_type = nullptr;
  PyObject* default_group = nullptr;
  PyObject* attribute = nullptr;  // name of a group's attribute that holds its Calls
  PyObject* default_attribute = nullptr;
};
extern Global global;

// What a parameter of a function is, by a letter from Python.
enum Kind : char {
  kReads = 'r',      // an array that is only read
  kWrites = 'w',     // an array that is written, or both
  kReadsList = 'R',  // a list of such arrays of one shape, or none
  kWritesList = 'W',
  kOp = 'o',
  kRoot = 'n',
  kGroup = 'g',
  kFlag = 'f',       // async_op
  kAlgorithm = 'a',  // the last one, by name only
  kSent = 's',       // the array of a message
  kReceived = 'v',   // and where one goes
  kPeer = 'p',
  kTag = 't',
  kAbsent = '-',  // only None is ours
};

constexpr size_t kMaxParameters = 8;

// The parameters of a function.
struct Signature {
  PyObject* names;  // tuple of interned strings
  int64_t number;   // of the function
  size_t count;
  size_t positional;  // how many may come without their names
  size_t group;       // which of them is the group
  char kinds[kMaxParameters];
};

struct Arguments {
  Calls* calls = nullptr;
  nanobind::object calls_ref;
  Key key;
  PyObject* op = nullptr;
  PyObject* algorithm = nullptr;
  bool is_async = false;
  Arrays arrays;
  Message message;
};

// Whether the call is of the plain kind that can be repeated; `into` then says which call it is.
bool parse_arguments(const Signature& f, PyObject* const* args, size_t count, PyObject* keywords,
                     Arguments* into);

// Needed before the first call of parse_arguments(). Not when the extension is loaded: the launcher,
// which loads it for its store's server, shall stay without NumPy.
void import_numpy();

}  // namespace unisono
