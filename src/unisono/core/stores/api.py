"""The key-value store that ranks use to find each other: interface and shared argument checks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Self

from unisono.core.base.deadline import Deadline, Timeout, to_seconds
from unisono.core.base.threads.reentry import has_lock
from unisono.errors import (
    ArgumentTypeError,
    ClosedError,
    InvalidArgumentError,
    StoreTimeoutError,
    UnsupportedError,
    UsageError,
)

DEFAULT_TIMEOUT = timedelta(seconds=300)
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

Value = str | bytes | bytearray | memoryview
"""Types that a store accepts; text is stored as UTF-8."""

_NAMES_SHOWN = 8


class Store:
    """Named bytes that all ranks of a job can read, write and wait for.

    Every blocking call gives up after its `timeout` argument, or after the store's own
    `timeout` (300 s unless set), with StoreTimeoutError. A store is a context manager that
    closes itself, and one store may be used by several threads at once.

    A key is text; torch's users may also give its UTF-8 bytes, so b"k" is the key "k".
    A subclass may have some of the methods only. A call of another method raises
    UnsupportedError, which is a NotImplementedError, too.

    Source: torch.distributed.Store, torch 2.13.
    """

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._timeout_s = to_seconds(timeout)
        self._closed = False

    @property
    def timeout(self) -> timedelta:
        """The time-out of blocking calls without a `timeout` argument."""
        return timedelta(seconds=min(self._timeout_s, timedelta.max.total_seconds() // 2))

    def set_timeout(self, timeout: Timeout) -> None:
        """Change the default timeout of this store.

        Raises:
            InvalidArgumentError: Negative (torch's TCPStore would then block for ever).
        """
        self._timeout_s = to_seconds(timeout)

    def set(self, key: str, value: Value) -> None:
        """Store `value` under `key`; a former value is replaced."""
        self._unsupported("set")

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        """Return the value of `key`, waiting until there is one."""
        self._unsupported("get")

    def add(self, key: str, amount: int) -> int:
        """Add to the decimal number stored under `key` and return the sum; missing counts as 0.

        Raises:
            StoreKeyError: The stored value is not an integer, or the sum leaves 64 bits.
        """
        self._unsupported("add")

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Store `desired` if `key` holds `expected`, or if it is missing and `expected` is empty.

        Returns `desired` if it was stored; else the present value, or `expected` if there is
        none.
        """
        self._unsupported("compare_set")

    def check(self, keys: Sequence[str], timeout: Timeout | None = None) -> bool:
        """Return whether every key has a value (or is a non-empty queue).

        Args:
            keys: The keys.
            timeout: How long to wait for the answer of a TCP server. Other stores ignore it.
                torch's `check` has no such argument.

        Raises:
            StoreTimeoutError: The server is connected, but does not answer.
        """
        self._unsupported("check")

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Block until `check(keys)` is true.

        Raises:
            StoreTimeoutError: The text names the keys that are missing.
        """
        self._unsupported("wait")

    def delete_key(self, key: str) -> bool:
        """Remove the value of `key`; return whether there was one."""
        self._unsupported("delete_key")

    def num_keys(self) -> int:
        """Return the number of keys with a value, internal keys included."""
        self._unsupported("num_keys")

    def clone(self) -> Store:
        """Return an independent handle to the same data."""
        self._unsupported("clone")

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Block until `world_size` callers are inside `barrier(key)`; reusable at once.

        A caller that gives up is no longer counted.

        Raises:
            StoreTimeoutError: Too few callers came.
        """
        self._unsupported("barrier")

    def close(self) -> None:
        """Release what the store holds; further calls raise ClosedError."""
        self._closed = True

    def append(self, key: str, value: Value) -> None:
        """Append `value` to what `key` holds; missing counts as empty."""
        self._unsupported("append")

    def list_keys(self) -> list[str]:
        """Return all keys with a value."""
        self._unsupported("list_keys")

    def queue_push(self, key: str, value: Value) -> None:
        """Append `value` to the queue `key`; queues and values do not share names."""
        self._unsupported("queue_push")

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        """Remove and return the oldest value of the queue `key`.

        Raises:
            QueueEmptyError: Empty, and `block` is false.
            StoreTimeoutError: Still empty at the time-out.
        """
        self._unsupported("queue_pop")

    def queue_len(self, key: str) -> int:
        """Return the number of values in the queue `key`."""
        self._unsupported("queue_len")

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        """Return the values of all keys, waiting until each has one."""
        deadline = self._deadline(timeout)
        return [self.get(key, deadline.remaining()) for key in check_keys(keys)]

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Store each value under the key at the same position.

        Raises:
            InvalidArgumentError: The lengths differ; nothing is stored.
        """
        for key, value in self._pairs(keys, values):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return whether append, multi_get and multi_set are single requests."""
        return False

    def _deadline(self, timeout: Timeout | None) -> Deadline:
        """Start the clock of one call; raise ClosedError if the store is closed."""
        self._check_open()
        return Deadline(self._timeout_s if timeout is None else timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self!r} is closed")

    def _pairs(self, keys: Sequence[str], values: Sequence[Value]) -> list[tuple[str, bytes]]:
        if len(keys) != len(values):
            raise InvalidArgumentError(
                f"multi_set got {len(keys)} keys but {len(values)} values; they must pair up"
            )
        return [
            (key, check_value(value)) for key, value in zip(check_keys(keys), values, strict=True)
        ]

    def _unsupported(self, operation: str) -> NoReturn:
        raise UnsupportedError(f"{type(self).__name__} has no {operation}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError(
            f"{type(self).__name__} cannot be pickled or copied: it belongs to this process",
            hint="open the store again in the other process, or call clone() in this process",
        )


def check_key(key: str | bytes) -> str:
    """Return the text of a key.

    Raises:
        ArgumentTypeError: Neither text nor bytes.
        InvalidArgumentError: Bytes that are not UTF-8, or a text that has no UTF-8.
    """
    if isinstance(key, str):
        # A key that is no UTF-8 comes from other programs, and `list_keys` shows it so.
        _encoded(key, "a store key", "surrogateescape")
        return key
    if not isinstance(key, bytes):
        raise ArgumentTypeError(
            f"a store key must be str or bytes, got {type(key).__name__}: {key!r}"
        )
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"a store key must be UTF-8, got {key!r}: {error}") from error


