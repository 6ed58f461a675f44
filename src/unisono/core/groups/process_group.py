"""ProcessGroup: an ordered set of ranks, with every operation as a method."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from threading import get_ident
from typing import Any

from unisono.core.backends import (
    BackendConfig,
    DeviceBackend,
    GroupSpec,
    make_backend,
)
from unisono.core.base import config
from unisono.core.base.deadline import Timeout, to_seconds
from unisono.core.base.integers import as_integer
from unisono.core.base.text import AbsentName
from unisono.core.engines.errors import closed_text
from unisono.core.groups.ending import (
    AT_EXIT,
    IN_CALL,
    Ending,
    close_backends,
    reason_of_error,
    waits_here,
)
from unisono.core.operations.methods import Operations
from unisono.core.operations.participation import CodePlace, Participation, number_of
from unisono.core.stores import PrefixStore, Store
from unisono.errors import (
    ArgumentTypeError,
    InvalidArgumentError,
    UsageError,
)


class ProcessGroup(Operations):
    """Ranks that communicate; has every operation as a method.

    Each method returns a `Work`, which is done unless `async_op` is set. A synchronous call raises
    its error at once. Roots and peers are ranks *in this group*. All methods share these
    arguments:

        async_op: Return at once; the arrays must stay untouched until the work is done.
        timeout: Seconds or timedelta; the group's timeout if None.
        algorithm: Name of an algorithm to use instead of the selected one.
        deterministic: Reduce in the order of ranks, so that the bits of the result do not depend
            on the algorithm; see docs/reference/reductions.md.

    All members must make the same calls in the same order. Threads: a collective call that
    overlaps a collective call of another thread raises UsageError; use one group per thread. Send
    and recv are matched by peer and tag, and may be called from any thread at any time.

    Args:
        store: Shared by exactly the members; wrap it in a PrefixStore if it has other users.
        rank: This process's rank in the group.
        size: Number of ranks.
        backend: "unisono", or one per device: "cpu:unisono,cuda:nccl". As in c10d, a timedelta
            here is the time-out.
        timeout: Default of every call: UNISONO_TIMEOUT if it is set, else 1,800 s.
        name: Name of the group in errors.
        options: Passed on to the backends.

    Raises:
        InvalidArgumentError: `rank` outside 0..size-1, or an unknown backend.
        RendezvousError: Some ranks did not come in time; names them.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        backend: str | timedelta | None = None,
        timeout: Timeout | None = None,
        name: str = "default",
        *,
        options: Any = None,
    ) -> None:
        if isinstance(backend, timedelta):
            if timeout is not None:
                raise InvalidArgumentError(f"ProcessGroup got two time-outs: {backend}, {timeout}")
            backend, timeout = None, backend
        rank, size = as_integer(rank, "rank"), as_integer(size, "size")
        if size < 1 or not 0 <= rank < size:
            raise InvalidArgumentError(f"rank {rank} of {size}: expected 0 <= rank < size")
        ranks, timeout_s = tuple(range(size)), group_timeout_s(timeout)
        self._open(GroupSpec(store, rank, size, ranks, name, "0", timeout_s, options), backend)

    @classmethod
    def from_spec(
        cls, spec: GroupSpec, backend: str | None = None, parent: ProcessGroup | None = None
    ) -> ProcessGroup:
        """Make a group whose global ranks and key are given, such as a sub-group.

        Args:
            spec: The group.
            backend: As for the constructor.
            parent: Group that has all ranks of the new group. Backends of the same name share its
                links; nothing is sent then.
        """
        group = cls.__new__(cls)
        group._open(spec, backend, parent)
        return group

    def _open(
        self, spec: GroupSpec, backend: str | None, parent: ProcessGroup | None = None
    ) -> None:
        """Set the attributes and make the backends; close them again if one fails."""
        self._spec = spec
        self.name, self.ranks = spec.name, spec.ranks
        self.config = BackendConfig(backend)
        self.backends = {}
        # Number of calls by kind, for keys and tags; the same on all members.
        self.counts: Counter[str] = Counter()
        self.stream_queue = None
        self.calls = None
        self._block = None
        self._part = Participation()
        self.port = None
        try:
            for device, name in self.config.device_backend_map.items():
                self.backends[device] = self._make_backend(name, device, parent)
            for control in [each.control for each in self.backends.values() if each.control]:
                self.backends.setdefault("cpu", control)
            number = max(backend.world_number for backend in self.backends.values())
            if number > 1:
                # The members must not find keys of the world before, such as its counters.
                store = PrefixStore(f"world/{number}", spec.store)
                self._spec = replace(spec, store=store)
            self._choose_way()
            # C++ sets the mark in `calls` when it runs a call, so it must be the same mark.
            self._part.guard = self.calls or self._part.guard
            self._ending = Ending(self, self.backends.values())
        except BaseException:
            close_backends(self.backends.values(), "because it was not made")
            raise

    def _make_backend(self, name: str, device: str, parent: ProcessGroup | None) -> DeviceBackend:
        spec = replace(self._spec, store=PrefixStore(device, self._spec.store))
        if parent is not None and parent.config.device_backend_map.get(device) == name:
            return parent.backends[device].split(spec)
        return make_backend(name, device, spec)

    # ---- identity -------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """The store that the members share."""
        return self._spec.store

    @property
    def key(self) -> str:
        """Name that no other group of the same world has."""
        return self._spec.key

    def set_timeout(self, timeout: Timeout) -> None:
        """Change the default time-out of later calls."""
        self._spec = replace(self._spec, timeout_s=to_seconds(timeout))
        for backend in self.backends.values():
            backend.set_timeout(self.timeout_s)

    def group_rank(self, global_rank: int) -> int:
        """Return the rank in this group of a global rank.

        Raises:
            ArgumentTypeError: Not an integer.
            InvalidArgumentError: Not a member; lists the members.
        """
        try:
            number = operator.index(global_rank)
        except TypeError:
            raise ArgumentTypeError(
                f"a global rank must be an integer, got {global_rank!r}"
            ) from None
        try:
            return self.ranks.index(number)
        except ValueError:
            raise InvalidArgumentError(
                f"global rank {number} is not in group '{self.name}' (ranks {list(self.ranks)})"
            ) from None

    # ---- c10d's other names ---------------------------------------------------------------

    @property
    def group_desc(self) -> str:
        """c10d's name of `name`, the name of the group in errors."""
        return self.name

    @property
    def bound_device_id(self) -> None:
        """The device that c10d binds a group to; always None here."""
        return None

    def get_group_store(self) -> Store:
        """Return the store that the members share."""
        return self._spec.store

    def shutdown(self) -> None:
        """c10d's name of `close`."""
        self.close()

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collective calls that this rank has made; torch's tools read it."""
        return number_of(self.backends)

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the numbers of all ranks start at 0."""

    @property
    def supports_window(self) -> bool:
        """Whether the group can have windows; those need a backend for CPU memory."""
        return "cpu" in self.backends

    def new_window(self, tensor: Any = None) -> Any:
        """Make a window of the group; see `unisono.new_window`."""
        import unisono  # the names of all layers, of which windows are above this one

        return unisono.new_window(tensor, self)

    # ---- life -----------------------------------------------------------------------------

    def ends_with(self, part: Any) -> None:
        """Close an object, by its method `close`, when the group is closed."""
        self._ending.parts.add(part)

    def abort(self, reason: str = "abort() was called") -> None:
        """End every call of the group with CollectiveAbortedError, on all ranks."""
        for backend in self.backends.values():
            backend.abort(f"{reason} on rank {self.ranks[self._spec.rank]}")

    def report_failure(self, text: str) -> None:
        """Report to the other ranks that this rank ends with an uncaught error."""
        for backend in self.backends.values():
            backend.abort(f"rank {self.ranks[self._spec.rank]} raised {text}", failed=True)

    def close(self) -> None:
        """Finish the collective calls that were made, then release links and threads.

        Each call ends within its time-out. Sends are finished, too, and receives end with
        ClosedError. If an exception is being handled, calls that have not ended are cancelled
        instead, and the other ranks get the reason. The method is not a collective, and a second
        call does nothing. A group that the program drops is closed on a thread.
        """
        self.end()

    def end(self, cancel: str = "") -> None:
        """Close as `close` does; cancel the calls that have not ended if there is a reason."""
        if not self.backends or not self._ending.begin():
            return
        self.port = None
        streams, cancel = self.stream_queue, cancel or self._reason_to_cancel()
        try:
            # Calls in streams begin in this group, so its backends stay until then.
            if streams is not None and not cancel:
                streams.drain()
        except BaseException as error:
            cancel = reason_of_error(error) or AT_EXIT
            raise
        finally:
            backends, self.backends = self.backends, {}
            if streams is not None and streams.close():
                for backend in backends.values():
                    backend.abort(closed_text(self.ranks[self._spec.rank], self.name, cancel))
            close_backends(backends.values(), cancel)
            if self._hooks is not None:
                self._hooks.clear()

    def _reason_to_cancel(self) -> str:
        """Return why `close` must not wait for calls that were made; "" if it may."""
        streams, backends = self.stream_queue, self.backends.values()
        if self.is_in_call():
            return IN_CALL
        if any(each.runs_here() for each in backends) or (streams and streams.runs_here()):
            return "in a callback of one of its calls"
        if streams and streams.waits_for_this_thread():
            return "in a function of a stream for which its calls wait"
        return self._ending.reason_to_cancel()

    def is_in_call(self) -> bool:
        """Whether the calling thread is in a collective call of the group, or waits for a call."""
        return bool(self._part.guard.caller == get_ident()) or waits_here()

    def refuse(
        self, op: str, error: BaseException, arguments: Sequence[Any] = (), **how: Any
    ) -> None:
        """Report to the ranks in the collective call `op` that this rank cannot make the call.

        They raise CollectiveMismatchError with the text of `error`; no array is changed and the
        group stays usable. The call counts in the order of calls on this rank too. If this rank
        cannot even report, its next call breaks the group.

        Args:
            op: Name of the function called here.
            error: The error that ends the call here before this rank takes part in it.
            arguments: Arguments of the call; the device of the arrays selects the backend.
            **how: As in any call.
        """
        if isinstance(error, UsageError):
            error.name_call(op)
        if (block := self._block_here()) is not None and block.takes_all:
            return  # The other ranks need not make the call.
        self._part.refuse(self, op, error, arguments, wait=how.get("async_op") is not True)

    def place(self) -> CodePlace:
        """Return this rank's place in the order of calls, for `is_known_to_all`."""
        return self._part.place(self)

    def is_known_to_all(self, error: BaseException, since: CodePlace) -> bool:
        """Return whether the other ranks have this error, or a report of it, in this block.

        Args:
            error: The exception that ends the block.
            since: The place at which the block began.
        """
        return self._part.is_known_to_all(self, error, since)

    def take_guard(self, op: str) -> int:
        """Refuse other threads' collective calls until `release_guard`, which takes the result.

        Raises:
            UsageError: Another thread is in a collective call of the group.
        """
        return self._part.take_guard(self, op)

    def release_guard(self, caller: int) -> None:
        """Undo `take_guard`, which has returned `caller`."""
        self._part.guard.caller = caller

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _HIDDEN]

    def __repr__(self) -> str:
        if not self.backends:
            return f"<ProcessGroup '{self.name}' closed>"
        parts = [f"rank={self._spec.rank}", f"size={self.size()}"]
        for device, backend in self.backends.items():
            parts.append(f"{device}={backend.name}")
            parts += [f"{key}={value}" for key, value in backend.info().items()]
            if broken := backend.broken():
                parts.append(f"broken: {broken}")
        return f"<ProcessGroup '{self.name}' {' '.join(parts)}>"


# Functions of a group that are no methods, so that a user looks for them here.
_FUNCTIONS = (
    "all_gather_object all_reduce_object broadcast_object_list gather_object irecv isend "
    "monitored_barrier neighbor_all_gather recv_object_list reduce_object scatter_object_list "
    "send_object_list sendrecv"
)
# What editors of a session do not offer: these, and what other modules of unisono call.
_HIDDEN = {
    *_FUNCTIONS.split(),
    *("calls", "counts", "end", "ends_with", "is_in_call", "is_known_to_all", "place", "port"),
    *("refuse", "release_guard", "report_failure", "stream_queue", "take_guard"),
}
for _name in _FUNCTIONS.split():
    setattr(ProcessGroup, _name, AbsentName(_name, f"use unisono.{_name}(..., group=...)"))


def group_timeout_s(timeout: Timeout | None) -> float:
    """Return the default time-out of a group's calls, in seconds."""
    return config.get_float("UNISONO_TIMEOUT") if timeout is None else to_seconds(timeout)
