// The cache of a group's prepared calls, and how C++ runs a call that it finds there.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/arrays.hpp"
#include "bindings/prepared.hpp"
#include "bindings/slots.hpp"
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
  // Return the key of the same call on arrays of any shape. The call has one array, so the key
  // begins with function, dtype and shape.
  Key without_shape() const;
  bool operator==(const Key& other) const;
  size_t hash() const;
};

// The arguments of a send or recv. nullptr: the argument is missing.
struct Message {
  PyObject* array = nullptr;
  PyObject* owner = nullptr;  // the argument: the array itself, or its tensor
  PyObject* peer = nullptr;
  PyObject* tag = nullptr;
  bool is_sent = false;
  bool is_started = false;  // the call does not wait for its end
  bool is_partial = false;  // a receive takes a shorter message, and returns its elements
  double timeout_s = -1;    // below 0: that of the group
};

// Sends and receives plain messages of a group; see Port for the results.
class Messenger {
 public:
  virtual ~Messenger() = default;
  virtual nanobind::object send(nanobind::handle array, nanobind::handle to, nanobind::handle tag,
                                double timeout_s) = 0;
  virtual bool try_send(nanobind::handle array, nanobind::handle to, nanobind::handle tag) = 0;
  virtual nanobind::object recv(nanobind::handle array, nanobind::handle from, nanobind::handle tag,
                                double timeout_s, bool partial) = 0;
  virtual nanobind::object start_recv(nanobind::handle array, nanobind::handle owner,
                                      nanobind::handle from, nanobind::handle tag, double timeout_s,
                                      const nanobind::object& makes) = 0;
};

// A place in the cache. Python's table of prepared calls (core/backends/prepared_calls.py) has the same
// call by its meaning, for the calls that Python runs.
struct CachedCall {
  Key key;
  nanobind::object op, algorithm;      // keep the addresses in the key from being reused
  nanobind::object call;               // Python's object of the prepared call; it owns `prepared`
  nanobind::object native;             // the object of `prepared`
  nanobind::object name;               // of the function, for a Work
  const Prepared* prepared = nullptr;  // nullptr: Python runs such calls
};

// The prepared calls of one group, found by the arguments of a public function.
class Calls {
 public:
  // `continues(call, (seq, record), status, raised, memory, timeout_s)` continues a call whose
  // program did not end well.
  Calls(nanobind::object queue, nanobind::object continues);

  void close() { closed_ = true; }
  // The thread that is in a collective call of the group, in C++ or in Python. 0: there is none.
  unsigned long caller() const { return caller_; }
  void set_caller(unsigned long thread) { caller_ = thread; }
  void set_timeout(double timeout_s);
  void set_recorder(nanobind::handle_t<Recorder> recorder);
  // Queue calls from now on: a thread serves the queue. `type`: of the objects that `calls`, a
  // deque, keeps until they are over. `discards()` removes the calls that are over. `is_locked()`
  // returns whether the calling thread has the lock of `engine`.
  void open_queue(nanobind::object engine, nanobind::object type, nanobind::object calls,
                  nanobind::object discards, nanobind::object is_locked);
  // Send and receive plain messages through `messenger`. None: Python must. `failed(op, result,
  // array, peer, tag, timeout_s)` returns the error of a failed message. `receives`: makes the
  // Message of a Receive. `sent`: the end of every message that was sent at once.
  void set_messenger(nanobind::object messenger, nanobind::object failed, nanobind::object receives,
                     nanobind::object sent);

  // `resized(call, shape)` returns what `Engine.prepare` of Python returns for the call on an array
  // of this shape.
  void set_resized(nanobind::object resized) { resized_ = std::move(resized); }

  // For Python's garbage collector, because the calls refer back to the engine that owns this
  // object.
  int visit(visitproc visit, void* arg) const;
  void clear();

  // Return the number and the object of the last call that C++ ran without Python, for the answer
  // to another rank's question.
  nanobind::object last() const;

