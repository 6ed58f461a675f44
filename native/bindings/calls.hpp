// The calls of a group that can be repeated, and whose turn it is to make one.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/fork_guard.hpp"
#include "bindings/owned_program.hpp"
#include "core/queue.hpp"
#include "core/program.hpp"

namespace unisono {

// > 0: every call has to go through Python; under the interpreter lock.
extern int suspended;

// What identifies a call among those of one group.
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

// The memory of an argument: of one array, or of a list of arrays of equal size.
struct Span {
  char* data = nullptr;      // of one array
  std::vector<char*> parts;  // of a list
  int64_t nbytes = 0;        // in all
  bool is_readonly = false;  // as the tensor of a broadcast's root may be

  bool operator==(const Span& other) const {
    return data == other.data && parts == other.parts && nbytes == other.nbytes;
  }
};

// The one way from what is known of a call, and the memory it works on, to what an engine runs.
// `scratch` has to be as large as scratch_bytes() says.
Job job_of(const CallSpec& spec, const Span& input, const Span& output, std::vector<char>& scratch);
inline size_t scratch_bytes(const CallSpec& spec) {
  return static_cast<size_t>(spec.program->scratch_count * spec.itemsize);
}

// An argument that is an array or a list of arrays, with its owners.
struct Argument {
  Span span;
  PyObject* array = nullptr;             // the caller keeps it
  std::vector<nanobind::object> listed;  // a list can change while the interpreter lock is not held

  // The array, a list of arrays, or None.
  nanobind::object owner() const;
};

// The arguments of a call.
struct Arrays {
  Argument input, output;
};

// The arguments of a send or recv; nullptr: not given.
struct Message {
  PyObject* array = nullptr;
  PyObject* peer = nullptr;
  PyObject* tag = nullptr;
  bool is_sent = false;
};

// What takes the plain messages of a group; see Port. The results are as Python has them there.
class Messenger {
 public:
  virtual ~Messenger() = default;
  virtual nanobind::object send(nanobind::handle array, nanobind::handle to, nanobind::handle tag,
                                double timeout_s) = 0;
  virtual nanobind::object recv(nanobind::handle array, nanobind::handle from, nanobind::handle tag,
                                double timeout_s) = 0;
};

// What a call runs besides its memory, and who owns that.
struct Recipe {
  CallSpec spec;
  nanobind::object runner;   // keeps spec.runner alive
  nanobind::object program;  // keeps spec.program alive
  nanobind::object call;     // for errors: the Call of Python

  int visit(visitproc visit, void* arg) const;
};

struct CachedCall {
  Key key;
  Recipe recipe;
  std::vector<char> scratch;
  nanobind::object op, algorithm;  // keeps the addresses in the key from being used again
};

// The calls of one group that can be repeated.
class Calls {
 public:
  Calls(nanobind::object turn, nanobind::object failed, nanobind::object begun);

  void close() { closed_ = true; }
  // The thread that is in a collective call of the group, here or in Python; 0 if none is.
  unsigned long caller() const { return caller_; }
  void set_caller(unsigned long thread) { caller_ = thread; }
  void set_timeout(double timeout_s);
  // Messages go there; `failed(op, what it returned, array, peer, tag, timeout_s)` is the error of one.
  void set_messenger(nanobind::handle_t<Messenger> messenger, nanobind::object failed);

  // Python has run a call on these buffers, to which nothing had to be done before or after.
  void note(Recipe recipe, const Span& input, const Span& output);
  void forget_note() { noted_.reset(); }

  // For Python's garbage collector: what is noted refers back to the engine that owns this.
  int visit(visitproc visit, void* arg) const;
  void clear();

  // Number and Call of the last call that was repeated; for ranks that ask.
  nanobind::object last() const;

  // A call has begun, whichever it is; see Runner::rouse.
  void wake_waiters() const {
    if (runner_.is_valid()) nanobind::inst_ptr<Runner>(runner_)->wake_waiters();
  }
  // What the call returns; nothing: leave it to Python.
  nanobind::object run_message(const Message& message) const;
  CachedCall* find(const Key& key) const;
  void remember(const Key& key, nanobind::handle op, nanobind::handle algorithm,
                const Arrays& arrays, bool is_async);
  // Run it, if it is nobody else's turn; false: leave it to Python.
  bool run(CachedCall& what, const Arrays& arrays);
  // Queue it; return what Python says of its end, the arguments of a work. Nothing: leave it to
  // Python.
  nanobind::object start(const CachedCall& what, Arrays&& arrays);

 private:
  struct Note {
    Recipe recipe;
    Span input;
    Span output;
    unsigned long thread;
  };
  class Inside;
  // Whether another thread is in a call, which Python refuses.
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
