// The calls of a group that C++ can repeat, and the turn of a call to run.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "bindings/owned_program.hpp"
#include "core/fork_guard.hpp"
#include "core/program.hpp"
#include "core/queue.hpp"

namespace unisono {

// While this is above 0, every call goes through Python. Guarded by the interpreter lock.
extern int suspended;

// Identifies a call among the calls of a group.
struct Key {
  static constexpr int kWords = 24;
  int count = 0;
  std::array<int64_t, kWords> words;

  bool add(int64_t word) {
    if (count == kWords) return false;
    words[static_cast<size_t>(count++)] = word;
    return true;
  }
  bool operator==(const Key& other) const;
  size_t hash() const;
};

// The memory of an argument: an array, or a list of arrays of equal size.
struct Span {
  char* data = nullptr;      // of an array
  std::vector<char*> parts;  // of a list
  int64_t nbytes = 0;        // of all arrays together
  bool is_readonly = false;  // for example the array of a broadcast's root

  bool operator==(const Span& other) const {
    return data == other.data && parts == other.parts && nbytes == other.nbytes;
  }
};

// Make the job of a call from its specification and its memory. All jobs are made here. `scratch`
// must have scratch_bytes() bytes.
Job job_of(const CallSpec& spec, const Span& input, const Span& output, std::vector<char>& scratch);
inline size_t scratch_bytes(const CallSpec& spec) {
  return static_cast<size_t>(spec.program->scratch_count * spec.itemsize);
}

// An argument that is an array or a list of arrays, with its owners.
struct Argument {
  Span span;
  PyObject* array = nullptr;  // borrowed: the caller keeps it alive
  // Owned, because a list can change while the interpreter lock is released.
  std::vector<nanobind::object> listed;

  // Return the array, a list of arrays, or None.
  nanobind::object owner() const;
};

// The arrays of a call.
struct Arrays {
  Argument input, output;
};

// The arguments of a send or recv. nullptr: the argument is missing.
struct Message {
  PyObject* array = nullptr;
  PyObject* peer = nullptr;
  PyObject* tag = nullptr;
  bool is_sent = false;
};

// Sends and receives plain messages of a group; see Port for the results.
class Messenger {
 public:
  virtual ~Messenger() = default;
  virtual nanobind::object send(nanobind::handle array, nanobind::handle to, nanobind::handle tag,
                                double timeout_s) = 0;
  virtual nanobind::object recv(nanobind::handle array, nanobind::handle from, nanobind::handle tag,
                                double timeout_s) = 0;
};

// A call without its memory: the specification and the Python objects that own it.
struct Recipe {
  CallSpec spec;
  nanobind::object runner;   // keeps spec.runner alive
  nanobind::object program;  // keeps spec.program alive
  nanobind::object call;     // for errors: Python's object of the call

  int visit(visitproc visit, void* arg) const;
};

struct CachedCall {
  Key key;
  Recipe recipe;
  std::vector<char> scratch;
  nanobind::object op, algorithm;  // keep the addresses in the key from being reused
};

// The calls of one group that can be repeated.
class Calls {
 public:
  Calls(nanobind::object turn, nanobind::object failed, nanobind::object begun);

  void close() { closed_ = true; }
  // The thread that is in a collective call of the group, in C++ or in Python. 0: there is none.
  unsigned long caller() const { return caller_; }
  void set_caller(unsigned long thread) { caller_ = thread; }
  void set_timeout(double timeout_s);
  // Send and receive plain messages through `messenger`. `failed(op, result, array, peer, tag,
  // timeout_s)` returns the error of a failed message.
  void set_messenger(nanobind::handle_t<Messenger> messenger, nanobind::object failed);

  // Note a call that Python has run on these buffers without work before or after the program.
  void note(Recipe recipe, const Span& input, const Span& output);
  void forget_note() { noted_.reset(); }

  // For Python's garbage collector, because the noted calls refer back to the engine that owns this
  // object.
  int visit(visitproc visit, void* arg) const;
  void clear();

  // Return the number and the Call of the last repeated call, for the answer to another rank's
  // question.
  nanobind::object last() const;

  // Wake the waiting ranks, because a call has begun; see Runner::wake_waiters().
  void wake_waiters() const {
    if (runner_.is_valid()) nanobind::inst_ptr<Runner>(runner_)->wake_waiters();
  }
  // Send or receive. Returns the result of the public function, or no object if Python must handle
  // it.
  nanobind::object run_message(const Message& message) const;
  CachedCall* find(const Key& key) const;
  void remember(const Key& key, nanobind::handle op, nanobind::handle algorithm,
                const Arrays& arrays, bool is_async);
  // Run a cached call if the turn is free. False: Python must handle the call.
  bool run(CachedCall& what, const Arrays& arrays);
  // Queue a cached call. Returns the arguments for a new Work, which Python provides. No object:
  // Python must handle the call.
  nanobind::object start(const CachedCall& what, Arrays&& arrays);

 private:
  struct Note {
    Recipe recipe;
    Span input;
    Span output;
    unsigned long thread;
  };
  class Inside;
  // Whether another thread is in a call, which Python rejects with an error.
  bool is_busy() const;
  void end(const Recipe& recipe, uint64_t seq, Status status, const Arrays& arrays);

  nanobind::object turn_ref_;
  Turn* turn_;
  nanobind::object failed_;
  nanobind::object begun_;
  bool closed_ = false;
  unsigned long caller_ = 0;
  const ForkGuard fork_guard_;
  double timeout_s_ = 0;
  int64_t timeout_ns_ = 0;
  nanobind::object messenger_ref_;
  Messenger* messenger_ = nullptr;
  nanobind::object message_failed_;
  std::unique_ptr<Note> noted_;
  nanobind::object runner_;  // of the last call that was remembered
  uint64_t last_seq_ = 0;
  nanobind::object last_call_;
  std::array<std::unique_ptr<CachedCall>, 256> table_;
};

}  // namespace unisono
