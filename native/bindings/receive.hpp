// A receive that C++ has started, in place of the end that Python waits for.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "bindings/message_records.hpp"
#include "messages/messages.hpp"

namespace unisono {

// Its Message is made only if the caller does more than wait(), or if the receive fails. State is
// guarded by the interpreter lock.
class Receive {
 public:
  // `open`: Python's receives under way, by number. `makes(receive)` returns the Message.
  Receive(std::shared_ptr<Messages> messages, MessageRecords records, nanobind::object open,
          nanobind::object makes, nanobind::object array, nanobind::object owner)
      : array(std::move(array)),
        owner(std::move(owner)),
        messages_(std::move(messages)),
        records_(std::move(records)),
        open_(std::move(open)),
        makes_(std::move(makes)) {}

  // Set what is known of the end as the receive has started. `self`: the object of this.
  void begin(Outcome outcome, nanobind::handle self);
  // Wait for the end. False: it has not ended well, or the Message must wait.
  bool wait_well();
  bool is_forked() const { return messages_->is_forked(); }
  bool has_ended_well() const { return is_over_ && !outcome_.is_valid() && !made_.is_valid(); }
  // Return the Message; make it if there is none.
  nanobind::object message(nanobind::handle self);

  int visit(visitproc visit, void* arg) const;
  void clear();

  nanobind::object array, owner;  // the memory, and the caller's argument
  nanobind::object peer, tag;     // as the caller gave them
  uint64_t number = 0, record = 0;
  double timeout_s = 0;
  int64_t deadline_ns = 0;

 private:
  void end(Outcome outcome);

  std::shared_ptr<Messages> messages_;
  MessageRecords records_;
  nanobind::object open_, makes_, made_;
  nanobind::object outcome_;  // for the Message
  bool is_over_ = false;
  int source_ = -1;
};

}  // namespace unisono
