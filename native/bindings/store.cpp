// The store's server, for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/interpreter_lock.hpp"
#include "bindings/tls.hpp"
#include "store/server.hpp"

namespace nb = nanobind;

namespace {

// Which clients must encrypt, the context, and the secrets.
using TlsOptions = std::tuple<int, const unisono::TlsContextHandle*, unisono::PySecrets>;

class StoreServer {
 public:
  StoreServer(std::vector<int> listeners, int log_fd, const nb::bytes& token, bool serves_strangers,
              uint64_t max_reply_bytes, std::size_t max_greetings, int64_t log_window_ns,
              const TlsOptions& tls)
      : server_(unisono::store::Server::start(
          std::move(listeners), log_fd,
          {std::string(token.c_str(), token.size()), serves_strangers, max_reply_bytes,
           max_greetings, log_window_ns, static_cast<unisono::store::Server::Tls>(std::get<0>(tls)),
           std::get<1>(tls) == nullptr ? nullptr : std::get<1>(tls)->context,
           unisono::secrets_of(std::get<2>(tls))})) {}

  void stop() {
    unisono::InterpreterUnlock unlocked;
    server_->stop();
  }
  std::size_t clients() const { return server_->clients(); }

 private:
  unisono::store::Server::Owner server_;
};

}  // namespace

void bind_store(nb::module_& m) {
  nb::class_<StoreServer>(m, "StoreServer")
    .def(nb::init<std::vector<int>, int, const nb::bytes&, bool, uint64_t, std::size_t, int64_t,
                  const TlsOptions&>(),
         nb::arg("listeners"), nb::arg("log_fd"), nb::arg("token"), nb::arg("serves_strangers"),
         nb::arg("max_reply_bytes"), nb::arg("max_greetings"), nb::arg("log_window_ns"),
         nb::arg("tls"), "Serve torch's TCPStore protocol on a thread of its own.")
    .def("stop", &StoreServer::stop, "End the thread and close every socket.")
    .def_prop_ro("clients", &StoreServer::clients);
}
