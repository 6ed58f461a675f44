// The messages between two ranks, for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arguments.hpp"
#include "bindings/bindings.hpp"
#include "bindings/calls.hpp"
#include "bindings/message_records.hpp"
#include "bindings/outcomes.hpp"
#include "bindings/receive.hpp"
#include "bindings/tls.hpp"
#include "bindings/view.hpp"
#include "bindings/waits.hpp"
#include "messages/messages.hpp"

namespace nb = nanobind;
using unisono::Bytes;
using unisono::Code;
using unisono::Envelope;
using unisono::Outcome;
using unisono::Receive;
using unisono::Messages;
using unisono::nanoseconds;
using unisono::OutcomeTuple;
using unisono::to_tuple;
using unisono::unlocked;
using unisono::View;

namespace {

// Up to this size, releasing the interpreter lock costs as much as the copy of a message.
constexpr uint64_t kSmallBytes = 16 * 1024;

unisono::Ranks shared_ranks(std::vector<int> ranks) {
  return std::make_shared<const std::vector<int>>(std::move(ranks));
}

std::shared_ptr<Messages> make_messages(int rank, int ranks) {
  auto messages = std::make_shared<Messages>(rank, ranks);
  messages->callbacks().poll = &unisono::signal_raised;
  return messages;
}

int create(Messages& messages, const nb::bytes& nonce, int node) {
  if (nonce.size() != sizeof(unisono::Address::nonce)) throw nb::value_error("nonce: 16 bytes");
  return messages.create(static_cast<const unsigned char*>(nonce.data()), node);
}

void introduce(Messages& messages, const std::vector<std::tuple<int, int, nb::bytes, int>>& all,
               bool crowded, bool far) {
  std::vector<unisono::Address> addresses(all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    const auto& [pid, fd, nonce, channels] = all[i];
    addresses[i].channels = channels;
    addresses[i].pid = pid;
    addresses[i].fd = fd;
    std::memcpy(addresses[i].nonce, nonce.data(),
                std::min(nonce.size(), sizeof(addresses[i].nonce)));
  }
  messages.introduce(std::move(addresses), crowded, far);
}

OutcomeTuple start_send(Messages& messages, int to, uint64_t context, int64_t tag, uint32_t info,
                        nb::handle data) {
  const Bytes bytes(data, PyBUF_SIMPLE);
  const Envelope envelope{context, tag, bytes.nbytes(), info};
  return to_tuple(unlocked([&] { return messages.start_send(to, envelope, bytes.data()); }));
}

OutcomeTuple start_recv(Messages& messages, int from, uint64_t context, int64_t tag, uint32_t info,
                        nb::handle into, std::vector<int> among, int takes) {
  const Bytes bytes(into, PyBUF_WRITABLE);
  const Envelope envelope{context, tag, bytes.nbytes(), info};
  const unisono::Ranks ranks = shared_ranks(std::move(among));
  const auto take = static_cast<unisono::Take>(takes);
  return to_tuple(
    unlocked([&] { return messages.start_recv(from, envelope, bytes.data(), ranks, take); }));
}

// Outcomes are appended to a list, because a returned object is lost if a signal handler raises at
// that moment.
using Outcomes = nb::typed<nb::list, OutcomeTuple>;

int note(Outcome outcome, Outcomes& outcomes) {
  const Code code = outcome.code;
  const OutcomeTuple its = to_tuple(std::move(outcome));
  if (code != Code::unknown && code != Code::timeout) outcomes.append(its);
  return static_cast<int>(code);
}

int wait(Messages& messages, uint64_t number, double timeout_s, Outcomes outcomes) {
  const auto wait = [&] { return messages.wait(number, nanoseconds(timeout_s)); };
  return note(unlocked(wait), outcomes);
}

int cancel(Messages& messages, uint64_t number, Outcomes outcomes) {
  return note(unlocked([&] { return messages.cancel(number); }), outcomes);
}

uint64_t number_of(Messages& messages, nb::handle into, uint64_t after) {
  const Bytes bytes(into, PyBUF_SIMPLE);
  unisono::InterpreterUnlock unlocked;
  return messages.number_of(bytes.data(), after);
}

std::vector<OutcomeTuple> serve(Messages& messages) {
  std::vector<Outcome> outcomes;
  {
    unisono::InterpreterUnlock unlocked;
    outcomes = messages.serve();
  }
  std::vector<OutcomeTuple> all;
  all.reserve(outcomes.size());
  for (Outcome& outcome : outcomes) all.push_back(to_tuple(std::move(outcome)));
  return all;
}

bool peer_down(Messages& messages, int peer, bool left) {
  return messages.peer_down(peer, left ? Code::left : Code::lost);
}

std::vector<int> end_all(Messages& messages, double timeout_s) {
  return messages.close(nanoseconds(timeout_s));
}

// Return a function that calls one of Python; `where`: for the log.
template <class... Given>
std::function<void(Given...)> in_python(std::function<void(Given...)> function, const char* where) {
  return [function = std::move(function), where](const Given&... given) {
    unisono::InterpreterLock locked;
    try {
      function(given...);
    } catch (nb::python_error& error) {
      unisono::callback_raised(error, where);
    }
  };
}

void set_stuck(Messages& messages, std::function<void(std::vector<int>, bool, uint64_t)> stuck) {
  messages.callbacks().stuck = in_python(std::move(stuck), "a wait for a message");
}

void add_wire(Messages& messages, int peer, int channel, int fd, const unisono::TlsHandle* tls) {
  messages.add_wire(peer, channel, fd, tls == nullptr ? nullptr : tls->session);
}

void set_wire(Messages& messages, std::function<void(int, int, int)> wire) {
  messages.callbacks().wire = in_python(std::move(wire), "a wire to another rank");
}

// Sends and receives plain messages of one group. If Python must, the result is None.
class Port final : public unisono::Messenger {
 public:
  // `type`: the type of the arrays that are handled here. `words`: from the buffer format of a
  // dtype to the word in a message's `info`. `open`: see Receive.
  Port(std::shared_ptr<Messages> messages, uint64_t context, std::vector<int> ranks,
       nb::handle type, const std::map<std::string, uint32_t>& words, nb::object open)
      : messages_(std::move(messages)),
        context_(context),
        ranks_(shared_ranks(std::move(ranks))),
        type_(type.ptr()),
        records_(ranks_),
        open_(std::move(open)) {
    for (const auto& [format, word] : words) formats_.of(format.c_str()).word = word;
  }

