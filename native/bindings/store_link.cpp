// The store's client, for Python: requests from Python values, Python values from replies.
#include <nanobind/nanobind.h>
#include <nanobind/stl/unique_ptr.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string_view>

#include "bindings/bindings.hpp"
#include "bindings/tls.hpp"
#include "bindings/waits.hpp"
#include "store/link.hpp"

namespace nb = nanobind;

namespace {

using unisono::store::Buffer;
using unisono::store::Cursor;
using unisono::store::Link;
using unisono::store::Opcode;

// Python's encoder, which is called next, detects the same fault and raises the exact error.
[[noreturn]] void refuse() {
  PyErr_SetString(PyExc_OverflowError, "beyond the limits of a request");
  throw nb::python_error();
}

void put_sized(Buffer& out, std::string_view bytes, uint64_t limit) {
  if (bytes.size() > limit) refuse();
  out.append_sized(bytes);
}

void put_key(Buffer& out, nb::handle key) {
  Py_ssize_t size;
  if (const char* text = PyUnicode_AsUTF8AndSize(key.ptr(), &size)) {
    put_sized(out, {text, static_cast<std::size_t>(size)}, unisono::store::kMaxKeyBytes);
    return;
  }
  // Bytes that are not UTF-8 come as lone surrogates and are turned back into the bytes.
  PyErr_Clear();
  PyObject* encoded = PyUnicode_AsEncodedString(key.ptr(), "utf-8", "surrogateescape");
  if (encoded == nullptr) throw nb::python_error();
  const auto bytes = nb::steal<nb::bytes>(encoded);
  put_sized(out, {bytes.c_str(), bytes.size()}, unisono::store::kMaxKeyBytes);
}

void put_value(Buffer& out, nb::handle value) {
  const auto bytes = nb::cast<nb::bytes>(value);
  put_sized(out, {bytes.c_str(), bytes.size()}, unisono::store::kMaxValueBytes);
}

void put_list(Buffer& out, nb::handle items, bool with_values) {
  const std::size_t count = nb::len(items);
  if (count > unisono::store::kMaxKeys) refuse();
  out.append_number(uint64_t{count});
  for (nb::handle item : items) {
    put_key(out, with_values ? nb::handle(item[0]) : item);
    if (with_values) put_value(out, item[1]);
  }
}

void put_request(Link& link, const nb::tuple& request) {
  const auto op = static_cast<Opcode>(nb::cast<int>(request[0]));
  Buffer& out = link.out();
  const std::size_t before = out.size();
  out.append_number(static_cast<char>(op));
  std::size_t index = 1;
  for (const char* field = unisono::store::request_fields(op); *field != '\0'; ++field) {
    nb::handle item = request[index++];
    switch (*field) {
      case 'k': put_key(out, item); break;
      case 'v': put_value(out, item); break;
      case 'i': out.append_number(nb::cast<int64_t>(item)); break;
      case 'u': out.append_number(nb::cast<uint32_t>(item)); break;
      default: put_list(out, item, *field == 'P'); break;
    }
  }
  if (out.size() - before > unisono::store::kMaxRequestBytes) refuse();
  if (*unisono::store::reply_fields(op) == '\0') {
    // So that a write is done, and visible to every other connection, when the call returns.
    out.append_number(static_cast<char>(Opcode::ping));
    out.append_number(uint32_t{0});
    link.expect(Opcode::ping);
  } else {
    link.expect(op, op == Opcode::multi_get ? nb::len(nb::handle(request[1])) : 0);
  }
}

nb::object as_bytes(std::string_view bytes) { return nb::bytes(bytes.data(), bytes.size()); }

nb::object taken(const nb::tuple& request, const char* at) {
  const auto op = static_cast<Opcode>(nb::cast<int>(request[0]));
  Cursor cursor(at);
  switch (*unisono::store::reply_fields(op)) {
    case 'v': return as_bytes(cursor.sized());
    case 'i': return nb::int_(cursor.number<int64_t>());
    case 'u': return nb::int_(cursor.number<uint32_t>());
    case 'f': return nb::int_(static_cast<int>(cursor.number<unsigned char>()));
    case 'q': {
      const auto before = cursor.number<int64_t>();
      if (before == 0) return nb::make_tuple(0, nb::none());
      return nb::make_tuple(before, as_bytes(cursor.sized()));
    }
    case 'V': {
      nb::list values;
      for (std::size_t left = nb::len(nb::handle(request[1])); left > 0; --left) {
        values.append(as_bytes(cursor.sized()));
      }
      return values;
    }
    case 'K': {
      nb::list keys;
      for (auto left = cursor.number<uint64_t>(); left > 0; --left) {
        const std::string_view key = cursor.sized();
        PyObject* text =
          PyUnicode_DecodeUTF8(key.data(), static_cast<Py_ssize_t>(key.size()), "surrogateescape");
        if (text == nullptr) throw nb::python_error();
        keys.append(nb::steal(text));
      }
      return keys;
    }
    default: return nb::none();
  }
}

std::unique_ptr<Link> make_link(int fd, double silence_s, const unisono::TlsHandle* tls) {
  const bool is_limited = silence_s < std::numeric_limits<double>::infinity();
  auto link =
    std::make_unique<Link>(fd, is_limited ? unisono::nanoseconds(silence_s) : Link::kNoLimitNs,
                           tls == nullptr ? nullptr : tls->session);
  link->set_poll(&unisono::signal_raised);
  return link;
}

void run(Link& link, double timeout_s, std::size_t most_bytes = Link::kMostReadBytes) {
  Link::Result end;
  {
    unisono::InterpreterUnlock unlocked;
    end = link.exchange(unisono::nanoseconds(timeout_s), most_bytes);
  }
  switch (end) {
    case Link::Result::ok: return;
    case Link::Result::interrupted: break;
    case Link::Result::timeout: PyErr_SetString(PyExc_TimeoutError, "timed out"); break;
    case Link::Result::closed:
      PyErr_SetString(PyExc_ConnectionResetError, "the server closed the connection");
      break;
    case Link::Result::bad: PyErr_SetString(PyExc_ValueError, "the reply makes no sense"); break;
    case Link::Result::error: unisono::raise_error(link.why());
  }
  throw nb::python_error();
}

using Requests = nb::typed<nb::tuple, nb::object, nb::ellipsis>;
using Results = nb::typed<nb::list, nb::object>;

Results exchange(Link& link, double timeout_s, const Requests& requests) {
  link.begin();
  for (nb::handle request : requests) put_request(link, nb::borrow<nb::tuple>(request));
  run(link, timeout_s);
  Results results;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    results.append(taken(nb::borrow<nb::tuple>(requests[i]), link.reply(i)));
  }
  link.done();
  return results;
}

bool cancel(Link& link, double timeout_s) {
  link.begin();
  link.out().append_number(static_cast<char>(Opcode::cancel_wait));
  // The reply that is still expected is either the end of the wait or its cancellation. If it is
  // the end, the answer to this request follows. Each has 1 byte.
  run(link, timeout_s, 1);
  const bool has_ended = *link.reply(0) == unisono::store::kStopWaiting;
  link.done();
  if (has_ended) {
    link.expect(Opcode::cancel_wait);
    run(link, timeout_s);
    link.done();
  }
  return has_ended;
}

}  // namespace

void bind_store_link(nb::module_& m) {
  nb::class_<Link>(m, "StoreLink")
    .def(nb::new_(&make_link), nb::arg("fd"), nb::arg("silence_s"),
         nb::arg("tls").none() = nb::none())
    .def("exchange", &exchange, nb::arg("timeout_s"), nb::arg("requests"),
         "Send requests, (op, argument, ...) each, and return their results.")
    .def("cancel", &cancel, nb::arg("timeout_s"),
         "End a wait that timed out; return whether it was over by then.");
}
