// Programs of messages, as engines/reference.py executes them, over rings and wires (messages.hpp).
//
// Everything happens on the caller's thread. Receives are posted ahead of their turn where nothing
// in between touches their memory; what is to be reduced comes in chunks, so that one is reduced
// while the next is on its way.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "shared/group.hpp"
#include "messages/messages.hpp"
#include "core/program.hpp"

namespace unisono {

inline bool overlaps(const char* first, const char* end, const char* other, const char* other_end) {
  return first < other_end && other < end;
}

class Steps final : public Runner {
 public:
  // `ranks`: the members, by rank in the group, as ranks of `messages`. `hosts`: where they are;
  // numbers that are equal for ranks of one host. `agreement` agrees in place of messages, unless it
  // is nullptr.
  Steps(std::shared_ptr<Messages> messages, uint64_t context, std::vector<int> ranks,
        const std::vector<int>& hosts, Group* agreement);
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;

  // Loops are not looked at.
  Status run(const Program& program, const Buffers& buffers, ReduceFn reduce, AgreementWords words,
             int64_t timeout_ns, Idler* idler = nullptr) override;

  void abort() override { aborted_.store(true, std::memory_order_relaxed); }
  bool is_aborted() const override { return aborted_.load(std::memory_order_relaxed); }

 private:
  struct Sending {
    Operation* op;
    const char* first;
    const char* end;
  };
  struct Receiving {
    Operation* op;
    char* staging;  // where it is received, to be reduced; nullptr: at its place
    size_t nbytes;
  };
  // What ranks say to one another in an agreement; fingerprint 0: not all are equal.
  struct Verdict {
    uint64_t fingerprint;
    uint64_t even;

    void merge(const Verdict& other) {
      if (other.fingerprint != fingerprint) fingerprint = 0;
      if (other.even != even) even = 0;
    }
  };

  // steps.cpp: the order of things
  Status agree_and_execute(const Program& program, AgreementWords words);
  Status agree(AgreementWords words, uint64_t* even);
  Status agree_among_hosts(Verdict* mine);
  Status recv_verdict(int peer, Verdict* into);
  void send_verdict(int peer, const Verdict& verdict);
  void send_early();
  Status execute();
  Status receive(const Step& step);
  Status compute(const Step& step);
  void reduce(const Step& step, char* into, char* staging, size_t nbytes);
  static bool stays_within_arrays(const Program& program, int64_t buf, const ArrayList& parts);
  void gather_lists(const Program& program, const Buffers& given);
  void scatter_lists(const Buffers& given) const;
  void begin_run(int64_t timeout_ns, Idler* idler);
  void end_run();

  // steps_move.cpp: messages
  void send(const Step& step);
  void send_to(int peer, int64_t tag, const char* data, size_t nbytes);
  void begin_send(Operation& op);
  void begin_held_sends();
  void post_ahead();
  bool post_next();
  bool is_in_use(const char* first, size_t nbytes) const;
  Status wait_for_sends(const char* first, const char* end);
  Status wait(Operation& op);
  Status status_of(const Operation& op) const;
  Operation* new_op(int peer, int64_t tag, size_t nbytes);
  void recycle(const Receiving& receiving);

  char* address_of(int64_t buf, int64_t off) const;
  size_t bytes(const Step& step) const { return static_cast<size_t>(step.count * itemsize_); }
  // Two tags per call; those of p2p messages are not negative.
  int64_t agreement_tag() const { return -2 * epoch_ - 1; }
  int64_t program_tag() const { return -2 * epoch_ - 2; }

  std::shared_ptr<Messages> messages_;
  uint64_t context_;
  std::vector<int> ranks_;
  Group* agreement_;
  int rank_ = -1;
  std::vector<int> leaders_;    // the first rank of every host
  std::vector<int> followers_;  // the other ranks of this one's host, if it is the leader there
  int leader_ = -1;             // of its host
  int64_t epoch_ = 0;
  std::atomic<bool> aborted_{false};

  // Of the run in progress.
  const Step* steps_ = nullptr;
  size_t count_ = 0;
  Buffers buffers_{};
  int64_t itemsize_ = 1;
  ReduceFn reduce_ = nullptr;
  int64_t deadline_ns_ = 0;
  int64_t late_at_ns_ = 0;
  bool late_called_ = false;
  Status send_failure_{};  // how a send ended as soon as it began
  Idler* idler_ = nullptr;
  size_t at_ = 0;         // the step that is executed
  size_t early_end_ = 0;  // sends before it have been sent
  size_t next_ = 0;       // the first step that may be a receive which is not posted
  size_t next_byte_ = 0;  // of that step
  size_t expected_bytes_ = 0;
  std::deque<Verdict> sent_verdicts_;
  std::vector<Sending> sends_;
  bool holds_sends_ = false;  // sends are to begin together
  std::vector<Operation*> held_sends_;
  std::deque<Receiving> receives_;

  // Kept for the next run.
  std::vector<char> joined_input_;
  std::vector<char> joined_output_;
  std::deque<Operation> ops_;
  std::vector<Operation*> free_ops_;
  std::vector<std::unique_ptr<char[]>> staging_;
  std::vector<char*> free_staging_;
};

}  // namespace unisono
