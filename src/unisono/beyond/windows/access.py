"""One call on the part of one rank: its checks, its record, and the words of its errors."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from unisono.beyond.windows.memory import WindowMemory
from unisono.beyond.windows.part import Elements
from unisono.beyond.windows.requests import CLOSED, Kind, Requests
from unisono.core.base.buffers import BufferView, view
from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.integers import as_integer
from unisono.core.engines import Communicator
from unisono.core.engines.errors import MessageCall, message_error
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.transports.messages import Cancelled, Failure, LinkDown
from unisono.errors import ArgumentTypeError, ClosedError, InvalidArgumentError, UsageError

_SOURCES = ("get", "wait_signal")
# A rank that has an error closes its window at once; why comes by a message, a moment later.
_CAUSE_S = 0.5


class WindowCall(MessageCall):
    """A call of a window, for its errors; `tag` is the offset, -1 without one."""

    def __str__(self) -> str:
        words = []
        if self.data is not None:
            words.append(f"{self.data.dtype}[{', '.join(map(str, self.data.shape))}]")
        words.append(f"{'src' if self.op in _SOURCES else 'dst'}={self.peer}")
        if self.tag >= 0:
            words.append(f"offset={self.tag}")
        return f"{self.op}({', '.join(words)})"

    @property
    def missed(self) -> str:
        """What the other rank has not done when the time is over."""
        return "did not signal" if self.op == "wait_signal" else "did not answer"


class State(Protocol):
    """A window as its calls see it.

    Attributes:
        group: Its group.
        comm: The communicator of the group.
        memory: All parts; None before an array is registered.
        requests: For parts in the memory of other hosts; None if there are none.
        is_open: Whether this rank has not closed it.
    """

    group: ProcessGroup
    comm: Communicator
    memory: WindowMemory | None
    requests: Requests | None
    is_open: bool


class Access:
    """One call on the part of one rank, as a with block.

    Args:
        window: The window.
        op: Name of the method.
        rank: The rank in the group, unchecked.
        timeout: The group's if None.
        offset: Of the first element; None: the call moves no elements.
        tensor: The caller's array.
        writes: Whether the call writes into `tensor`.

    Attributes:
        rank: The rank in the group.
        part: Its part; None if it can be reached by requests only.
        array: [count] the elements of `tensor`.
        offset: As an int; -1 without one.
    """

    def __init__(
        self,
        window: State,
        op: str,
        rank: Any,
        timeout: Timeout | None,
        offset: Any = None,
        tensor: Any = None,
        *,
        writes: bool = False,
    ) -> None:
        self._window, self._op = window, op
        self.deadline = Deadline(window.group.timeout_s if timeout is None else timeout)
        memory = require_open(window, op)
        self.rank = checked_rank(window.group, op, rank)
        self.part = memory.parts.get(self.rank)
        self.offset = -1
        self._data: BufferView | None = None
        self.array: Elements = memory.data[window.group.rank()][:0]
        peer = window.comm.ranks[self.rank]
        if offset is not None:
            self._data = view(tensor, write=writes)
            self.array = self._data.array
            self.offset = self._checked(memory, as_integer(offset, f"{op}: offset"), peer)
        self.call = WindowCall(op, self._data, peer, self.offset)
        self._record = 0

    def _checked(self, memory: WindowMemory, offset: int, peer: int) -> int:
        assert self._data is not None
        dtype, count = self._data.dtype, math.prod(memory.shapes[self.rank])
        if dtype.name != memory.dtype.name:
            raise InvalidArgumentError(
                f"{self._op}: the array has dtype {dtype}, but the window of rank {peer} has "
                f"{memory.dtype}"
            )
        if not 0 <= offset <= count - self._data.count:
            raise InvalidArgumentError(
                f"{self._op} of {self._data.count} elements at offset {offset}: the window of "
                f"rank {peer} has {count} elements"
            )
        return offset

    def __enter__(self) -> Access:
        window, trace = self._window, self._window.comm.trace
        if trace is not None:
            dtype = None if self._data is None else self._data.dtype
            words = self._op, dtype, self.array.size, self.call.peer, self.offset
            self._record = trace.begin_message(*words)
        try:
            # A rank that has ended may have signalled before.
            if self._op != "wait_signal" and (end := end_of(window, self.rank)) is not None:
                raise end
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        comm = self._window.comm
        if isinstance(error, LinkDown) and error.reason == CLOSED:
            error = _cause(comm) or error
        worded = error
        if isinstance(error, (Cancelled, LinkDown, Failure, ClosedError)):
            worded = message_error(comm, self.call, error, self.deadline)
        if comm.trace is not None:
            comm.trace.end_message(self._record, worded, self.call.peer)
        if error is None:
            if self._data is not None:
                self._data.unpack()
        elif worded is not error and worded is not None:
            raise worded from None

    def send(self, kind: Kind, op: int = 0) -> None:
        """Send a request with the elements; there is no answer."""
        offset = max(self.offset, 0)
        self._requests.send(self.rank, kind, self.deadline, offset, self.array, op)

    def ask(self, kind: Kind, answer: Elements, data: Elements | None = None, op: int = 0) -> None:
        """Send a request with `data`, and wait until `answer` is filled."""
        sent = answer[:0] if data is None else data
        offset = max(self.offset, 0)
        self._requests.ask(self.rank, kind, self.deadline, answer, offset, sent, op)

    def flush(self) -> None:
        """Wait until the rank has handled all requests."""
        self._requests.flush(self.rank, self.deadline)

    @property
    def _requests(self) -> Requests:
        if (requests := self._window.requests) is None:
            # Its memory was mapped, so it closed its part a moment ago.
            raise LinkDown(self._window.comm.ranks[self.rank], CLOSED, left=True)
        return requests


def require_open(window: State, op: str) -> WindowMemory:
    """Return the parts of a window; raise an error if it cannot be used."""
    if not window.is_open:
        raise ClosedError(f"{op} of {window!r}, which is closed")
    if closed := window.comm.closed():
        raise ClosedError(f"{op} of {window!r}, which {closed}")
    if window.memory is None:
        raise UsageError(
            f"{op} of {window!r}, which has no array", hint="call tensor_register on all ranks"
        )
    return window.memory


def checked_rank(group: ProcessGroup, op: str, rank: Any) -> int:
    """Return a rank in the group; raise an error if it is none."""
    number = as_integer(rank, f"{op}: rank")
    if not 0 <= number < group.size():
        raise InvalidArgumentError(
            f"{op}: rank {number} is not in group '{group.name}' of {group.size()} ranks"
        )
    return number


def end_of(window: State, rank: int) -> BaseException | None:
    """Return why the part of a rank can be reached no more, or None."""
    comm, memory = window.comm, window.memory
    if comm.closed() or not window.is_open or memory is None:
        return ClosedError("the window was closed")
    if (failure := comm.transport.failure(comm.context)) is not None:
        return failure
    peer = comm.ranks[rank]
    if rank in memory.parts:
        if peer != comm.transport.rank and memory.parts[rank].is_closed():
            return LinkDown(peer, CLOSED, left=True)
        return comm.transport.down(peer)
    return None if window.requests is None else window.requests.ended.get(rank)


def _cause(comm: Communicator) -> Failure | None:
    """Return the failure that a closed part may come from; wait for it, but not for long."""
    deadline = Deadline(_CAUSE_S)
    while True:
        failure = comm.transport.failure(comm.context)
        if failure is not None or deadline.expired():
            return failure
        time.sleep(0.002)


def require_atomic(op: str, memory: WindowMemory) -> None:
    """Check that the elements are integers, for an atomic operation on one of them."""
    if memory.dtype.kind not in "iu":
        raise ArgumentTypeError(f"{op} needs a window of integers, got {memory.dtype}")


def scalar(op: str, value: Any, memory: WindowMemory) -> Elements:
    """Return an integer as an array of one element of the window's dtype."""
    storage: Any = memory.dtype.storage
    number, limits = as_integer(value, f"{op}: value"), np.iinfo(storage)
    if not limits.min <= number <= limits.max:
        raise InvalidArgumentError(f"{op}: {number} is no {memory.dtype}")
    return np.array([number], storage)
