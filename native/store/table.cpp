#include "store/table.hpp"

#include <algorithm>
#include <charconv>
#include <limits>
#include <new>
#include <utility>

#include "store/wire.hpp"

namespace unisono::store {

namespace {

// Enough for the digits of an int64 with padding. A longer text is not a number.
constexpr std::size_t kMaxDigits = 64;

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// Compute the sum of the number in `text` and `amount`. False: `text` is no number, or the sum
// leaves 64 bits.
bool checked_sum(std::string_view text, int64_t amount, int64_t* total) {
  if (text.size() > kMaxDigits) return false;
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  const bool negative = !text.empty() && text.front() == '-';
  if (negative || (!text.empty() && text.front() == '+')) text.remove_prefix(1);
  if (text.empty()) return false;
  // A number whose sum cannot come back into 64 bits, far below the limit of its own type.
  constexpr auto kHuge = static_cast<__int128>(std::numeric_limits<uint64_t>::max()) * 2;
  __int128 number = 0;
  for (char c : text) {
    if (c < '0' || c > '9') return false;
    number = std::min(number * 10 + (c - '0'), kHuge);
  }
  const __int128 sum = (negative ? -number : number) + amount;
  if (sum < std::numeric_limits<int64_t>::min() || sum > std::numeric_limits<int64_t>::max()) {
    return false;
  }
  *total = static_cast<int64_t>(sum);
  return true;
}

}  // namespace

const std::string* Table::find(std::string_view key) const {
  auto found = values_.find(scratch(key));
  return found == values_.end() ? nullptr : &found->second;
}

void Table::set(std::string_view key, std::string_view value) {
  // Copied first: without memory for the copy, the key keeps its value.
  std::string copy(value);
  values_[scratch(key)] = std::move(copy);
  changed(key);
}

bool Table::append(std::string_view key, std::string_view value) {
  auto found = values_.find(scratch(key));
  if (found == values_.end()) {
    set(key, value);
    return true;
  }
  if (found->second.size() + value.size() > kMaxValueBytes) return false;
  found->second.append(value);
  changed(key);
  return true;
}

bool Table::add(std::string_view key, int64_t amount, int64_t* total) {
  auto found = values_.find(scratch(key));
  *total = amount;
  if (found != values_.end() && !checked_sum(found->second, amount, total)) return false;
  char digits[24];
  char* const end = std::to_chars(digits, digits + sizeof digits, *total).ptr;
  if (found == values_.end()) {
    values_.emplace(scratch_, std::string(digits, end));
  } else {
    found->second.assign(digits, end);
  }
  changed(key);
  return true;
}

std::string_view Table::compare_set(std::string_view key, std::string_view expected,
                                    std::string_view desired) {
  const std::string* present = find(key);
  if (present == nullptr ? expected.empty() : *present == expected) {
    set(key, desired);
    return desired;
  }
  // For a missing key the answer is the expected value: odd, but torch scripts rely on it.
  return present == nullptr ? expected : std::string_view(*present);
}

bool Table::delete_key(std::string_view key) { return values_.erase(scratch(key)) > 0; }

void Table::queue_push(std::string_view key, std::string_view value) {
  std::string copy(value);
  queues_[scratch(key)].push_back(std::move(copy));
  changed(key);
}

bool Table::queue_pop(std::string_view key, std::string* value) {
  auto found = queues_.find(scratch(key));
  if (found == queues_.end() || found->second.empty()) return false;
  *value = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) queues_.erase(found);
  return true;
}

int64_t Table::queue_len(std::string_view key) const {
  auto found = queues_.find(scratch(key));
  return found == queues_.end() ? 0 : static_cast<int64_t>(found->second.size());
}

bool Table::has_all(const Keys& keys) const {
  return std::all_of(keys.begin(), keys.end(),
                     [&](auto key) { return find(key) != nullptr || queue_len(key) > 0; });
}

