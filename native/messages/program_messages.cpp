#include "messages/program_messages.hpp"

namespace unisono {

void ProgramMessages::begin(Operation& op) {
  const Lock lock(lock_);
  if (op.is_send) {
    peers_.begin_send(lock, op);
  } else if (parts_.delivery.post(lock, op)) {
    parts_.delivery.end_if_down(lock, op);
  }
}

Code ProgramMessages::wait(const Operation& op, int64_t timeout_ns) {
  Lock lock(lock_);
  const Code reason = waiting_.wait_for(&op, timeout_ns, lock);
  waiting_.notify(lock);
  return op.done ? Code::ok : reason;
}

void ProgramMessages::cancel(Operation& op) {
  const Lock lock(lock_);
  if (!op.done) peers_.cancel(lock, op, Code::cancelled);
  waiting_.notify(lock);
}

void ProgramMessages::try_progress() {
  const Lock lock(lock_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  peers_.progress(lock);
  waiting_.notify(lock);
}

void ProgramMessages::end_waits() {
  const Lock lock(lock_);
  waiting_.delegate(lock);
}

void ProgramMessages::forget_tags(uint64_t context, int64_t oldest) {
  const Lock lock(lock_);
  parts_.ends.forget_tags(lock, context, oldest);
  parts_.delivery.discard_unwanted(lock);
}

}  // namespace unisono
