#include "messages/ends.hpp"

#include <algorithm>

#include "core/clock.hpp"

namespace unisono {

namespace {

// How long messages of a rank may still arrive after Python knows that the rank is gone. From a
// rank that has left, all messages arrive unless the network loses them again and again. From a
// lost rank, no receiver needs all messages.
constexpr int64_t kLeftNs = 5'000'000'000;
constexpr int64_t kLostNs = 300'000'000;

}  // namespace

void Ends::set_down(const Lock& lock, int rank, Code code) {
  set_parting(lock, rank, Code::ok);
  ranks_[static_cast<size_t>(rank)].down = code;
}

Code Ends::down_for(const Lock& lock, Operation& op) const {
  if (op.peer >= 0) {
    op.source = op.peer;
    return down_in(lock, op.peer, op.envelope.context);
  }
  Code left = Code::left;
  for (int rank : *op.among) {
    if (rank == rank_) continue;
    const Code code = down_in(lock, rank, op.envelope.context);
    if (code != Code::ok) op.source = rank;
    if (code == Code::lost) return code;
    if (code == Code::ok) left = Code::ok;
  }
  return left;
}

void Ends::set_parting(const Lock& /*lock*/, int rank, Code code) {
  State& state = ranks_[static_cast<size_t>(rank)];
  parting_ += (code != Code::ok ? 1 : 0) - (state.parting != Code::ok ? 1 : 0);
  state.parting = code;
  state.parting_ends_ns = now_ns() + (code == Code::left ? kLeftNs : kLostNs);
}

bool Ends::is_overdue(const Lock& /*lock*/, int rank) const {
  return now_ns() >= at(rank).parting_ends_ns;
}

void Ends::fail(const Lock& /*lock*/, uint64_t context, int64_t after) {
  // Two threads may report two failures, in either order.
  int64_t& last = failed_.try_emplace(context, after).first->second;
  last = std::min(last, after);
}

void Ends::forget(const Lock& /*lock*/, uint64_t context) {
  failed_.erase(context);
  forgotten_.erase(context);
  closed_.erase(closed_.lower_bound({context, 0}), closed_.lower_bound({context + 1, 0}));
}

bool Ends::fails(const Envelope& envelope) const {
  const auto found = failed_.find(envelope.context);
  return found != failed_.end() && run_of(envelope.tag) > found->second;
}

bool Ends::is_unwanted(const Lock& lock, const Envelope& envelope) const {
  if (is_failed(lock, envelope)) return true;
  if (envelope.tag >= 0 || forgotten_.empty()) return false;
  const auto found = forgotten_.find(envelope.context);
  return found != forgotten_.end() && envelope.tag >= found->second;
}

}  // namespace unisono