bool Table::is_ready(std::string_view key) const {
  if (find(key) != nullptr) return true;
  auto reserved = reserved_.find(scratch(key));
  return queue_len(key) > (reserved == reserved_.end() ? 0 : reserved->second);
}

bool Table::wait(Waiter& waiter, const Keys& keys) try {
  forget(waiter);
  const auto missing =
    std::find_if_not(keys.begin(), keys.end(), [&](auto key) { return is_ready(key); });
  if (missing == keys.end()) {
    if (keys.size() == 1) promise(waiter, keys[0]);
    return true;
  }
  waiter.keys_.assign(keys.begin(), keys.end());
  waiter.missing_ = static_cast<std::size_t>(missing - keys.begin());
  watches_[scratch(*missing)].push_back(&waiter);
  return false;
} catch (const std::bad_alloc&) {
  throw Broken();
}

void Table::promise(Waiter& waiter, std::string_view key) {
  if (find(key) != nullptr) return;
  ++reserved_[scratch(key)];
  waiter.promised_ = std::string(key);
}

std::optional<std::string> Table::take_promise(Waiter& waiter) {
  return std::exchange(waiter.promised_, std::nullopt);
}

void Table::end_promise(const std::string& key) {
  auto reserved = reserved_.find(key);
  if (--reserved->second == 0) reserved_.erase(reserved);
  changed(key);
}

bool Table::arrive(Waiter& waiter, std::string_view key, int64_t world_size) try {
  forget(waiter);
  auto [found, is_new] = barriers_.try_emplace(scratch(key));
  Barrier& barrier = found->second;
  if (is_new) barrier.world_size = world_size;
  if (barrier.world_size != world_size) return false;
  barrier.members.push_back(&waiter);
  waiter.barrier_.assign(key);
  waiter.in_barrier_ = true;
  if (static_cast<int64_t>(barrier.members.size()) >= world_size) {
    const std::vector<Waiter*> members = std::move(barrier.members);
    barriers_.erase(found);
    for (Waiter* member : members) {
      member->in_barrier_ = false;
      member->wake();
    }
  }
  return true;
} catch (const std::bad_alloc&) {
  throw Broken();
}

void Table::forget(Waiter& waiter) {
  unwatch(waiter);
  if (!waiter.in_barrier_) return;
  waiter.in_barrier_ = false;
  auto found = barriers_.find(waiter.barrier_);
  auto& members = found->second.members;
  members.erase(std::find(members.begin(), members.end(), &waiter));
  if (members.empty()) barriers_.erase(found);
}

void Table::unwatch(Waiter& waiter) {
  if (waiter.keys_.empty()) return;
  auto found = watches_.find(waiter.keys_[waiter.missing_]);
  auto& waiters = found->second;
  waiters.erase(std::find(waiters.begin(), waiters.end(), &waiter));
  if (waiters.empty()) watches_.erase(found);
  waiter.keys_ = {};
}

void Table::changed(std::string_view key) try {
  if (!watches_.empty()) wake_watchers(key);
} catch (const std::bad_alloc&) {
  throw Broken();
}

void Table::wake_watchers(std::string_view key) {
  auto found = watches_.find(scratch(key));
  if (found == watches_.end()) return;
  const std::vector<Waiter*> waiters = std::move(found->second);
  watches_.erase(found);
  for (Waiter* waiter : waiters) {
    // Checked for each waiter, because a waiter before may have been promised the value. The check
    // starts at the key that came, so that a wait for many keys looks at each key about once.
    const std::vector<std::string>& keys = waiter->keys_;
    std::size_t looked = 0, at = waiter->missing_;
    for (; looked < keys.size() && is_ready(keys[at]); ++looked) at = (at + 1) % keys.size();
    if (looked < keys.size()) {
      waiter->missing_ = at;
      watches_[scratch(keys[at])].push_back(waiter);
      continue;
    }
    const std::vector<std::string> complete = std::exchange(waiter->keys_, {});
    if (complete.size() == 1) promise(*waiter, complete[0]);
    waiter->wake();
  }
}

}  // namespace unisono::store
