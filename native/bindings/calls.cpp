#include "bindings/calls.hpp"

#include "bindings/arguments.hpp"
#include "bindings/sites.hpp"
#include "bindings/waits.hpp"

#include <cstring>
#include <memory>
#include <new>
#include <utility>

namespace nb = nanobind;

namespace unisono {

int suspended = 0;

namespace {

// Gives the turn back in its destructor.
class TakenTurn {
 public:
  explicit TakenTurn(CallQueue& queue) : queue_(queue) {}
  ~TakenTurn() { queue_.give(); }
  TakenTurn(const TakenTurn&) = delete;
  TakenTurn& operator=(const TakenTurn&) = delete;

 private:
  CallQueue& queue_;
};

}  // namespace

bool Key::operator==(const Key& other) const {
  return count == other.count && std::memcmp(words.data(), other.words.data(),
                                             sizeof(int64_t) * static_cast<size_t>(count)) == 0;
}

Key Key::without_shape() const {
  Key key;
  const auto dimensions = static_cast<int>(words[2]);
  for (int i = 0; i < count; ++i) {
    if (i < 2 || i > 2 + dimensions) key.add(words[static_cast<size_t>(i)]);
    if (i == 2) key.add(-1);  // no array has -1 dimensions
  }
  return key;
}

size_t Key::hash() const {
  uint64_t hash = 0;
  for (int i = 0; i < count; ++i) {
    hash = (hash ^ static_cast<uint64_t>(words[static_cast<size_t>(i)])) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
  }
  return static_cast<size_t>(hash);
}

Calls::Calls(nb::object queue, nb::object continues)
    : queue_ref_(std::move(queue)),
      queue_(nb::cast<CallQueue*>(queue_ref_)),
      continues_(std::move(continues)) {}

void Calls::set_recorder(nb::handle_t<Recorder> recorder) {
  recorder_ref_ = nb::borrow(recorder);
  recorder_ = nb::inst_ptr<Recorder>(recorder);
}

void Calls::set_timeout(double timeout_s) {
  timeout_s_ = timeout_s;
  timeout_ns_ = nanoseconds(timeout_s);
}

void Calls::set_messenger(nb::object messenger, nb::object failed, nb::object receives,
                          nb::object sent) {
  messenger_ = nb::cast<Messenger*>(messenger);
  messenger_ref_ = std::move(messenger);
  message_failed_ = std::move(failed);
  receives_ = std::move(receives);
  sent_ = std::move(sent);
}

int Calls::visit(visitproc visit, void* arg) const {
  for (const nb::object* each :
       {&queue_ref_, &continues_, &resized_, &engine_, &queued_type_.type(), &queued_, &discards_,
        &is_locked_, &last_call_, &runner_, &messenger_ref_, &message_failed_, &receives_, &sent_,
        &recorder_ref_}) {
    Py_VISIT(each->ptr());
  }
  for (const auto& places : table_) {
    for (const auto& what : places) {
      if (what == nullptr) continue;
      Py_VISIT(what->op.ptr());
      Py_VISIT(what->call.ptr());
      Py_VISIT(what->native.ptr());
    }
  }
  return 0;
}

void Calls::clear() {
  close();
  for (auto& places : table_) places = {};
  last_seq_ = 0;
  last_call_.reset();
  runner_.reset();
  messenger_ref_.reset();
  messenger_ = nullptr;
  for (nb::object* each : {&continues_, &resized_, &message_failed_, &receives_, &sent_, &queued_,
                           &engine_, &queued_type_.type(), &discards_, &is_locked_}) {
    each->reset();
  }
}

nb::object Calls::last() const {
  if (last_seq_ == 0) return nb::none();
  return nb::make_tuple(last_seq_, last_call_);
}

nb::object Calls::run_message(const Message& message, const Argument& packed,
                              nb::handle group) const {
  if (closed_ || messenger_ == nullptr) return {};
  const nb::object peer = message.peer == nullptr ? nb::none() : nb::borrow(message.peer);
  const nb::object tag = message.tag == nullptr ? nb::int_(0) : nb::borrow(message.tag);
  const double limit_s = message.timeout_s < 0 ? timeout_s_ : message.timeout_s;
  // The elements after a shorter message keep their values.
  if (message.is_sent || message.is_partial) packed.fill();
  if (message.is_started) {
    static PyObject* const names[] = {PyUnicode_InternFromString("send"),
                                      PyUnicode_InternFromString("recv")};
    const nb::object array = nb::borrow(message.array), owner = nb::borrow(message.owner);
    // A collection of garbage below may destroy the group.
    const nb::object kept = nb::borrow(group), sent = sent_;
    if (message.is_sent) {
      if (!messenger_->try_send(array, peer, tag)) return {};
      return global.works->make({sent, names[0], nb::none(), owner});
    }
    const nb::object end = messenger_->start_recv(array, owner, peer, tag, limit_s, receives_);
    if (end.is_none()) return {};
    return global.works->make({end, names[1], kept, owner});
  }
  const nb::object result =
    message.is_sent ? messenger_->send(message.array, peer, tag, limit_s)
                    : messenger_->recv(message.array, peer, tag, limit_s, message.is_partial);
  if (result.is_none()) return {};
  if (!nb::isinstance<nb::tuple>(result)) {
    if (!message.is_sent) packed.write_back();
    return message.is_sent ? nb::none() : result;
  }
  const nb::object error = message_failed_(message.is_sent ? "send" : "recv", result,
                                           nb::borrow(message.array), peer, tag, limit_s);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

const CachedCall* Calls::find(const Key& key) const {
  for (const auto& place : table_[key.hash() % table_.size()]) {
    if (place == nullptr || !(place->key == key)) continue;
    const Prepared* const prepared = place->prepared;
    return !accepts() || (prepared != nullptr && prepared->is_aborted()) ? nullptr : place.get();
  }
  return nullptr;
}

void Calls::keep(const Key& key, nb::handle op, nb::handle algorithm, nb::handle found) {
  if (found.is_none()) return;
  auto what = std::make_unique<CachedCall>();
  what->key = key;
  what->op = nb::borrow(op);
  what->algorithm = nb::borrow(algorithm);
  if (found.ptr() != Py_False) {
    what->call = nb::borrow(found);
    what->native = found.attr("native");
    what->name = found.attr("call").attr("op");
    what->prepared = nb::cast<const Prepared*>(what->native);
    runner_ = what->prepared->runner();
  }
  auto& [last, before] = table_[key.hash() % table_.size()];
  if (last != nullptr && !(last->key == key)) std::swap(last, before);
  last.swap(what);
}

const CachedCall* Calls::find_resized(const Key& key, const CachedCall& like, nb::handle array) {
  if (like.prepared == nullptr || !resized_.is_valid()) return nullptr;
  const Inside inside(*this, PyThread_get_thread_ident());
  const nb::object resized = resized_, op = like.op, algorithm = like.algorithm;
  try {
    // A tensor has a shape of its own type, whose text would differ from that of an array.
    const nb::object shape = nb::steal(PySequence_Tuple(nb::object(array.attr("shape")).ptr()));
    if (!shape.is_valid()) throw nb::python_error();
    keep(key, op, algorithm, resized(like.call, shape));
  } catch (nb::python_error& error) {
    // Python fails in the same way, and refuses the call on all ranks. Ctrl-C is raised there.
    if (!error.matches(PyExc_Exception)) callback_raised(error, "a call of a new shape");
    return nullptr;
  }
  return find(key);
}

bool Calls::is_busy() const { return caller_ != 0 && caller_ != PyThread_get_thread_ident(); }

// Apart from run_now(), because a longer function is slower also for calls without records.
uint64_t Calls::begin_record(const Prepared& prepared, uint64_t seq) {
  return recorder_->begin_soon(prepared.recorded(), seq, &caller_site);
}

void Calls::end_record(uint64_t record) {
  recorder_->write_now();
  recorder_->end(record, Code::ok);
}

bool Calls::run_now(const CachedCall& what, Arrays& arrays, double timeout_s) {
  if (!what.prepared->make_copies(&arrays)) return false;
  const uintptr_t thread = CallQueue::this_thread();
  const uint64_t seq = queue_->take(thread);
  if (seq == 0) return false;
  const TakenTurn taken(*queue_);
  const Inside inside(*this, thread);
  const Prepared& prepared = *what.prepared;
  const bool keeps = prepared.keeps_output();
  // It keeps the call alive: a signal handler may make other calls, and one may take its place in
  // the cache. None of them runs here before this call has ended.
  last_seq_ = seq;
  if (!last_call_.is(what.call)) last_call_ = what.call;
  const uint64_t record = recorder_ == nullptr ? 0 : begin_record(prepared, seq);
  const int64_t limit_ns = timeout_s < 0 ? timeout_ns_ : nanoseconds(timeout_s);
  const Status status = run(prepared, arrays, limit_ns, seq);
  if (!status.is_ok()) {
    if (recorder_ != nullptr) recorder_->write_now();
    continue_in_python(nb::object(last_call_), record, status, arrays,
                       timeout_s < 0 ? timeout_s_ : timeout_s);
    if (!keeps) arrays.output.write_back();
  } else if (recorder_ != nullptr) {
    end_record(record);
  }
  return true;
}

Status Calls::run(const Prepared& what, const Arrays& arrays, int64_t timeout_ns, uint64_t seq) {
  if (const size_t needed = what.scratch_bytes(); scratch_.size() < needed) {
    try {
      scratch_ = {};
      scratch_.resize(needed);
    } catch (const std::bad_alloc&) {
      return {Code::no_memory};
    }
  }
  const Task task = what.task(arrays, scratch_.data());
  Status status;
  {
    Unlocker unlocker(recorder_);
    if (arrays.input.nbytes + arrays.output.nbytes > kHoldBytes) unlocker.idle();
    arrays.input.fill(task.runner);
    arrays.output.fill(task.runner);
    status = task.runner->run(task.program, task.buffers, task.reduce, task.words.of_call(seq),
                              timeout_ns, &unlocker);
    if (status.is_ok()) {
      task.finish();
      if (!what.keeps_output()) arrays.output.write_back(task.runner);
    }
  }
  // Here, because Python would run the handlers before the first line of code that can handle an
  // exception of theirs.
  if (status.code == Code::waiting && PyErr_CheckSignals() != 0) status = {Code::interrupted};
  if (status.is_ok() && !task.program.is_checked) what.remember_checked(task.buffers);
  return status;
}

// Pass a call whose program did not end well to Python, which mostly raises.
void Calls::continue_in_python(const nb::object& call, uint64_t record, Status status,
                               const Arrays& arrays, double timeout_s) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);  // of a signal handler that ended the wait
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace != nullptr) PyException_SetTraceback(value, trace);
  nb::object raised = nb::steal(value);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  continues_(call, nb::make_tuple(last_seq_, record),
             nb::make_tuple(static_cast<int>(status.code), status.peer),
             raised.is_valid() ? raised : nb::none(),
             nb::make_tuple(arrays.input.memory(), arrays.output.memory()), timeout_s);
}

}  // namespace unisono
