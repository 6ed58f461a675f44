#include "tls/openssl.hpp"

#include <dlfcn.h>

namespace unisono::openssl {

namespace {

struct Library {
  Functions functions;
  std::string why_absent = "neither libssl.so.3 nor libssl.so.1.1 is installed";

  // A copy that the process has loaded already, such as that of Python's _ssl, is taken.
  Library() {
    for (const char* name : {"libssl.so.3", "libssl.so.1.1"}) {
      void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (handle == nullptr) continue;
      why_absent.clear();
      // dlsym() looks into libcrypto, too, which libssl needs.
#define UNISONO_FIND(result, name, arguments)                                        \
  functions.name = reinterpret_cast<decltype(functions.name)>(dlsym(handle, #name)); \
  if (functions.name == nullptr) why_absent = "libssl has no " #name;
      UNISONO_OPENSSL(UNISONO_FIND)
#undef UNISONO_FIND
      if (why_absent.empty()) return;
    }
  }
};

const Library& library() {
  static const auto* library = new Library;  // sessions of static objects may end after it
  return *library;
}

}  // namespace

const Functions* functions() {
  return library().why_absent.empty() ? &library().functions : nullptr;
}

const std::string& why_absent() { return library().why_absent; }

}  // namespace unisono::openssl
