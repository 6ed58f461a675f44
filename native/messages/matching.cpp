#include "messages/matching.hpp"

#include <algorithm>
#include <new>
#include <utility>

namespace unisono {

bool Operation::takes_from(int rank) const {
  if (peer >= 0) return peer == rank;
  return std::find(among->begin(), among->end(), rank) != among->end();
}

bool Operation::accept_anything(const Envelope& message, std::unique_ptr<char[]>* kept) {
  if (takes == Take::nothing) return true;
  memory = kept != nullptr ? std::move(*kept)
                           : std::unique_ptr<char[]>(new (std::nothrow) char[message.nbytes]);
  data = memory.get();
  return data != nullptr;
}

Operation* Matching::take_posted(int source, const Envelope& envelope, bool probes) {
  for (auto it = posted_.begin(); it != posted_.end(); ++it) {
    Operation* op = *it;
    if (op->matches(source, envelope) && (op->takes == Take::nothing) == probes) {
      posted_.erase(it);
      return op;
    }
  }
  return nullptr;
}

std::list<Arrival>::iterator Matching::find_arrival(const Operation& op) {
  return std::find_if(arrivals_.begin(), arrivals_.end(), [&](const Arrival& arrival) {
    return op.matches(arrival.source, arrival.envelope);
  });
}

Arrival* Matching::keep(int source, const Envelope& envelope) {
  try {
    // new[] of char leaves the memory uninitialised, because it is about to be written.
    arrivals_.push_back({source, envelope, std::unique_ptr<char[]>(new char[envelope.nbytes])});
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
  kept_bytes_ += envelope.nbytes;
  return &arrivals_.back();
}

void Matching::discard(std::list<Arrival>::iterator arrival) {
  kept_bytes_ -= arrival->envelope.nbytes;
  arrivals_.erase(arrival);
}

void Matching::assign_order(Operation* op) {
  const size_t most = posted_.size() + sources_ + 1;
  if (posted_.capacity() < most) posted_.reserve(2 * most);
  op->order = ++last_order_;
}

void Matching::post(Operation* op) {
  if (op->order == 0) assign_order(op);
  const auto is_before = [](const Operation* a, const Operation* b) { return a->order < b->order; };
  posted_.insert(std::upper_bound(posted_.begin(), posted_.end(), op, is_before), op);
}

bool Matching::unpost(const Operation* op) {
  auto found = std::find(posted_.begin(), posted_.end(), op);
  if (found == posted_.end()) return false;
  posted_.erase(found);
  return true;
}

bool Matching::has_receive_from(int source) const {
  return std::any_of(posted_.begin(), posted_.end(),
                     [&](const Operation* op) { return op->takes_from(source); });
}

bool Matching::has_receive_for(int source, uint64_t context, int64_t tag) const {
  return std::any_of(posted_.begin(), posted_.end(), [&](const Operation* op) {
    return op->peer == source && op->takes != Take::nothing &&
           op->matches(source, {context, tag, 0, 0});
  });
}

}  // namespace unisono
