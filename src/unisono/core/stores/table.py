"""The semantics of every store, without any I/O: values, queues, barriers, and their waiters.

HashStore guards a `StoreTable` with a lock, FileStore replays its log into a table, the TCP server
owns a table. A store on a service makes a table of the entry that it changes. Nothing here blocks,
sleeps or locks: a waiter polls, or registers a callback.
"""

from __future__ import annotations

import enum
import re
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from unisono.core.stores.api import INT64_MAX, INT64_MIN
from unisono.errors import InvalidArgumentError, StoreKeyError

_INTEGER = re.compile(rb"\s*[+-]?[0-9]+\s*")
# More than an int64 with padding has. Longer text is refused before int(), which is quadratic.
_MAX_DIGITS = 64


class ChangeKind(enum.IntEnum):
    """The effect of a change on the table; only FileStore uses JOIN and LEAVE."""

    SET = 1
    APPEND = 2
    ADD = 3
    COMPARE_SET = 4
    DELETE = 5
    PUSH = 6
    POP = 7
    ARRIVE = 8
    WITHDRAW = 9
    JOIN = 10
    LEAVE = 11


class Change(NamedTuple):
    """One change as data; the meaning of `first` and `second` depends on the kind."""

    kind: ChangeKind
    key: str
    first: bytes = b""
    second: bytes = b""


@dataclass(eq=False, slots=True)
class Watch:
    """One caller that waits until all of `keys` are ready; `notify` is then called once."""

    keys: tuple[str, ...]
    notify: Callable[[], None]
    # Index of a key that is not ready; only this key is watched.
    missing: int = 0


@dataclass(slots=True)
class _Barrier:
    """The callers inside one barrier, each with the function that releases it."""

    world_size: int
    members: dict[Hashable, Callable[[], None]] = field(default_factory=dict)


