"""PrefixStore: a view of another store in which every key gets a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from unisono.core.base.deadline import Timeout
from unisono.core.stores.api import Store, Value, check_key, check_keys, check_value
from unisono.errors import ArgumentTypeError


class PrefixStore(Store):
    """Key "k" is "<prefix>/k" in the store below, which has the time-out and the connection.

    Closing the view does not close the store below, unless it owns it. `num_keys` counts all
    keys below, also those outside of the prefix, as torch does. `list_keys` lists only the keys
    of the prefix. The store below gets the arguments that torch gives: values as bytes, and a
    time-out only if the caller has one.

    Source: torch.distributed.PrefixStore, torch 2.13.
    """

    def __init__(self, prefix: str, store: Store, *, owns_store: bool = False) -> None:
        if not isinstance(store, Store):
            raise ArgumentTypeError(f"PrefixStore needs a Store, got {type(store).__name__}")
        super().__init__(store.timeout)
        self._prefix = check_key(prefix)
        self._store = store
        self._owns_store = owns_store

    @property
    def prefix(self) -> str:
        """The text before each key, without the slash."""
        return self._prefix

    @property
    def underlying_store(self) -> Store:
        """The store below this view."""
        return self._store

    @property
    def _underlying_non_prefix_store(self) -> Store:
        """The first store below that is no PrefixStore (torch's name for it)."""
        return innermost(self)

    @property
    def timeout(self) -> timedelta:
        """The timeout of the store below."""
        return self._store.timeout

    def set_timeout(self, timeout: Timeout) -> None:
        """Change the timeout of the store below."""
        self._store.set_timeout(timeout)

    def set(self, key: str, value: Value) -> None:
        """Store `value` under `key`."""
        self._below().set(self._join(key), check_value(value))

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        """Return the value of `key`, waiting until there is one."""
        return self._below().get(self._join(key), *_given(timeout))

    def add(self, key: str, amount: int) -> int:
        """Add to the number stored under `key` and return the sum."""
        return self._below().add(self._join(key), amount)

    def append(self, key: str, value: Value) -> None:
        """Append `value` to what `key` holds."""
        self._below().append(self._join(key), check_value(value))

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Store `desired` if `key` holds `expected`; see Store.compare_set."""
        expected, desired = check_value(expected), check_value(desired)
        return self._below().compare_set(self._join(key), expected, desired)

    def check(self, keys: Sequence[str], timeout: Timeout | None = None) -> bool:
        """Return whether every key has a value; see Store.check."""
        return self._below().check(self._join_all(keys), *_given(timeout))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Block until every key has a value."""
        self._below().wait(self._join_all(keys), *_given(timeout))

    def delete_key(self, key: str) -> bool:
        """Remove the value of `key`; return whether there was one."""
        return self._below().delete_key(self._join(key))

    def num_keys(self) -> int:
        """Return the number of keys in the store below."""
        return self._below().num_keys()

    def list_keys(self) -> list[str]:
        """Return the keys below this prefix, without it."""
        start = self._join("")
        return [key[len(start) :] for key in self._below().list_keys() if key.startswith(start)]

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        """Return the values of all keys, waiting until each has one."""
        return self._below().multi_get(self._join_all(keys), *_given(timeout))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Store each value under the key at the same position."""
        self._below().multi_set(self._join_all(keys), [check_value(value) for value in values])

    def queue_push(self, key: str, value: Value) -> None:
        """Append `value` to the queue `key`."""
        self._below().queue_push(self._join(key), check_value(value))

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        """Remove and return the oldest value of the queue `key`."""
        return self._below().queue_pop(self._join(key), block, *_given(timeout))

    def queue_len(self, key: str) -> int:
        """Return the number of values in the queue `key`."""
        return self._below().queue_len(self._join(key))

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Block until `world_size` callers are inside `barrier(key)`."""
        self._below().barrier(self._join(key), world_size, timeout)

    def clone(self) -> PrefixStore:
        """Return the same view of a clone of the store below."""
        other = PrefixStore(self._prefix, self._below().clone())
        other._owns_store = True
        return other

    def has_extended_api(self) -> bool:
        """Return what the store below returns."""
        return self._store.has_extended_api()

    def close(self) -> None:
        """Close the view; the store below only if this view owns it."""
        super().close()
        if self._owns_store:
            self._store.close()

    def _below(self) -> Store:
        self._check_open()
        return self._store

    def _join(self, key: str) -> str:
        return f"{self._prefix}/{check_key(key)}"

    def _join_all(self, keys: Sequence[str]) -> list[str]:
        return [self._join(key) for key in check_keys(keys)]

    def __repr__(self) -> str:
        return f"<PrefixStore {self._prefix!r} on {self._store!r}>"


def _given(timeout: Timeout | None) -> tuple[Timeout, ...]:
    """Return the time-out as arguments, for stores whose methods take none."""
    return () if timeout is None else (timeout,)


def innermost(store: Store) -> Store:
    """Return the first store that is no PrefixStore: `store`, or the one below its views."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
