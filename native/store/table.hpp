// The values of a store and the clients that wait for them; the twin of
// src/unisono/core/stores/table.py. No I/O: one thread calls the table, and the table wakes a waiter by
// `wake`.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace unisono::store {

// A client as the table sees it.
class Waiter {
 public:
  virtual ~Waiter() = default;
  // All awaited keys are there, and the client waits for none.
  virtual void wake() = 0;

 private:
  friend class Table;
  std::vector<std::string> keys_;  // the awaited keys
  std::size_t missing_ = 0;        // index of a missing key, the only key that is watched
  std::string barrier_;
  std::optional<std::string> promised_;  // the queue that keeps a value for this waiter
  bool in_barrier_ = false;
};

// Memory ran out while waiters were woken or recorded, and some of them may be lost.
struct Broken {};

class Table {
 public:
  using Keys = std::vector<std::string_view>;

  // Return the value of a key, or nullptr. Valid until the next change.
  const std::string* find(std::string_view key) const;
  const std::unordered_map<std::string, std::string>& values() const { return values_; }

  void set(std::string_view key, std::string_view value);
  // False: the value would become longer than the limit.
  bool append(std::string_view key, std::string_view value);
  // False, and no change: the value is no number, or the sum leaves 64 bits.
  bool add(std::string_view key, int64_t amount, int64_t* total);
  // Return the answer of compare_set. The view is valid until the next change.
  std::string_view compare_set(std::string_view key, std::string_view expected,
                               std::string_view desired);
  bool delete_key(std::string_view key);

  void queue_push(std::string_view key, std::string_view value);
  bool queue_pop(std::string_view key, std::string* value);
  int64_t queue_len(std::string_view key) const;

  // Whether every key has a value or is a queue that is not empty.
  bool has_all(const Keys& keys) const;

  // Wait until all keys are ready. True: they are ready now. False: wake() comes later. A value of
  // a queue is then promised to this waiter.
  bool wait(Waiter& waiter, const Keys& keys);
  // Enter a barrier. The last client to enter wakes all, itself included. False: the barrier has
  // another size.
  bool arrive(Waiter& waiter, std::string_view key, int64_t world_size);
  // End the waits of a client.
  void forget(Waiter& waiter);
  // Return the queue that keeps a value for the waiter, if any. The value is kept until
  // end_promise(); if it was not taken by then, the next waiter gets it.
  std::optional<std::string> take_promise(Waiter& waiter);
  void end_promise(const std::string& key);

 private:
  struct Barrier {
    int64_t world_size = 0;
    std::vector<Waiter*> members;
  };

  const std::string& scratch(std::string_view key) const {
    scratch_.assign(key);
    return scratch_;
  }
  bool is_ready(std::string_view key) const;
  void promise(Waiter& waiter, std::string_view key);
  void unwatch(Waiter& waiter);
  void changed(std::string_view key);
  void wake_watchers(std::string_view key);

  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<std::string, std::deque<std::string>> queues_;
  // By queue: the number of values promised to woken waiters that have not come yet. Other clients
  // do not see these values, so that one push wakes one waiter.
  std::unordered_map<std::string, int64_t> reserved_;
  // By missing key: the clients that wait for it, oldest first.
  std::unordered_map<std::string, std::vector<Waiter*>> watches_;
  std::unordered_map<std::string, Barrier> barriers_;
  mutable std::string scratch_;  // so that a lookup allocates no memory
};

}  // namespace unisono::store