  // Returns True if the message was sent, and what `Messages.wait` returns if not.
  nb::object send(nb::handle array, nb::handle to, nb::handle tag, double timeout_s) override {
    Plain plain;
    if (!understand_send(array, to, tag, &plain)) return nb::none();
    const uint64_t record = begin_record(plain, plain.kinds.first);
    if (sends_at_once(plain)) {
      records_.end(record, Code::ok, plain.peer);
      return nb::bool_(true);
    }
    Outcome outcome = unlocked([&] {
      return messages_->send(plain.peer, plain.envelope, plain.data(), nanoseconds(timeout_s));
    });
    records_.end(record, outcome.code, plain.peer);
    return outcome.code == Code::ok ? nb::bool_(true) : nb::cast(to_tuple(std::move(outcome)));
  }

  // Returns the source or the count (`partial`), and what `Messages.wait` returns if none came.
  nb::object recv(nb::handle array, nb::handle from, nb::handle tag, double timeout_s,
                  bool partial) override {
    Plain plain;
    if (!parse_arguments(array, from, tag, PyBUF_WRITABLE, &plain)) return nb::none();
    if (partial) plain.envelope.info |= unisono::kPartial;
    const uint64_t record = begin_record(plain, plain.kinds.second);
    Outcome outcome = unlocked([&] {
      return messages_->recv(plain.peer, plain.envelope, plain.data(), ranks_,
                             nanoseconds(timeout_s));
    });
    records_.end(record, outcome.code, outcome.code == Code::ok ? outcome.source : plain.peer);
    if (outcome.code != Code::ok) return nb::cast(to_tuple(std::move(outcome)));
    return partial ? nb::int_(outcome.nbytes / plain.view->itemsize()) : nb::int_(outcome.source);
  }

  // Send a message only if that needs no waiting. Returns whether it was sent.
  bool try_send(nb::handle array, nb::handle to, nb::handle tag) override {
    Plain plain;
    if (!understand_send(array, to, tag, &plain)) return false;
    const uint64_t record = begin_record(plain, plain.kinds.first);
    const bool is_sent = sends_at_once(plain);
    if (is_sent) {
      records_.end(record, Code::ok, plain.peer);
    } else {
      records_.drop(record, plain.peer);
    }
    return is_sent;
  }

