// TLS sessions as Python's objects.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tls/session.hpp"

namespace unisono {

// Pointers of C++ inside, because the last owner may be a thread without the interpreter lock.
struct TlsContextHandle {
  std::shared_ptr<const TlsContext> context;
};
struct TlsHandle {
  std::shared_ptr<TlsSession> session;
};

using PySecrets = std::vector<std::pair<std::string, nanobind::bytes>>;

TlsSession::Secrets secrets_of(const PySecrets& secrets);
// Raise an OSError with errno, and with this text if it is not empty.
[[noreturn]] void raise_error(const std::string& why);

}  // namespace unisono
