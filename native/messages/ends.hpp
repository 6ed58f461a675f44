// Records that end operations from outside: ranks that are gone, failed contexts, and close().
//
// A rank whose messages may still arrive is parting: Python knows that the rank is gone, and the
// rank is not down yet.
#pragma once

#include <cstdint>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "messages/operations.hpp"

namespace unisono {

class Ends {
 public:
  Ends(int rank, int ranks) : rank_(rank), ranks_(static_cast<size_t>(ranks)) {}

  bool is_closed(const Lock& /*lock*/) const { return is_closed_; }
  void close(const Lock& /*lock*/) { is_closed_ = true; }

  // Why a rank is down. Code::ok: it is not.
  Code down(const Lock& /*lock*/, int rank) const { return at(rank).down; }
  void set_down(const Lock& lock, int rank, Code code);
  // A rank has closed a context: it sends no more there.
  void close_context(const Lock& /*lock*/, int rank, uint64_t context) {
    closed_.emplace(context, rank);
  }
  bool has_closed(const Lock& /*lock*/, int rank, uint64_t context) const {
    return !closed_.empty() && closed_.count({context, rank}) != 0;
  }
  // The code with which a receive must end because its sender is down, or has closed the context.
  // `source` becomes the rank to blame.
  Code down_for(const Lock& lock, Operation& op) const;

  // Why a rank is parting. Code::ok: it is not.
  Code parting(const Lock& /*lock*/, int rank) const { return at(rank).parting; }
  void set_parting(const Lock& lock, int rank, Code code);
  bool are_parting(const Lock& /*lock*/) const { return parting_ != 0; }
  // Whether the last messages of a parting rank took too long.
  bool is_overdue(const Lock& lock, int rank) const;

  // A context is broken after a run, is used again from a tag on, or is not used any more.
  void fail(const Lock& lock, uint64_t context, int64_t after);
  void forget_tags(const Lock& /*lock*/, uint64_t context, int64_t oldest) {
    forgotten_[context] = oldest;
  }
  void forget(const Lock& lock, uint64_t context);
  bool have_failed(const Lock& /*lock*/) const { return !failed_.empty(); }
  // Whether a message is lost with its context. The rank that has broken the context has finished
  // the runs before, so all their messages come.
  bool is_failed(const Lock& lock, const Envelope& envelope) const {
    return have_failed(lock) && fails(envelope);
  }
  // Whether no receive will take this message.
  bool is_unwanted(const Lock& lock, const Envelope& envelope) const;

 private:
  struct State {
    Code down = Code::ok;
    Code parting = Code::ok;
    int64_t parting_ends_ns = 0;
  };
  bool fails(const Envelope& envelope) const;
  Code down_in(const Lock& lock, int rank, uint64_t context) const {
    const Code code = down(lock, rank);
    return code == Code::ok && has_closed(lock, rank, context) ? Code::left : code;
  }
  const State& at(int rank) const { return ranks_[static_cast<size_t>(rank)]; }

  const int rank_;
  std::vector<State> ranks_;
  int parting_ = 0;                                  // number of parting ranks
  std::unordered_map<uint64_t, int64_t> failed_;     // contexts, and after which run
  std::unordered_map<uint64_t, int64_t> forgotten_;  // by context: the oldest negative tag
  std::set<std::pair<uint64_t, int>> closed_;        // contexts, and a rank that has closed them
  bool is_closed_ = false;
};

}  // namespace unisono