  // `kinds`: the kinds of the records of a send and a receive, by the buffer format of the dtype.
  void set_recorder(unisono::Recorder* recorder,
                    const std::map<std::string, std::pair<uint32_t, uint32_t>>& kinds) {
    records_.set_recorder(recorder);
    for (const auto& [format, both] : kinds) formats_.of(format.c_str()).kinds = both;
  }

  // Returns a Receive.
  nb::object start_recv(nb::handle array, nb::handle owner, nb::handle from, nb::handle tag,
                        double timeout_s, const nb::object& makes) override {
    Plain plain;
    if (!parse_arguments(array, from, tag, PyBUF_WRITABLE, &plain)) return nb::none();
    const nb::object made = nb::inst_alloc(nb::type<Receive>());
    Receive& receive = *new (nb::inst_ptr<Receive>(made)) Receive(
      messages_, records_, open_, makes, nb::borrow(array), nb::borrow(owner));
    nb::inst_mark_ready(made);
    receive.peer = nb::borrow(from);
    receive.tag = nb::borrow(tag);
    receive.timeout_s = timeout_s;
    receive.deadline_ns = unisono::now_ns() + nanoseconds(timeout_s);
    receive.record = begin_record(plain, plain.kinds.second);
    Outcome outcome;
    {
      std::optional<unisono::InterpreterUnlock> unlocked;
      if (plain.envelope.nbytes > kSmallBytes) unlocked.emplace();
      outcome = messages_->start_recv(plain.peer, plain.envelope, plain.data(), ranks_);
    }
    receive.begin(std::move(outcome), made);
    return made;
  }

 private:
  struct Plain {
    int peer = -1;
    Envelope envelope{};
    std::optional<View> view;
    std::pair<uint32_t, uint32_t> kinds;
    char* data() const { return view->data(); }
  };

  uint64_t begin_record(const Plain& plain, uint32_t kind) {
    const auto count = static_cast<int64_t>(plain.view->count());
    return records_.begin(kind, plain.envelope.tag, count, plain.peer);
  }

  bool sends_at_once(const Plain& plain) {
    std::optional<unisono::InterpreterUnlock> unlocked;
    if (plain.envelope.nbytes > kSmallBytes) unlocked.emplace();
    return messages_->try_send(plain.peer, plain.envelope, plain.data());
  }

  bool understand_send(nb::handle array, nb::handle to, nb::handle tag, Plain* plain) {
    return parse_arguments(array, to, tag, PyBUF_SIMPLE, plain) && plain->peer >= 0 &&
           plain->peer != messages_->rank();
  }

  bool parse_arguments(nb::handle array, nb::handle rank, nb::handle tag, int flags, Plain* plain) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(array.ptr())) != type_) return false;
    if (unisono::suspended != 0 || messages_->is_forked()) return false;
    if (!PyLong_CheckExact(tag.ptr())) return false;
    if (!rank.is_none() && !is_member(rank, &plain->peer)) return false;
    const int64_t number = PyLong_AsLongLong(tag.ptr());
    if (flags == PyBUF_SIMPLE && plain->peer >= 0) messages_->wake_waiters(plain->peer);
    const int wanted = flags | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT;
    if (number < 0 || !plain->view.emplace(array, wanted).is_held()) {
      PyErr_Clear();
      return false;
    }
    const unisono::Format& format = formats_.of(plain->view->format());
    plain->envelope = {context_, number, plain->view->nbytes(), format.word};
    plain->kinds = format.kinds;
    return plain->envelope.info != 0;
  }

  bool is_member(nb::handle rank, int* peer) const {
    if (!PyLong_CheckExact(rank.ptr())) return false;
    const long number = PyLong_AsLong(rank.ptr());
    if (number == -1) PyErr_Clear();
    *peer = static_cast<int>(number);
    return number >= 0 && std::find(ranks_->begin(), ranks_->end(), number) != ranks_->end();
  }

  std::shared_ptr<Messages> messages_;
  uint64_t context_;
  unisono::Ranks ranks_;
  PyObject* type_;  // borrowed: its module keeps it alive longer
  unisono::Formats formats_;
  unisono::MessageRecords records_;
  nb::object open_;
};

}  // namespace

