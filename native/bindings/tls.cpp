#include "bindings/tls.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>

#include <sys/socket.h>

#include "bindings/bindings.hpp"
#include "bindings/view.hpp"

namespace nb = nanobind;

namespace unisono {

TlsSession::Secrets secrets_of(const PySecrets& secrets) {
  TlsSession::Secrets found;
  for (const auto& [name, key] : secrets) {
    found.emplace_back(name, std::string(key.c_str(), key.size()));
  }
  return found;
}

void raise_error(const std::string& why) {
  if (why.empty()) {
    PyErr_SetFromErrno(PyExc_OSError);
  } else {
    const auto error = nb::make_tuple(errno, why);
    PyErr_SetObject(PyExc_OSError, error.ptr());
  }
  throw nb::python_error();
}

}  // namespace unisono

namespace {

using unisono::Bytes;
using unisono::TlsContext;
using unisono::TlsContextHandle;
using unisono::TlsHandle;
using unisono::TlsSession;

// Python's sockets wait by themselves, so these calls never do.
constexpr int kFlags = MSG_DONTWAIT;

ssize_t checked(const TlsSession& session, ssize_t result) {
  if (result < 0) unisono::raise_error(errno == EAGAIN ? std::string() : session.why());
  return result;
}

TlsHandle* make_session(const TlsContextHandle& context, int fd, bool is_server,
                        const unisono::PySecrets& secrets, const std::string& name) {
  return new TlsHandle{std::make_shared<TlsSession>(context.context, fd, is_server,
                                                    unisono::secrets_of(secrets), name)};
}

TlsContextHandle* make_context() {
  return new TlsContextHandle{std::make_shared<const TlsContext>()};
}

TlsContextHandle* read_certificates(const std::string& certificate, const std::string& key,
                                    const std::string& authority) {
  return new TlsContextHandle{std::make_shared<const TlsContext>(certificate, key, authority)};
}

ssize_t receive(const TlsHandle& tls, nb::handle into) {
  const Bytes bytes(into, PyBUF_WRITABLE);
  const iovec part{bytes.data(), bytes.nbytes()};
  return checked(*tls.session, tls.session->read(&part, 1, kFlags));
}

ssize_t transmit(const TlsHandle& tls, nb::handle first, nb::handle second) {
  const Bytes head(first, PyBUF_SIMPLE);
  const Bytes rest(second, PyBUF_SIMPLE);
  const iovec parts[2] = {{head.data(), head.nbytes()}, {rest.data(), rest.nbytes()}};
  return checked(*tls.session, tls.session->write(parts, 2, kFlags));
}

std::string why_no_openssl() {
  return unisono::openssl::functions() == nullptr ? unisono::openssl::why_absent() : "";
}

}  // namespace

void bind_tls(nb::module_& m) {
  m.def("why_no_openssl", &why_no_openssl, "Return why there is no TLS here; empty: there is.");
  nb::class_<TlsContextHandle>(m, "TlsContext")
    .def(nb::new_(&make_context), "For keys that both ends know.")
    .def(nb::new_(&read_certificates), nb::arg("certificate"), nb::arg("key"), nb::arg("authority"),
         "For certificates: files.");
  nb::class_<TlsHandle>(m, "TlsSession")
    .def(nb::new_(&make_session), nb::arg("context"), nb::arg("fd"), nb::arg("is_server"),
         nb::arg("secrets"), nb::arg("name"))
    .def("read", &receive, nb::arg("into"),
         "Receive bytes after the handshake; return how many, 0 at the end.")
    .def("write", &transmit, nb::arg("head"), nb::arg("rest"),
         "Take bytes of both after the handshake; return how many.")
    .def_prop_ro("has_unsent", [](const TlsHandle& tls) { return tls.session->has_unsent(); })
    .def_prop_ro("has_unread", [](const TlsHandle& tls) { return tls.session->has_unread(); })
    .def_prop_ro("is_ready", [](const TlsHandle& tls) { return tls.session->is_ready(); })
    .def_prop_ro("is_other_secret",
                 [](const TlsHandle& tls) { return tls.session->is_other_secret(); })
    .def_prop_ro("secret_name", [](const TlsHandle& tls) { return tls.session->secret_name(); })
    .def_prop_ro("first_byte", [](const TlsHandle& tls) { return tls.session->first_byte(); });
}
