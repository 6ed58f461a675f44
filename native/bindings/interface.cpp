// Checks that this module was built for the Python sources that load it.
//
// The stub, src/unisono/_engine.pyi, is written from the module and lies among the sources. CMake
// puts the stub's digest into the module, so a module that is older than the stub is detected.
#include <nanobind/nanobind.h>

#include <cstdio>
#include <string>
#include <string_view>

#include "bindings/bindings.hpp"
#include "store/token.hpp"

namespace nb = nanobind;

namespace {

bool fits(const nb::bytes& stub) {
  std::string hex;
  for (unsigned char byte : unisono::store::sha256({stub.c_str(), stub.size()})) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", byte);
    hex += digits;
  }
  return hex == std::string_view(UNISONO_STUB_SHA256);
}

}  // namespace

void bind_interface(nb::module_& m) {
  m.def("fits", &fits, nb::arg("stub"), "Whether the module was built for this text of its stub.");
}
