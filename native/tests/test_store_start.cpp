// A store server that cannot start.
#include <cassert>
#include <csignal>
#include <cstdio>
#include <system_error>

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include "store/server.hpp"

using namespace unisono::store;

namespace {

// A failed start closes no socket of the caller and leaves the caller's signal mask.
void test_no_thread() {
  int log[2];
  const int piped = pipe(log), listener = socket(AF_INET, SOCK_STREAM, 0);
  assert(piped == 0 && listener >= 0);
  pthread_attr_t usual, huge;
  pthread_getattr_default_np(&usual);
  pthread_getattr_default_np(&huge);
  pthread_attr_setstacksize(&huge, std::size_t{1} << 50);
  pthread_setattr_default_np(&huge);
  bool has_failed = false;
  try {
    Server::start({listener}, log[1], {"", false});
  } catch (const std::system_error&) {
    has_failed = true;
  }
  pthread_setattr_default_np(&usual);
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  assert(has_failed && sigismember(&blocked, SIGINT) == 0);
  assert(fcntl(listener, F_GETFD) == -1 && fcntl(log[1], F_GETFD) == -1);
  close(log[0]);
}

}  // namespace

int main() {
  test_no_thread();
  std::puts("store start: ok");
  return 0;
}
