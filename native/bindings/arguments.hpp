// Parses the arguments of a public function and finds the call for which they stand.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

#include "bindings/calls.hpp"
#include "bindings/slots.hpp"

namespace unisono {

// How a call without a group finds the default group. Guarded by the interpreter lock.
struct Global {
  PyObject* world = nullptr;   // context variable of the current world; None: the process's world
  PyObject* stream = nullptr;  // context variable of the current stream; None: no explicit stream
  PyObject* group_type = nullptr;
  SlottedType<4>* works = nullptr;  // of an end, op, group and output
  PyObject* default_group = nullptr;
  // Of the slot of a group that holds its Calls: getting it by name takes a tenth of a small call.
  Py_ssize_t calls_offset = 0;
  PyTypeObject* calls_type = nullptr;
  PyObject* default_attribute = nullptr;
};
extern Global global;

// The kind of a parameter, as a letter from Python.
enum Kind : char {
  kReads = 'r',      // an array that is only read
  kWrites = 'w',     // an array that is written, or read and written
  kReadsList = 'R',  // a list of such arrays of one shape, or None
  kWritesList = 'W',
  kOp = 'o',
  kRoot = 'n',
  kGroup = 'g',
  kFlag = 'f',  // async_op
  kAlgorithm = 'a',
  kOrdered = 'e',  // deterministic
  kTimeout = 'd',
  kSent = 's',      // the array that a message is sent from
  kReceived = 'v',  // the array that a message is received into
  kSentSoon = 'S',  // as these, of a call that does not wait for the end
  kReceivedSoon = 'V',
  kPeer = 'p',
  kTag = 't',
  kShorter = 'h',  // whether a receive takes a shorter message
  kSource = 'c',   // an array whose elements the written one gets before the call
  kAbsent = '-',   // only None is handled here
};

constexpr size_t kMaxParameters = 12;

// The parameters of a function.
struct Signature {
  PyObject* names;  // tuple of interned strings
  int64_t number;   // number of the function
  size_t count;
  size_t positional;     // how many arguments may come without a name
  size_t group;          // index of the parameter that is the group
  bool takes_one_array;  // its first argument, and writes it
  char kinds[kMaxParameters];
};

struct Arguments {
  Calls* calls = nullptr;
  nanobind::object calls_ref, world_group;
  PyObject* group = nullptr;              // borrowed
  PyObject* places[kMaxParameters] = {};  // by parameter; nullptr: not given
  Key key;
  PyObject* op = nullptr;
  PyObject* algorithm = nullptr;
  bool is_async = false;
  double timeout_s = -1;  // below 0: that of the group
  Arrays arrays;
  PyObject* source = nullptr;  // borrowed; as plain as the output, with its dtype and shape
  Message message;
  nanobind::object message_array;  // of the tensor of a message

  // Copy the elements of the source, if there is one.
  void copy_source() const;
};

// Whether C++ can handle the call; `into` is then set to its key and arrays.
bool parse_arguments(const Signature& f, PyObject* const* args, size_t count, PyObject* keywords,
                     Arguments* into);

}  // namespace unisono
