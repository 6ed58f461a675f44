#include "calls.hpp"

#include "flight.hpp"

#include <nanobind/stl/unique_ptr.h>

#include <cstring>
#include <memory>
#include <utility>

namespace nb = nanobind;

namespace unisono {

ProcessState process;

namespace {

// Above this a call copies for longer than other threads should wait for the interpreter lock.
constexpr int64_t kHoldBytes = 16 * 1024;

// Gives up the interpreter lock when a run waits; the destructor takes it back.
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

}  // namespace

int64_t nanoseconds(double seconds) {
  // Longer than a century is for ever, and does not fit.
  return seconds < 3e9 ? static_cast<int64_t>(seconds * 1e9) : int64_t{3'000'000'000'000'000'000};
}

bool Key::operator==(const Key& other) const {
  return count == other.count &&
         std::memcmp(words.data(), other.words.data(), sizeof(int64_t) * static_cast<size_t>(count)) == 0;
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
      begun_(std::move(begun)),
      forks_(process.forks) {}

void Calls::set_timeout(double timeout_s) { timeout_ns_ = nanoseconds(timeout_s); }

Buffers buffers_of(const Span& input, const Span& output, int64_t itemsize, std::vector<char>& scratch) {
  auto parts = [itemsize](const Span& span) -> Parts {
    if (span.parts.empty()) return {};
    return {span.parts.data(), span.nbytes / itemsize / static_cast<int64_t>(span.parts.size())};
  };
  return {input.data,    input.nbytes / itemsize,  output.data,
          output.nbytes / itemsize,  false,  scratch.data(),
          static_cast<int64_t>(scratch.size()) / itemsize, itemsize, parts(input), parts(output)};
}

nb::object Argument::owner() const {
  if (listed.empty()) return array == nullptr ? nb::none() : nb::borrow(array);
  nb::list arrays;
  for (const nb::object& each : listed) arrays.append(each);
  return arrays;
}

void Calls::note(nb::object runner, nb::object program, const Known& known, const Span& input,
                 const Span& output, nb::object call) {
  noted_ = std::make_unique<Note>();
  noted_->what.known = known;
  noted_->what.runner = std::move(runner);
  noted_->what.program = std::move(program);
  noted_->what.call = std::move(call);
  noted_->input = input;
  noted_->output = output;
  noted_->thread = PyThread_get_thread_ident();
}

int Calls::visit(visitproc visit, void* arg) const {
  for (const nb::object* each : {&turn_ref_, &failed_, &begun_, &last_call_}) {
    Py_VISIT(each->ptr());
  }
  for (const auto& what : table_) {
    if (what == nullptr) continue;
    Py_VISIT(what->runner.ptr());
    Py_VISIT(what->program.ptr());
    Py_VISIT(what->call.ptr());
    Py_VISIT(what->op.ptr());
  }
  if (noted_ != nullptr) {
    Py_VISIT(noted_->what.runner.ptr());
    Py_VISIT(noted_->what.program.ptr());
    Py_VISIT(noted_->what.call.ptr());
  }
  return 0;
}

void Calls::clear() {
  close();
  noted_.reset();
  for (auto& what : table_) what.reset();
  last_seq_ = 0;
  last_call_.reset();
  failed_.reset();
  begun_.reset();
}

nb::object Calls::last() const {
  if (last_seq_ == 0) return nb::none();
  return nb::make_tuple(last_seq_, last_call_);
}

Remembered* Calls::find(const Key& key) const {
  if (closed_ || process.suspended > 0 || forks_ != process.forks) return nullptr;
  const auto& place = table_[key.hash() % table_.size()];
  if (place == nullptr || !(place->key == key)) return nullptr;
  return place->known.runner->is_aborted() ? nullptr : place.get();
}

void Calls::remember(const Key& key, nb::handle op, const Arrays& arrays, bool is_async) {
  // Another thread may have called something else in the meantime: only what ran on this thread
  // and on this very memory is the call that the key stands for.
  if (noted_ == nullptr || noted_->thread != PyThread_get_thread_ident() ||
      !(is_async || turn_->is_free()) ||
      !(noted_->input == arrays.input.span && noted_->output == arrays.output.span)) {
    return;
  }
  auto what = std::make_unique<Remembered>(std::move(noted_->what));
  noted_.reset();
  what->key = key;
  what->op = nb::borrow(op);
  what->scratch.resize(static_cast<size_t>(what->known.program->scratch_count * what->known.itemsize));
  table_[key.hash() % table_.size()] = std::move(what);
}

bool Calls::run(Remembered& what, const Arrays& arrays, bool* failed) {
  const Span &input = arrays.input.span, &output = arrays.output.span;
  // Python refuses a call that overlaps one of another thread.
  const unsigned long thread = PyThread_get_thread_ident(), before = caller_;
  if (before != 0 && before != thread) return false;
  const uint64_t seq = turn_->take();
  if (seq == 0) return false;
  last_seq_ = seq;
  caller_ = thread;
  if (!last_call_.is(what.call)) last_call_ = what.call;
  const Known& known = what.known;
  const Buffers buffers = buffers_of(input, output, known.itemsize, what.scratch);
  const ReduceFn reduce =
    reduce_fn(static_cast<DType>(known.dtype), static_cast<RedOp>(known.op));
  Status status;
  {
    Unlocker unlocker;
    if (input.nbytes + output.nbytes > kHoldBytes) unlocker.idle();
    status = known.runner->run(known.program->view(), buffers, reduce,
                               {known.fingerprint, known.even}, timeout_ns_, &unlocker);
  }
  *failed = !status.is_ok() && !end(what, seq, status, arrays);
  caller_ = before;
  turn_->give();
  return true;
}

nb::object Calls::start(const Remembered& what, Arrays&& arrays) {
  const unsigned long thread = PyThread_get_thread_ident(), before = caller_;
  if (before != 0 && before != thread) return {};
  auto flight = std::make_unique<Flight>(what.runner, what.program, what.known, timeout_ns_);
  flight->arrays = std::move(arrays);
  const Argument &input = flight->arrays.input, &output = flight->arrays.output;
  for (const Argument* each : {&input, &output}) {
    if (each->array != nullptr) flight->owners.push_back(nb::borrow(each->array));
  }
  flight->work_on(input.span, output.span, false);
  nb::tuple owners = nb::make_tuple(input.owner(), output.owner());
  caller_ = thread;
  nb::object arguments;
  try {
    arguments = begun_(nb::cast(std::move(flight)), what.call, owners);
  } catch (nb::python_error& error) {
    error.restore();
  }
  caller_ = before;
  return arguments;
}

// Let Python do what remains; false: an error is set, as there mostly will be.
bool Calls::end(const Remembered& what, uint64_t seq, Status status, const Arrays& arrays) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);  // of a signal handler, if that ended the wait
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace != nullptr) PyException_SetTraceback(value, trace);
  nb::object raised = nb::steal(value);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  try {
    failed_(what.call, seq, nb::make_tuple(static_cast<int>(status.code), status.peer),
            raised.is_valid() ? raised : nb::none(),
            nb::make_tuple(arrays.input.owner(), arrays.output.owner()));
    return true;
  } catch (nb::python_error& error) {
    error.restore();
    return false;
  }
}

}  // namespace unisono