  // Wake the waiting ranks, because a call has begun; see Runner::wake_waiters().
  void wake_waiters() const {
    if (runner_.is_valid()) nanobind::inst_ptr<Runner>(runner_)->wake_waiters();
  }
  // Send or receive. Returns the result of the public function, or no object if Python must handle
  // it. `packed` has the copy if the array of the message is one. `group`: the group's object.
  nanobind::object run_message(const Message& message, const Argument& packed,
                               nanobind::handle group) const;
  // Whether C++ may run calls of this thread.
  bool accepts() const {
    return !closed_ && suspended == 0 && !is_busy() && !fork_guard_.is_forked();
  }
  // Return the place of a call; nullptr: it is unknown, or Python must run it now.
  const CachedCall* find(const Key& key) const;
  // Keep what `Engine.prepare` of Python has returned for calls of this key.
  void keep(const Key& key, nanobind::handle op, nanobind::handle algorithm,
            nanobind::handle found);
  // Have Python make the prepared call for another shape, and keep it. `like`: a call that differs
  // in the shape only. nullptr: Python must run the call.
  const CachedCall* find_resized(const Key& key, const CachedCall& like, nanobind::handle array);
  // Run a call on this thread if the group's turn is free. False: Python must run the call.
  // `timeout_s` below 0: that of the group.
  bool run_now(const CachedCall& what, Arrays& arrays, double timeout_s);
  // Queue a call. Returns its Work; no object: Python must make the call.
  nanobind::object queue(const CachedCall& what, Arrays& arrays);
  // Wait for the end of a queued call. False: it has not ended well, or Python must wait.
  bool wait_well(QueuedCall& call) const;
  // Run a prepared call on this thread, which has the turn. `seq`: its number.
  Status run(const Prepared& what, const Arrays& arrays, int64_t timeout_ns, uint64_t seq);

 private:
  // Marks its thread as being in a call, during its lifetime.
  class Inside {
   public:
    Inside(Calls& calls, unsigned long thread) : calls_(calls), before_(calls.caller_) {
      calls_.caller_ = thread;
    }
    ~Inside() { calls_.caller_ = before_; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    Calls& calls_;
    const unsigned long before_;
  };
  // Whether another thread is in a call, which Python rejects with an error.
  bool is_busy() const;
  [[gnu::noinline]] uint64_t begin_record(const Prepared& prepared, uint64_t seq);
  [[gnu::noinline]] void end_record(uint64_t record);
  void continue_in_python(const nanobind::object& call, uint64_t record, Status status,
                          const Arrays& arrays, double timeout_s);

  nanobind::object queue_ref_;
  CallQueue* queue_;
  nanobind::object continues_, resized_;
  // See open_queue(). Not valid: Python queues calls.
  nanobind::object engine_, queued_, discards_, is_locked_;
  SlottedType<4> queued_type_;  // of native, engine, prepared and watcher
  int kept_ = 0;                // calls and bytes since the last discards_()
  int64_t kept_bytes_ = 0;
  bool closed_ = false;
  unsigned long caller_ = 0;
  const ForkGuard fork_guard_;
  double timeout_s_ = 0;
  int64_t timeout_ns_ = 0;
  nanobind::object messenger_ref_;
  Messenger* messenger_ = nullptr;
  nanobind::object message_failed_, receives_, sent_;
  nanobind::object recorder_ref_;
  Recorder* recorder_ = nullptr;  // nullptr: calls are not recorded
  nanobind::object runner_;       // of the last call that was kept
  uint64_t last_seq_ = 0;
  nanobind::object last_call_;
  std::vector<char> scratch_;  // of the call that has the turn
  // Two places for each hash, because two calls of a loop must not displace each other.
  std::array<std::array<std::unique_ptr<CachedCall>, 2>, 128> table_;
};

}  // namespace unisono
