// Programs of messages over rings and wires (messages/messages.hpp), with the result of
// core/engines/reference.py.
//
// All work is done on the caller's thread. Receives are posted ahead of their turn if no step in
// between uses their memory. Data to be reduced comes in chunks: a chunk is reduced while the next
// chunk is on its way.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "core/program.hpp"
#include "messages/messages.hpp"
#include "shared/group.hpp"

namespace unisono {

inline bool overlaps(const char* first, const char* end, const char* other, const char* other_end) {
  return first < other_end && other < end;
}

class Steps final : public Runner {
 public:
  // `ranks`: the group's members as ranks of `messages`, by their rank in the group. `hosts`: a
  // number per member, equal for members on one host. `agreement`: the shared memory in which the
  // ranks agree; nullptr: they agree by messages.
  Steps(std::shared_ptr<Messages> messages, uint64_t context, std::vector<int> ranks,
        const std::vector<int>& hosts, Group* agreement);
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;

  // Ignores the program's loops.
  Status run(const Program& program, const Buffers& buffers, ReduceFns reduce, AgreementWords words,
             int64_t timeout_ns, Idler* idler = nullptr) override;

  void abort() override { aborted_.store(true, std::memory_order_relaxed); }
  bool is_aborted() const override { return aborted_.load(std::memory_order_relaxed); }

  // The number of the last run that this rank has finished; equal to that of the other ranks.
  int64_t finished() const { return finished_.load(std::memory_order_relaxed); }

 private:
  // Both ends cut messages into pieces of this size. Larger: the reduction of a piece waits longer
  // for its end. Smaller: more switches between sending, receiving and reducing. At 64 KiB two hosts
  // took twice as long for 64 MiB as at 512 KiB.
  static constexpr size_t kChunkBytes = 1024 * 1024;

  struct Sending {
    Operation* op;
    const char* first;
    const char* end;
  };
  struct Receiving {
    Operation* op;
    char* staging;  // memory for data to be reduced; nullptr: received in place
    size_t nbytes;
  };
  // The content of a message in an agreement. Fingerprint 0: the ranks' fingerprints differ.
  struct Verdict {
    uint64_t fingerprint;
    uint64_t even;

    void merge(const Verdict& other) {
      if (other.fingerprint != fingerprint) fingerprint = 0;
      if (other.even != even) even = 0;
    }
  };

  // steps.cpp: the agreement and the order of steps
  Status agree_and_execute(const Program& program, AgreementWords words);
  Status agree(AgreementWords words, uint64_t* even);
  Status agree_among_hosts(Verdict* mine);
  Status recv_verdict(int peer, Verdict* into);
  void send_verdict(int peer, const Verdict& verdict);
  void send_early();
  Status execute();
  Status receive(const Step& step);
  Status compute(const Step& step);
  void reduce(const Step& step, char* into, const char* staging, size_t nbytes) const;
  void copy(char* into, const char* from, size_t nbytes) const;
  static bool stays_within_arrays(const Program& program, int64_t buf, const ArrayList& parts);
  void gather_lists(const Program& program, const Buffers& given);
  void scatter_lists(const Buffers& given) const;
  void begin_run(int64_t timeout_ns, Idler* idler);
  void end_run();

  // steps_sum.cpp: accumulations in float32
  Status run_sum();
  Status add_operand(size_t at, size_t done, float* sum);
  void add_elements(size_t at, float* sum, char* into, const char* operand, size_t count) const;
  bool is_in_sum(size_t at) const { return at != 0 && steps_[at - 1].goes_on != 0; }
  size_t end_of_sum(size_t at) const;
  bool takes_turns(size_t first, size_t end) const;

  // steps_move.cpp: messages
  void send(const Step& step);
  void send_to(int peer, int64_t tag, const char* data, size_t nbytes);
  void begin_send(Operation& op);
  void begin_held_sends();
  void post_ahead();
  bool post_next();
  void pass_posted(size_t nbytes);
  bool is_in_use(const char* first, size_t nbytes) const;
  Status wait_for_sends(const char* first, const char* end);
  Status wait(Operation& op);
  Code wait_until_done(Operation& op);
  Status status_of(const Operation& op) const;
  Operation* new_op(int peer, int64_t tag, size_t nbytes);
  void recycle(const Receiving& receiving);

  char* address_of(int64_t buf, int64_t off) const;
  size_t bytes(const Step& step) const { return static_cast<size_t>(step.count * itemsize_); }
  // Each call has two tags, which are negative. Tags of point-to-point messages are not.
  int64_t agreement_tag() const { return -2 * epoch_ - 1; }
  int64_t program_tag() const { return -2 * epoch_ - 2; }

  std::shared_ptr<Messages> messages_;
  uint64_t context_;
  std::vector<int> ranks_;
  Group* agreement_;
  int rank_ = -1;
  std::vector<int> leaders_;    // the first rank of every host
  std::vector<int> followers_;  // the other ranks of this host, if this rank is the leader there
  int leader_ = -1;             // the leader of this rank's host
  int64_t epoch_ = 0;
  std::atomic<int64_t> finished_{0};
  std::atomic<bool> aborted_{false};

  // State of the current run.
  const Step* steps_ = nullptr;
  size_t count_ = 0;
  Buffers buffers_{};
  int64_t itemsize_ = 1;
  ReduceFns reduce_;
  ThreadTeam* shared_by_ = nullptr;  // the threads that share the loops of this run
  int64_t deadline_ns_ = 0;
  int64_t late_at_ns_ = 0;
  bool late_called_ = false;
  Status send_failure_{};  // the status of a send that failed at its start
  Idler* idler_ = nullptr;
  size_t at_ = 0;           // the current step
  size_t early_end_ = 0;    // sends before this step have been sent
  size_t next_ = 0;         // the first step that may be a receive that is not posted
  size_t next_byte_ = 0;    // the first byte of that step that is not posted
  size_t turns_first_ = 0;  // the steps that take turns with the last piece that was posted
  size_t turns_end_ = 0;
  size_t expected_bytes_ = 0;
  std::deque<Verdict> sent_verdicts_;
  std::vector<Sending> sends_;
  bool holds_sends_ = false;  // collect sends, to begin them together
  std::vector<Operation*> held_sends_;
  std::deque<Receiving> receives_;

  // Memory kept for the next run.
  std::vector<char> joined_input_;
  std::vector<char> joined_output_;
  std::vector<float> sum_;
  std::deque<Operation> ops_;
  std::vector<Operation*> free_ops_;
  std::vector<std::unique_ptr<char[]>> staging_;
  std::vector<char*> free_staging_;
};

}  // namespace unisono
