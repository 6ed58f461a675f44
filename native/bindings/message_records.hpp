// Records of the messages that C++ sends and receives without Python code.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "bindings/sites.hpp"
#include "core/recorder.hpp"
#include "messages/messages.hpp"

namespace unisono {

// All methods are called with the interpreter lock. Without a recorder they do nothing.
class MessageRecords {
 public:
  // `ranks`: the group's members as ranks of messages.
  explicit MessageRecords(Ranks ranks) : ranks_(std::move(ranks)) {}

  // It must outlive this object.
  void set_recorder(Recorder* recorder) { recorder_ = recorder; }

  uint64_t begin(uint32_t kind, int64_t tag, int64_t count, int peer) {
    if (recorder_ == nullptr) return 0;
    const Recorded message{kind, static_cast<uint64_t>(tag), count, member_of(peer)};
    return recorder_->begin(message, recorder_->count_message(), caller_site());
  }

  void end(uint64_t record, Code code, int peer) {
    end_with(record, 1 + static_cast<uint32_t>(code), peer);
  }
  // Python sends the message in another way, and records it.
  void drop(uint64_t record, int peer) { end_with(record, Recorder::kDropped, peer); }

 private:
  void end_with(uint64_t record, uint32_t outcome, int peer) {
    if (recorder_ != nullptr) recorder_->end_message(record, outcome, member_of(peer));
  }

  // The rank in the group; -1: none.
  int member_of(int rank) const {
    const auto found = std::find(ranks_->begin(), ranks_->end(), rank);
    return found == ranks_->end() ? -1 : static_cast<int>(found - ranks_->begin());
  }

  Ranks ranks_;
  Recorder* recorder_ = nullptr;  // nullptr: messages are not recorded
};

}  // namespace unisono
