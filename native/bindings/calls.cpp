#include "bindings/calls.hpp"

#include "bindings/flight.hpp"
#include "bindings/waits.hpp"

#include <nanobind/stl/unique_ptr.h>

#include <cstring>
#include <memory>
#include <new>
#include <utility>

namespace nb = nanobind;

namespace unisono {

int suspended = 0;

namespace {

// Above this many bytes a call releases the interpreter lock at once, because other threads would
// wait too long for it. Below, a call releases the lock only if it waits.
constexpr int64_t kHoldBytes = 16 * 1024;

// Releases the interpreter lock when a run waits; the destructor acquires the lock again.
class Unlocker final : public Idler {
 public:
  ~Unlocker() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  void idle() override {
    if (state_ == nullptr) state_ = PyEval_SaveThread();
  }

 private:
  PyThreadState* state_ = nullptr;
};

// Gives the turn back in its destructor.
class TakenTurn {
 public:
  explicit TakenTurn(Turn& turn) : turn_(turn) {}
  ~TakenTurn() { turn_.give(); }
  TakenTurn(const TakenTurn&) = delete;
  TakenTurn& operator=(const TakenTurn&) = delete;

 private:
  Turn& turn_;
};

}  // namespace

bool Key::operator==(const Key& other) const {
  return count == other.count && std::memcmp(words.data(), other.words.data(),
                                             sizeof(int64_t) * static_cast<size_t>(count)) == 0;
}

size_t Key::hash() const {
  uint64_t hash = 0;
  for (int i = 0; i < count; ++i) {
    hash = (hash ^ static_cast<uint64_t>(words[static_cast<size_t>(i)])) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
  }
  return static_cast<size_t>(hash);
}

Calls::Calls(nb::object turn, nb::object failed, nb::object begun)
    : turn_ref_(std::move(turn)),
      turn_(nb::cast<Turn*>(turn_ref_)),
      failed_(std::move(failed)),
      begun_(std::move(begun)) {}

void Calls::set_timeout(double timeout_s) {
  timeout_s_ = timeout_s;
  timeout_ns_ = nanoseconds(timeout_s);
}

void Calls::set_messenger(nb::handle_t<Messenger> messenger, nb::object failed) {
  messenger_ref_ = nb::borrow(messenger);
  messenger_ = nb::cast<Messenger*>(messenger);
  message_failed_ = std::move(failed);
}

Job job_of(const CallSpec& spec, const Span& input, const Span& output,
           std::vector<char>& scratch) {
  const int64_t itemsize = spec.itemsize;
  const auto parts = [itemsize](const Span& span) -> ArrayList {
    if (span.parts.empty()) return {};
    return {span.parts.data(), span.nbytes / itemsize / static_cast<int64_t>(span.parts.size())};
  };
  return {
    spec.runner,
    spec.program->view(),
    {input.data, input.nbytes / itemsize, output.data, output.nbytes / itemsize, output.is_readonly,
     scratch.data(), spec.program->scratch_count, itemsize, parts(input), parts(output)},
    reduce_fn(static_cast<DType>(spec.dtype), static_cast<RedOp>(spec.op)),
    {spec.fingerprint, spec.even}};
}

nb::object Argument::owner() const {
  if (listed.empty()) return array == nullptr ? nb::none() : nb::borrow(array);
  nb::list arrays;
  for (const nb::object& each : listed) arrays.append(each);
  return arrays;
}

int Recipe::visit(visitproc visit, void* arg) const {
  for (const nb::object* each : {&runner, &program, &call}) Py_VISIT(each->ptr());
  return 0;
}

void Calls::note(Recipe recipe, const Span& input, const Span& output) {
  noted_ =
    std::make_unique<Note>(Note{std::move(recipe), input, output, PyThread_get_thread_ident()});
}

int Calls::visit(visitproc visit, void* arg) const {
  for (const nb::object* each :
       {&turn_ref_, &failed_, &begun_, &last_call_, &runner_, &messenger_ref_, &message_failed_}) {
    Py_VISIT(each->ptr());
  }
  for (const auto& what : table_) {
    if (what == nullptr) continue;
    Py_VISIT(what->op.ptr());
    if (const int stop = what->recipe.visit(visit, arg)) return stop;
  }
  if (noted_ != nullptr) return noted_->recipe.visit(visit, arg);
  return 0;
}

void Calls::clear() {
  close();
  noted_.reset();
  for (auto& what : table_) what.reset();
  last_seq_ = 0;
  last_call_.reset();
  runner_.reset();
  messenger_ref_.reset();
  messenger_ = nullptr;
  message_failed_.reset();
  failed_.reset();
  begun_.reset();
}

nb::object Calls::last() const {
  if (last_seq_ == 0) return nb::none();
  return nb::make_tuple(last_seq_, last_call_);
}

nb::object Calls::run_message(const Message& message) const {
  if (closed_ || messenger_ == nullptr) return {};
  const nb::object peer = message.peer == nullptr ? nb::none() : nb::borrow(message.peer);
  const nb::object tag = message.tag == nullptr ? nb::int_(0) : nb::borrow(message.tag);
  const nb::object result = message.is_sent
                              ? messenger_->send(message.array, peer, tag, timeout_s_)
                              : messenger_->recv(message.array, peer, tag, timeout_s_);
  if (result.is_none()) return {};
  if (!nb::isinstance<nb::tuple>(result)) return message.is_sent ? nb::none() : result;
  const nb::object error = message_failed_(message.is_sent ? "send" : "recv", result,
                                           nb::borrow(message.array), peer, tag, timeout_s_);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

CachedCall* Calls::find(const Key& key) const {
  if (closed_ || suspended > 0 || fork_guard_.is_forked()) return nullptr;
  const auto& place = table_[key.hash() % table_.size()];
  if (place == nullptr || !(place->key == key)) return nullptr;
  return place->recipe.spec.runner->is_aborted() ? nullptr : place.get();
}

void Calls::remember(const Key& key, nb::handle op, nb::handle algorithm, const Arrays& arrays,
                     bool is_async) {
  // Another thread may have made a different call in the meantime. The key stands only for a call
  // that ran on this thread and on this memory. A signal handler may run inside a call whose table
  // entry would be replaced, so a call in a handler is not remembered.
  if (noted_ == nullptr || noted_->thread != PyThread_get_thread_ident() || caller_ != 0 ||
      !(is_async || turn_->is_free()) ||
      !(noted_->input == arrays.input.span && noted_->output == arrays.output.span)) {
    return;
  }
  auto what = std::make_unique<CachedCall>();
  what->key = key;
  what->recipe = std::move(noted_->recipe);
  what->op = nb::borrow(op);
  what->algorithm = nb::borrow(algorithm);
  runner_ = what->recipe.runner;
  noted_.reset();
  try {
    what->scratch.resize(scratch_bytes(what->recipe.spec));
  } catch (const std::bad_alloc&) {
    return;  // Python frees its own scratch memory after each call
  }
  table_[key.hash() % table_.size()] = std::move(what);
}

// Marks its thread as being in a call, during its lifetime.
class Calls::Inside {
 public:
  explicit Inside(Calls& calls) : calls_(calls), before_(calls.caller_) {
    calls_.caller_ = PyThread_get_thread_ident();
  }
  ~Inside() { calls_.caller_ = before_; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  Calls& calls_;
  const unsigned long before_;
};

bool Calls::is_busy() const { return caller_ != 0 && caller_ != PyThread_get_thread_ident(); }

bool Calls::run(CachedCall& what, const Arrays& arrays) {
  if (is_busy()) return false;
  const uint64_t seq = turn_->take();
  if (seq == 0) return false;
  const TakenTurn taken(*turn_);
  const Inside inside(*this);
  last_seq_ = seq;
  const Recipe& recipe = what.recipe;
  if (!last_call_.is(recipe.call)) last_call_ = recipe.call;
  const Span &input = arrays.input.span, &output = arrays.output.span;
  const Job job = job_of(recipe.spec, input, output, what.scratch);
  Status status;
  {
    Unlocker unlocker;
    if (input.nbytes + output.nbytes > kHoldBytes) unlocker.idle();
    status =
      job.runner->run(job.program, job.buffers, job.reduce, job.words, timeout_ns_, &unlocker);
  }
  if (!status.is_ok()) end(recipe, seq, status, arrays);
  return true;
}

nb::object Calls::start(const CachedCall& what, Arrays&& arrays) {
  if (is_busy()) return {};
  const Inside inside(*this);
  nb::tuple owners = nb::make_tuple(arrays.input.owner(), arrays.output.owner());
  auto flight = std::make_unique<Flight>(what.recipe, std::move(arrays), timeout_ns_);
  return begun_(nb::cast(std::move(flight)), what.recipe.call, owners);
}

// Pass a failed call to Python, which cleans up and mostly raises.
void Calls::end(const Recipe& recipe, uint64_t seq, Status status, const Arrays& arrays) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);  // of a signal handler that ended the wait
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace != nullptr) PyException_SetTraceback(value, trace);
  nb::object raised = nb::steal(value);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  failed_(recipe.call, seq, nb::make_tuple(static_cast<int>(status.code), status.peer),
          raised.is_valid() ? raised : nb::none(),
          nb::make_tuple(arrays.input.owner(), arrays.output.owner()));
}

}  // namespace unisono
