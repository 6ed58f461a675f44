// Messages of programs, which own their operations until these are done or cancelled.
#pragma once

#include <cstdint>
#include <mutex>

#include "messages/parts.hpp"
#include "messages/peers.hpp"
#include "messages/waiting.hpp"

namespace unisono {

class ProgramMessages {
 public:
  ProgramMessages(std::mutex& lock, Parts& parts, Peers& peers, Waiting& waiting)
      : lock_(lock), parts_(parts), peers_(peers), waiting_(waiting) {}

  // A message up to this size does not block the messages behind it until its receive is posted.
  size_t eager_bytes() const { return parts_.delivery.eager_bytes; }
  // Start an operation. It makes no progress after a receive, because a program posts several
  // receives before it waits.
  void begin(Operation& op);
  // Code::timeout: the operation goes on.
  Code wait(const Operation& op, int64_t timeout_ns);
  void cancel(Operation& op);
  // Make some progress between two waits.
  void try_progress();
  // The program waits no more.
  void end_waits();
  // Discard received and future messages with the negative tags of a context from `oldest` up.
  void forget_tags(uint64_t context, int64_t oldest);

 private:
  std::mutex& lock_;
  Parts& parts_;
  Peers& peers_;
  Waiting& waiting_;
};

}  // namespace unisono