void bind_p2p(nb::module_& m) {
  m.attr("CLOSED") = static_cast<int>(Code::closed);
  m.attr("CANCELLED") = static_cast<int>(Code::cancelled);
  m.attr("UNREACHABLE") = static_cast<int>(Code::unreachable);
  m.attr("UNKNOWN") = static_cast<int>(Code::unknown);

  nb::class_<Messages>(m, "Messages")
    .def(nb::new_(&make_messages), nb::arg("rank"), nb::arg("ranks"))
    .def("create", &create, nb::arg("nonce"), nb::arg("node"),
         "Make the inbox, on a NUMA node or -1; return its fd or -errno.")
    .def("introduce", &introduce, nb::arg("addresses"), nb::arg("crowded"), nb::arg("far"),
         "Set the addresses of inboxes: (pid, fd, nonce, channels); pid 0: none.")
    .def("has_left", &Messages::has_left, nb::arg("peer"))
    .def("set_stuck", &set_stuck, nb::arg("stuck"))
    .def("set_wire", &set_wire, nb::arg("wire"),
         "Set a function of (rank, channel, 0: make; 1: ended; 2: was changed).")
    .def("add_wire", &add_wire, nb::arg("peer"), nb::arg("channel"), nb::arg("fd"),
         nb::arg("tls").none() = nb::none(), "Take over a connected socket.",
         nb::call_guard<unisono::InterpreterUnlock>())
    .def("attend", &Messages::attend, nb::call_guard<unisono::InterpreterUnlock>())
    .def("hold", &Messages::hold, nb::call_guard<unisono::InterpreterUnlock>())
    .def("release", &Messages::release)
    .def("close_in_child", &Messages::close_in_child)
    .def("start_send", &start_send, nb::arg("to"), nb::arg("context"), nb::arg("tag"),
         nb::arg("info"), nb::arg("data"),
         "Return (number, code, source, nbytes, info, tag, message or None).")
    .def("start_recv", &start_recv, nb::arg("from_"), nb::arg("context"), nb::arg("tag"),
         nb::arg("info"), nb::arg("into"), nb::arg("among"), nb::arg("takes") = 0)
    .def("watch", nb::overload_cast<uint64_t>(&Messages::watch), nb::arg("number"),
         nb::call_guard<unisono::InterpreterUnlock>(), "Have serve() complete a receive.")
    .def("wait", &wait, nb::arg("number"), nb::arg("timeout_s"), nb::arg("outcomes"),
         "Return a code; append the outcome of what has ended.")
    .def("cancel", &cancel, nb::arg("number"), nb::arg("outcomes"), "As wait().")
    .def("has_receive", &Messages::has_receive, nb::arg("from_"), nb::arg("context"),
         nb::arg("tag"), "Whether a receive from this rank waits.")
    .def("number_of", &number_of, nb::arg("into"), nb::arg("after") = 0,
         "Return the last receive into this memory after that number; 0: none.")
    .def("last_number", &Messages::last_number, "Number of the last started operation.")
    .def("serve", &serve, "Return outcomes; nothing after close().")
    .def("peer_down", &peer_down, nb::arg("peer"), nb::arg("left"),
         nb::call_guard<unisono::InterpreterUnlock>())
    .def("fail_context", &Messages::fail_context, nb::arg("context"), nb::arg("after") = 0,
         nb::call_guard<unisono::InterpreterUnlock>())
    .def("forget_context", &Messages::forget_context, nb::arg("context"),
         nb::call_guard<unisono::InterpreterUnlock>())
    .def("close", &end_all, nb::arg("timeout_s"), "Return the sockets, to be read until they end.",
         nb::call_guard<unisono::InterpreterUnlock>());

  nb::class_<unisono::Messenger>(m, "Messenger");
  nb::class_<Port, unisono::Messenger>(m, "Port")
    .def(nb::init<std::shared_ptr<Messages>, uint64_t, std::vector<int>, nb::handle,
                  const std::map<std::string, uint32_t>&, nb::object>(),
         nb::arg("messages"), nb::arg("context"), nb::arg("ranks"), nb::arg("type"),
         nb::arg("words"), nb::arg("open"))
    .def("set_recorder", &Port::set_recorder, nb::arg("recorder"), nb::arg("kinds"),
         nb::keep_alive<1, 2>(), "Record messages from now on.");
  bind_receive(m);
}
