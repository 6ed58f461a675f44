#include "messages/operations.hpp"

#include <algorithm>
#include <utility>

namespace unisono {

Operation& Operations::open(const Lock& /*lock*/) {
  ended_.reserve(open_.size() + 1);
  return *(open_[last_number() + 1] = std::make_unique<Operation>());
}

uint64_t Operations::assign_number(const Lock& /*lock*/, Operation& op) {
  op.number = last_number() + 1;
  last_number_.store(op.number, std::memory_order_relaxed);
  if (!op.quiet) ++watched_;
  return op.number;
}

void Operations::drop(const Lock& /*lock*/) { open_.erase(last_number() + 1); }

Operation* Operations::find(const Lock& /*lock*/, uint64_t number) const {
  const auto found = open_.find(number);
  return found == open_.end() ? nullptr : found->second.get();
}

uint64_t Operations::number_of(const Lock& /*lock*/, const char* data, uint64_t after) const {
  uint64_t found = 0;
  for (const auto& [number, op] : open_) {
    if (!op->is_send && op->given == data && number > after) found = std::max(found, number);
  }
  return found;
}

void Operations::note_end(const Lock& /*lock*/, const Operation& op) {
  ended_.push_back(op.number);
  is_due_ |= !op.quiet;
}

Outcome Operations::take(const Lock& /*lock*/, uint64_t number) {
  const auto found = open_.find(number);
  Outcome outcome = outcome_of(*found->second);
  if (!found->second->quiet) --watched_;
  open_.erase(found);
  ended_.erase(std::remove(ended_.begin(), ended_.end(), number), ended_.end());
  return outcome;
}

std::vector<Outcome> Operations::take_ended(const Lock& lock) {
  std::vector<Outcome> outcomes;
  for (const uint64_t number : std::vector<uint64_t>(ended_)) {
    outcomes.push_back(take(lock, number));
  }
  return outcomes;
}

void Operations::watch(const Lock& /*lock*/, Operation& op) {
  op.quiet = false;
  ++watched_;
  if (op.done && !op.awaited) has_changed_ = is_due_ = true;
}

bool Operations::take_due(const Lock& lock) {
  return std::exchange(is_due_, false) && have_ended(lock);
}

}  // namespace unisono