def check_keys(keys: Sequence[str | bytes]) -> list[str]:
    """Return a list of keys; a single string would be split into letters, so it is refused.

    Raises:
        ArgumentTypeError: Not a sequence of keys.
        InvalidArgumentError: As for `check_key`.
    """
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable):
        raise ArgumentTypeError(
            f"keys must be a list of str, got {type(keys).__name__}", hint="write [key]"
        )
    return [check_key(key) for key in keys]


def check_value(value: Value) -> bytes:
    """Return `value` as bytes.

    Raises:
        ArgumentTypeError: Neither text nor bytes.
        InvalidArgumentError: A text that has no UTF-8.
    """
    if isinstance(value, str):
        return _encoded(value, "a store value")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise ArgumentTypeError(f"a store value must be str or bytes, got {type(value).__name__}")


def check_host(host: str) -> str:
    """Return the name or address of a host.

    Raises:
        ArgumentTypeError: No text.
        InvalidArgumentError: A text that no host can have, such as "a..b".
    """
    if not isinstance(host, str):
        raise ArgumentTypeError(f"a host must be str, got {type(host).__name__}: {host!r}")
    try:
        # As the resolver of the socket module does.
        if "\0" not in host and host.encode("idna") is not None:
            return host
    except UnicodeError:
        pass
    raise InvalidArgumentError(f"{host!r} cannot be the name of a host")


def check_path(path: str | os.PathLike[str]) -> str:
    """Return the text of a path.

    Raises:
        ArgumentTypeError: No path, or a path of bytes.
        InvalidArgumentError: A text that no file can have as its name.
    """
    text = path.__fspath__() if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise ArgumentTypeError(f"a path must be str, got {type(path).__name__}: {path!r}")
    try:
        if b"\0" not in os.fsencode(text):
            return text
    except UnicodeEncodeError:
        pass
    raise InvalidArgumentError(f"{text!r} cannot be the path of a file")


def _encoded(text: str, what: str, errors: str = "strict") -> bytes:
    try:
        return text.encode(errors=errors)
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{what} must be UTF-8, got {text!r}: {error}") from error


def check_integer(amount: int, what: str) -> int:
    """Return `amount` if it is an integer of 64 bits.

    Raises:
        ArgumentTypeError: Not an integer.
        InvalidArgumentError: It does not fit.
    """
    try:
        number = int(amount.__index__())
    except AttributeError:
        raise ArgumentTypeError(f"{what} must be int, got {type(amount).__name__}") from None
    if not INT64_MIN <= number <= INT64_MAX:
        raise InvalidArgumentError(f"{what}={number} does not fit into 64 bits")
    return number


def check_world_size(world_size: int) -> int:
    """Return the size of a barrier.

    Raises:
        InvalidArgumentError: Less than 1.
    """
    if check_integer(world_size, "world_size") < 1:
        raise InvalidArgumentError(f"a barrier needs world_size >= 1, got {world_size}")
    return int(world_size)


def list_names(names: Iterable[str]) -> str:
    """Return quoted names for an error text, at most eight of them."""
    quoted = [repr(name) for name in names]
    more = len(quoted) - _NAMES_SHOWN
    return ", ".join(quoted[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def keys_timeout(
    store: Store, operation: str, keys: Sequence[str], missing: Sequence[str], timeout_s: float
) -> StoreTimeoutError:
    """Return the error of a wait that timed out."""
    return StoreTimeoutError(
        f"{operation} on {store!r} timed out after {timeout_s:g} s: "
        f"missing {list_names(missing)} ({len(keys) - len(missing)} of {len(keys)} present)",
        hint="the rank that should set it has not come that far, or it died",
    )


def require_outside(store: object, lock: Any) -> None:
    """Refuse a call of a signal handler inside a call of the same store.

    The table may be half changed, and the file or service may be in use by the outer call.

    Args:
        store: For the error.
        lock: An RLock or Condition that calls of the store hold.

    Raises:
        UsageError: The calling thread has the lock.
    """
    if has_lock(lock):
        raise UsageError(
            f"{store!r} is in a call of this thread already, which cannot go on before this call",
            hint="a signal handler may run inside a call. Set a flag there, and call the store "
            "when that call has ended",
        )


def barrier_timeout(
    store: Store, key: str, came: str, world_size: int, timeout_s: float
) -> StoreTimeoutError:
    """Return the error of a barrier that timed out; `came` is the number of callers inside."""
    return StoreTimeoutError(
        f"barrier {key!r} on {store!r} timed out after {timeout_s:g} s: "
        f"{came} of {world_size} callers arrived"
    )


def changed_too_often(store: Store, key: str, deadline: Deadline) -> StoreTimeoutError:
    """Return the error of a compare_set that others were always faster than."""
    return StoreTimeoutError(
        f"{key!r} on {store!r} was changed by others all the time, for {deadline.timeout_s:g} s"
    )
