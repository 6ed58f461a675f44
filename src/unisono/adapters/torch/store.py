"""A torch.distributed Store as a unisono Store, through which ranks of a torch program meet."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError

from unisono import errors
from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.net.unencrypted import check_call
from unisono.core.stores import Store
from unisono.core.stores.api import (
    Value,
    barrier_timeout,
    check_integer,
    check_key,
    check_keys,
    check_value,
    check_world_size,
    keys_timeout,
)

__all__ = ["TorchStore"]

# torch rounds time-outs to milliseconds, and zero means no limit.
_LEAST = timedelta(milliseconds=1)

# Up to this time-out a wait polls. A longer pause delays ranks, a shorter pause loads the store.
_SHORT_S, _PAUSE_S = 0.1, 0.005

_PLAIN_HINT = "import unisono as dist, whose store encrypts, or meet in a torch FileStore"


class TorchStore(Store):
    """The keys and values of a torch store; to close it leaves the torch store open.

    It has the operations that a rendezvous needs, so it has no queues. A store that is written in
    Python gets the arguments that torch's C++ gives, such as bytes for values. It needs `set`,
    `get`, and `wait` or `check`. Without `add` it has no barrier, and then it must be there until
    all ranks have met.

    Args:
        store: The torch store; its prefixes are kept.

    Source: torch.distributed.Store (2.13).
    """

    def __init__(self, store: Any) -> None:
        super().__init__(store.timeout)
        self._store = store

    @property
    def _inner(self) -> Any:
        return getattr(self._store, "_underlying_non_prefix_store", self._store)

    @property
    def host(self) -> str | None:
        """Host of the store's server; None if it has no server (a file, for example)."""
        return getattr(self._inner, "host", None)

    def check_encryption(self) -> None:
        """Refuse, or log once, that torch's store is called on another host.

        Raises:
            UnsupportedError: UNISONO_TLS is on or cert.
        """
        if self.host is not None:
            who, port = f"torch's {type(self._inner).__name__}", getattr(self._inner, "port", 0)
            check_call(who, self.host, port, _PLAIN_HINT)

    def set(self, key: str, value: Value) -> None:
        with self._errors():
            self._store.set(check_key(key), check_value(value))

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        self.wait([key], timeout)
        with self._errors():
            return check_value(self._store.get(key))

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        self.wait(keys, timeout)
        return super().multi_get(keys)

    def add(self, key: str, amount: int) -> int:
        amount = check_integer(amount, "amount")
        with self._errors(key):
            return int(self._store.add(check_key(key), amount))

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        expected, desired = check_value(expected), check_value(desired)
        try:
            with self._errors():
                return check_value(self._store.compare_set(check_key(key), expected, desired))
        except errors.UnsupportedError:
            # Not atomic. The only key for which ranks do this is their own.
            found = self.get(key) if self.check([key]) else b""
            if found != expected:
                return found
            self.set(key, desired)
            return desired

    def check(self, keys: Sequence[str], timeout: Timeout | None = None) -> bool:
        # torch's own time-out of the store holds, because its `check` takes no other.
        wanted = check_keys(keys)
        try:
            with self._errors():
                return bool(self._store.check(wanted))
        except errors.UnsupportedError:
            try:
                with self._errors():
                    self._store.wait(wanted, _LEAST)
            except errors.StoreError:
                return False
            return True

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        limit = self._deadline(timeout)
        wanted = check_keys(keys)
        # torch prints a warning for each wait that times out, and short waits usually do.
        if limit.remaining() <= _SHORT_S:
            self._poll(wanted, limit)
            return
        try:
            with self._errors():
                self._store.wait(wanted, max(timedelta(seconds=limit.remaining()), _LEAST))
        except errors.UnsupportedError:
            self._poll(wanted, limit)
        except errors.StoreError as error:
            # A FileStore of torch raises a RuntimeError for a time-out, so look at the deadline.
            if not isinstance(error, errors.StoreTimeoutError) and not limit.expired():
                raise
            missing = [key for key in wanted if not self.check([key])]
            raise keys_timeout(self, "wait", wanted, missing, limit.timeout_s) from error

    def _poll(self, wanted: list[str], limit: Deadline) -> None:
        while not self.check(wanted):
            if limit.expired():
                missing = [key for key in wanted if not self.check([key])]
                raise keys_timeout(self, "wait", wanted, missing, limit.timeout_s)
            time.sleep(_PAUSE_S)

    def delete_key(self, key: str) -> bool:
        with self._errors():
            return bool(self._store.delete_key(check_key(key)))

    def num_keys(self) -> int:
        with self._errors():
            return int(self._store.num_keys())

    def list_keys(self) -> list[str]:
        with self._errors():
            return list(self._store.list_keys())

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Block until `world_size` callers are inside; not every torch store has a barrier."""
        limit, world_size = self._deadline(timeout), check_world_size(world_size)
        came = self.add(f"{key}/came", 1)
        done = f"{key}/done/{(came - 1) // world_size}"
        if came % world_size == 0:
            self.set(done, "1")
        try:
            self.wait([done], limit.remaining())
        except errors.StoreTimeoutError:
            left = self.add(f"{key}/came", -1) + 1
            raise barrier_timeout(self, key, str(left), world_size, limit.timeout_s) from None

    def clone(self) -> TorchStore:
        """Return an independent handle to the same data."""
        other = TorchStore(self._store.clone())
        other.set_timeout(self.timeout)
        return other

    @contextlib.contextmanager
    def _errors(self, key: str = "") -> Iterator[None]:
        self._check_open()
        try:
            yield
        except DistStoreError as error:
            raise errors.StoreTimeoutError(f"{self!r}: {error}") from error
        except DistNetworkError as error:
            raise errors.StoreConnectionError(f"{self!r}: {error}") from error
        except errors.UnisonoError:
            raise
        except ValueError as error:
            raise errors.StoreKeyError(f"key {key!r} on {self!r} holds no number") from error
        except Exception as error:
            if isinstance(error, NotImplementedError) or _is_missing(error):
                raise errors.UnsupportedError(f"{self!r} lacks an operation: {error}") from error
            # A store in Python raises what its author wanted.
            raise errors.StoreError(f"{self!r}: {type(error).__name__}: {error}") from error

    def __repr__(self) -> str:
        return f"<TorchStore on {type(self._store).__name__}>"


def _is_missing(error: Exception) -> bool:
    """Return whether torch reports that a store in Python lacks the method that was called."""
    text = str(error)
    return "pure virtual function" in text or "Not implemented" in text