class StoreTable:
    """Values, queues and barriers by name.

    `reserved` counts the values of a queue that woken waiters have not fetched yet. Other waiters
    do not see these values, so that one push wakes one waiter.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.reserved: Counter[str] = Counter()
        self._queues: dict[str, deque[bytes]] = {}
        self._watches: dict[str, dict[Watch, None]] = {}
        self._barriers: dict[str, _Barrier] = {}

    def apply(self, change: Change) -> Any:
        """Make a change and return its result.

        Raises:
            StoreKeyError, InvalidArgumentError: Refused; the table is as before.
        """
        kind, key, first, second = change
        match kind:
            case ChangeKind.SET:
                return self.set(key, first)
            case ChangeKind.APPEND:
                return self.append(key, first)
            case ChangeKind.ADD:
                return self.add(key, int(first))
            case ChangeKind.COMPARE_SET:
                return self.compare_set(key, first, second)
            case ChangeKind.DELETE:
                return self.delete_key(key)
            case ChangeKind.PUSH:
                return self.queue_push(key, first)
            case ChangeKind.POP:
                return self.queue_pop(key)
            case ChangeKind.ARRIVE:
                return self.arrive(key, int(first), second.decode(), _no_release)
            case ChangeKind.WITHDRAW:
                return self.withdraw(key, first.decode())
            case ChangeKind.JOIN | ChangeKind.LEAVE:
                return None

    def changes(self) -> list[Change]:
        """Return the fewest changes that make an equal table out of an empty one."""
        made = [Change(ChangeKind.SET, key, value) for key, value in self.values.items()]
        for key, queue in self._queues.items():
            made += [Change(ChangeKind.PUSH, key, value) for value in queue]
        for key, barrier in self._barriers.items():
            size = str(barrier.world_size).encode()
            made += [
                Change(ChangeKind.ARRIVE, key, size, str(member).encode())
                for member in barrier.members
            ]
        return made

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self.values[key] = value
        self.changed(key)

    def append(self, key: str, value: bytes) -> None:
        """Append to a value; missing counts as empty."""
        self.set(key, self.values.get(key, b"") + value)

    def add(self, key: str, amount: int) -> int:
        """Add to a decimal number.

        Raises:
            StoreKeyError: Not a number, or the sum leaves 64 bits (torch wraps around).
        """
        total = checked_sum(key, self.values.get(key), amount)
        self.set(key, b"%d" % total)
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store `desired` if the present value is `expected`; see Store.compare_set."""
        present = self.values.get(key)
        if present == expected or (present is None and not expected):
            self.set(key, desired)
            return desired
        # A missing key answers with `expected`: odd, but torch scripts rely on it.
        return expected if present is None else present

    def delete_key(self, key: str) -> bool:
        """Remove a value; return whether there was one."""
        return self.values.pop(key, None) is not None

    def queue_push(self, key: str, value: bytes) -> None:
        """Append to a queue."""
        self._queues.setdefault(key, deque()).append(value)
        self.changed(key)

    def queue_pop(self, key: str) -> bytes | None:
        """Remove the oldest value of a queue; None if it is empty."""
        queue = self._queues.get(key)
        if not queue:
            return None
        value = queue.popleft()
        if not queue:
            del self._queues[key]
        return value

    def queue_len(self, key: str) -> int:
        """Return the number of values in a queue."""
        return len(self._queues.get(key, ()))

    def found(self, keys: Iterable[str]) -> list[bytes | None]:
        """Return the value of each key; None for a key without a value."""
        return [self.values.get(key) for key in keys]

    def names(self) -> list[str]:
        """Return the keys with a value."""
        return list(self.values)

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Return the keys that have neither a value nor a non-empty queue."""
        return [key for key in keys if key not in self.values and key not in self._queues]

    def ready(self, keys: Iterable[str]) -> bool:
        """Return whether a waiter for `keys` may go on."""
        return all(map(self._is_ready, keys))

    def _is_ready(self, key: str) -> bool:
        return key in self.values or self.queue_len(key) > self.reserved[key]

    def watch(self, keys: Iterable[str], notify: Callable[[], None]) -> Watch:
        """Call `notify` once as soon as all keys are ready; they must not be so now."""
        watch = Watch(tuple(keys), notify)
        self._watch_missing(watch)
        return watch

    def _watch_missing(self, watch: Watch) -> bool:
        """Watch the next key that is not there; False if all are.

        The search begins at the key that became ready, so that a wait looks at each key about once.
        """
        count = len(watch.keys)
        for at in range(watch.missing, watch.missing + count):
            key = watch.keys[at % count]
            if not self._is_ready(key):
                watch.missing = at % count
                self._watches.setdefault(key, {})[watch] = None
                return True
        return False

    def unwatch(self, watch: Watch) -> None:
        """Remove a watch; harmless if it was notified already."""
        key = watch.keys[watch.missing]
        watches = self._watches.get(key)
        if watches is not None:
            watches.pop(watch, None)
            if not watches:
                del self._watches[key]

    def changed(self, key: str) -> None:
        """Notify the watches that `key` completed, oldest first."""
        for watch in self._watches.pop(key, ()):
            # Asked again for each watch: the previous watch may have reserved the value.
            if not self._watch_missing(watch):
                watch.notify()

    def arrive(
        self, key: str, world_size: int, member: Hashable, notify: Callable[[], None]
    ) -> None:
        """Enter a barrier; the last member notifies all members, itself included.

        Raises:
            InvalidArgumentError: Other members entered with another world size.
        """
        barrier = self._barriers.setdefault(key, _Barrier(world_size))
        if barrier.world_size != world_size:
            raise InvalidArgumentError(
                f"barrier {key!r} was entered with world_size={barrier.world_size}, "
                f"now with world_size={world_size}"
            )
        barrier.members[member] = notify
        if len(barrier.members) >= world_size:
            del self._barriers[key]
            for release in barrier.members.values():
                release()

    def withdraw(self, key: str, member: Hashable) -> int:
        """Leave a barrier; return how many were inside, 0 if `member` was released before."""
        barrier = self._barriers.get(key)
        if barrier is None or member not in barrier.members:
            return 0
        inside = len(barrier.members)
        del barrier.members[member]
        if not barrier.members:
            del self._barriers[key]
        return inside

    def inside(self, key: str, member: Hashable) -> bool:
        """Return whether `member` still waits in a barrier."""
        return key in self._barriers and member in self._barriers[key].members


def _no_release() -> None:
    """Do nothing: members of a barrier in a FileStore poll."""


def checked_sum(key: str, value: bytes | None, amount: int) -> int:
    """Return the number in `value` plus `amount`; None counts as 0.

    torch takes a leading number ("12abc" counts as 12), drops the connection on anything else,
    and wraps around at 64 bits.

    Raises:
        StoreKeyError: Not a number, or the sum leaves 64 bits.
    """
    if value is None:
        return amount
    if len(value) > _MAX_DIGITS or not _INTEGER.fullmatch(value):
        shown = value if len(value) <= _MAX_DIGITS else value[:_MAX_DIGITS] + b"..."
        raise StoreKeyError(f"add({key!r}): the stored value {shown!r} is not an integer")
    total = int(value) + amount
    if not INT64_MIN <= total <= INT64_MAX:
        raise StoreKeyError(f"add({key!r}, {amount}): the sum {total} does not fit into 64 bits")
    return total
