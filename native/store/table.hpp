// What a store holds, and who waits for it; the twin of src/unisono/stores/table.py. No I/O: one
// thread calls it, and a waiter is told through `wake`.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace unisono::store {

// One client as the table sees it.
class Waiter {
 public:
  virtual ~Waiter() = default;
  // What it waited for is there; it waits for nothing any more.
  virtual void wake() = 0;

 private:
  friend class Table;
  std::vector<std::string> keys_;  // what it waits for
  std::size_t missing_ = 0;        // the one of them that is not there: only that one is watched
  std::string barrier_;
  std::optional<std::string> promised_;  // the queue of which one value is kept for it
  bool in_barrier_ = false;
};

// Memory ran out while waiters were told or noted down: some of them may be lost.
struct Broken {};

class Table {
 public:
  using Keys = std::vector<std::string_view>;

  // The value of a key, nullptr without one; valid until the next change.
  const std::string* find(std::string_view key) const;
  const std::unordered_map<std::string, std::string>& values() const { return values_; }

  void set(std::string_view key, std::string_view value);
  // False: it would become longer than a value may be.
  bool append(std::string_view key, std::string_view value);
  // False: what is stored is no number, or the sum leaves 64 bits. Nothing has changed then.
  bool add(std::string_view key, int64_t amount, int64_t* total);
  // Returns what compare_set answers; the view is valid until the next change.
  std::string_view compare_set(std::string_view key, std::string_view expected,
                               std::string_view desired);
  bool delete_key(std::string_view key);

  void queue_push(std::string_view key, std::string_view value);
  bool queue_pop(std::string_view key, std::string* value);
  int64_t queue_len(std::string_view key) const;

  // Whether every key has a value or is a queue with something in it.
  bool has_all(const Keys& keys) const;

  // Waits until all keys are ready: true if they are so now, else `wake` comes later. A value of
  // a queue is then promised to this waiter.
  bool wait(Waiter& waiter, const Keys& keys);
  // Enters a barrier: the last one wakes everybody, itself included. False: others wait there
  // with another size.
  bool arrive(Waiter& waiter, std::string_view key, int64_t world_size);
  // Waits for nothing any more.
  void forget(Waiter& waiter);
  // The queue of which a value is kept for the waiter, if any. It stays kept until `end_promise`;
  // if it was not taken by then, it is for the next one.
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
  // How many values of a queue are promised to waiters that were woken and have not come yet;
  // others do not see these, so that one push wakes one waiter.
  std::unordered_map<std::string, int64_t> reserved_;
  // Who waits, by the key that is not there; oldest first.
  std::unordered_map<std::string, std::vector<Waiter*>> watches_;
  std::unordered_map<std::string, Barrier> barriers_;
  mutable std::string scratch_;  // so that looking a key up allocates nothing
};

}  // namespace unisono::store
