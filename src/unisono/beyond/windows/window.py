"""Windows: memory of each rank that the other ranks of a group read, write and signal."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Self

import numpy as np

from unisono.beyond.windows.access import (
    Access,
    checked_rank,
    end_of,
    require_atomic,
    require_open,
    scalar,
)
from unisono.beyond.windows.memory import WindowMemory, share
from unisono.beyond.windows.names import WindowAttr
from unisono.beyond.windows.part import Elements, WindowPart
from unisono.beyond.windows.requests import Kind, Requests
from unisono.core.base.buffers import BufferView, is_torch, view
from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.threads.completion import Pending
from unisono.core.base.threads.streams import on_host
from unisono.core.base.types import (
    RedOpType,
    ReduceOp,
    as_reduce_op,
    numpy_dtype,
    require_reducible,
)
from unisono.core.c10d.objects.call import ObjectCall
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import require_group
from unisono.core.operations.c10d_methods import GROUP_DEFAULT
from unisono.core.operations.work import Work
from unisono.core.transports.messages import Cancelled
from unisono.errors import ArgumentTypeError, ClosedError, UnsupportedError, UsageError

# How long a wait sleeps before it looks whether its peer lives. Longer: a lost rank is detected
# later. Shorter: a blocked rank uses more of the CPU.
_SLICE_S = 0.02

_DONE = Work(Pending(done=True), "put")

_with_near: weakref.WeakSet[Window] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In the child of a fork: take all calls from C++, which does not know that it is a child."""
    for window in list(_with_near):
        window._near = {}


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


class Window:
    """Memory of each rank that the other ranks of a group reach without its help.

        window = dist.new_window(np.zeros(8))
        window.put(values, 1, offset=4)     # rank 1 makes no call
        window.signal(1)

        window.wait_signal(0)               # on rank 1: the values are in window.local

    Ranks are ranks in the group, as in all methods of a group. An offset counts elements of the
    target's part as if it was flat. Parts may have different shapes, and have one dtype.

    A signal comes after what its rank has put before. `flush` and `fence` wait until it is there.

    accumulate, fetch_add and compare_and_swap are atomic for each element, among themselves. put
    and get are atomic for one element of 4 or 8 bytes.

    On one host the ranks share the memory. Between hosts a request is a message, which a thread of
    the target handles. A window ends with its group, or with `close`; calls of other ranks on the
    part then raise PeerLostError.

    Attributes:
        local: This rank's part: an array of the shape and dtype of the registered one. It is a
            tensor of torch if that was one.

    Source: c10d's Window (torch's main line after 2.13); MPI 4.1, chapter 12.
    """

    def __init__(self, group: ProcessGroup) -> None:
        if not group.backends:
            raise ClosedError(f"new_window in group '{group.name}', which was destroyed")
        cpu: Any = group.backends.get("cpu")
        if not hasattr(cpu, "comm"):
            raise UnsupportedError(
                f"new_window: group '{group.name}' has no backend for CPU memory",
                hint='make it with backend="cpu:unisono,cuda:nccl"',
            )
        self.group, self.comm = group, cpu.comm
        self.memory: WindowMemory | None = None
        self.requests: Requests | None = None
        self.is_open = True
        self.local: Any = None
        self._me = group.rank()
        # The parts whose calls C++ checks and records.
        self._near: dict[int, Any] = {}
        self.lock = threading.RLock()
        self._taken = [0] * group.size()  # signals of each rank that were waited for
        # The ranks whose memory this rank has changed since it last saw that they live.
        self._touched: set[int] = set()
        self._close: Callable[[], object] = int

    # ---- life -----------------------------------------------------------------------------

    def tensor_register(
        self, tensor: Any, owning: bool = True, *, timeout: Timeout | None = None
    ) -> None:
        """Make this rank's part from an array or tensor; a collective call.

        The part has its shape, dtype and values. A tensor of torch moves into the part: its memory
        is the part from now on. A NumPy array cannot move; use `local` in its place.

        Args:
            tensor: May have another shape on each rank.
            owning: For c10d's scripts; the window always keeps the memory.
            timeout: Of the call; the group's if None.

        Raises:
            CollectiveMismatchError: Ranks disagree about the dtype, or an argument is wrong.
            UsageError: The window has an array already.
            CollectiveError: A rank cannot get the memory; raised on all ranks.
            CollectiveTimeoutError, PeerLostError: See `unisono.errors`.
        """
        group = self.group
        with ObjectCall(group, "new_window", timeout, None) as call:
            given: list[BufferView] = []

            def check() -> None:
                if self.memory is not None or not self.is_open:
                    raise UsageError(f"tensor_register: {self!r} has had an array already")
                given.append(view(tensor, write=False))

            call.check(check)
            data = given[0]
            call.label = f"new_window({data.dtype})"
            memory = share(group, self.comm, call, data.shape, data.dtype)
            me, number = self._me, group.counts["windows"]
            group.counts["windows"] += 1
            memory.data[me][:] = data.array
            part = memory.parts[me]
            if memory.apart:
                words = number, part, memory.data[me], sorted(memory.apart)
                self.requests = Requests(self.comm, *words)
            self.memory, self.local = memory, _shaped(memory.data[me], data, data.shape)
            if is_torch(tensor):
                tensor.data = self.local
            self._close = weakref.finalize(self, _close, os.getpid(), part, self.requests)
            group.ends_with(self)
            if not isinstance(part, WindowPart):
                self._near = memory.parts
                _with_near.add(self)
            # No rank may put before all have copied their values.
            group.barrier(timeout=call.remaining_s, _label=call.label)

    def tensor_deregister(self) -> None:
        """Wait for all ranks, and close the window; a collective call. `local` stays valid."""
        self.fence()
        self.close()

    def close(self) -> None:
        """End this rank's part; `local` stays valid. A second call does nothing."""
        self.is_open, self._near = False, {}
        self._close()

    # ---- data -----------------------------------------------------------------------------

    def put(
        self,
        tensor: Any,
        dst_rank: int,
        offset: int = 0,
        async_op: bool = False,
        opts: Any = None,
        *,
        timeout: Timeout | None = None,
        target_offset_nelems: int | None = None,
    ) -> Work:
        """Write an array into the part of a rank. `tensor` may be changed after the return.

        Args:
            tensor: Of the window's dtype.
            dst_rank: The rank.
            offset: Of the first element in its part.
            async_op: For c10d's scripts; the result is a work that is done in any case.
            opts: c10d's `PutOptions`.
            timeout: The group's if None; matters only if the target is far behind.
            target_offset_nelems: c10d's name of `offset`.

        Raises:
            ArgumentTypeError, InvalidArgumentError: A wrong rank, dtype or offset.
            ClosedError: The window or its group was closed.
            PeerLostError: The target has ended, or has closed its part.
            CollectiveTimeoutError: The target is far behind, and does not go on.
        """
        at = offset if target_offset_nelems is None else target_offset_nelems
        part = self._near_part(dst_rank, timeout, opts)
        if part is not None and part.put_now(tensor, at):
            self._touched.add(dst_rank)
            return _DONE
        with Access(self, "put", dst_rank, _limit(opts, timeout), at, tensor) as call:
            self._touched.add(call.rank)
            if call.part is None or not call.part.put(call.array, call.offset):
                call.send(Kind.PUT)
        return _DONE

    def get(
        self, tensor: Any, src_rank: int, offset: int = 0, *, timeout: Timeout | None = None
    ) -> None:
        """Read elements of the part of a rank into an array; errors as of `put`."""
        part = self._near_part(src_rank, timeout)
        if part is not None and part.get_now(tensor, offset):
            return
        with Access(self, "get", src_rank, timeout, offset, tensor, writes=True) as call:
            if call.part is None or not call.part.get(call.array, call.offset):
                call.ask(Kind.GET, call.array)

    def accumulate(
        self,
        tensor: Any,
        dst_rank: int,
        op: ReduceOp = ReduceOp.SUM,
        offset: int = 0,
        *,
        timeout: Timeout | None = None,
    ) -> None:
        """Set each element of a part to element (op) array, atomically.

        Args:
            tensor: Of the window's dtype.
            dst_rank: The rank.
            op: SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR.
            offset: Of the first element in its part.
            timeout: As of `put`.

        Raises:
            UnsupportedError: The op is not defined on the dtype, or not atomic.
            UnisonoError: As of `put`.
        """
        reduce, memory = as_reduce_op(op), require_open(self, "accumulate")
        require_reducible(memory.dtype, reduce)
        is_wide = memory.dtype.itemsize > 8 and reduce.op is not RedOpType.SUM
        if is_wide or reduce.op in (RedOpType.AVG, RedOpType.PREMUL_SUM):
            raise UnsupportedError(f"accumulate: {reduce.name} of {memory.dtype} is not atomic")
        code = int(reduce.op)
        with Access(self, "accumulate", dst_rank, timeout, offset, tensor) as call:
            self._touched.add(call.rank)
            if call.part is None or not call.part.apply(call.array, None, call.offset, code):
                call.send(Kind.APPLY, code)

    def fetch_add(
        self, value: int, dst_rank: int, offset: int = 0, *, timeout: Timeout | None = None
    ) -> int:
        """Add to an integer of a part, atomically; return what it was before.

        The result wraps around at the limits of the dtype. Errors are those of `put`.
        """
        part = self._near_part(dst_rank, timeout)
        if part is not None and (before := part.fetch_add_now(value, offset)) is not None:
            return int(before)
        memory = require_open(self, "fetch_add")
        require_atomic("fetch_add", memory)
        added, code = scalar("fetch_add", value, memory), int(RedOpType.SUM)
        old = np.empty_like(added)
        with Access(self, "fetch_add", dst_rank, timeout, offset, added) as call:
            if call.part is None or not call.part.apply(added, old, call.offset, code):
                call.ask(Kind.APPLY, old, added, code)
        return int(old[0])

    def compare_and_swap(
        self,
        expected: int,
        desired: int,
        dst_rank: int,
        offset: int = 0,
        *,
        timeout: Timeout | None = None,
    ) -> int:
        """Set an integer of a part to `desired` if it is `expected`, atomically.

        Returns:
            What it was: `expected` if it was set. Errors are those of `put`.
        """
        memory = require_open(self, "compare_and_swap")
        require_atomic("compare_and_swap", memory)
        old, new = (scalar("compare_and_swap", each, memory) for each in (expected, desired))
        with Access(self, "compare_and_swap", dst_rank, timeout, offset, old) as call:
            if call.part is None or not call.part.compare_and_swap(old, new, call.offset):
                call.ask(Kind.SWAP, old, np.concatenate([old, new]))
        return int(old[0])

    def map_remote_tensor(self, rank: int) -> Any:
        """Return the part of a rank of this host as an array or tensor, without a copy.

        Raises:
            UnsupportedError: The rank is on another host, or ranks share no memory.
        """
        memory = require_open(self, "map_remote_tensor")
        rank = checked_rank(self.group, "map_remote_tensor", rank)
        if rank not in memory.data:
            raise UnsupportedError(
                f"map_remote_tensor: this rank shares no memory with rank {self.comm.ranks[rank]}: "
                f"{memory.apart[rank]}",
                hint="read its part with get",
            )
        return _shaped(memory.data[rank], self.local, memory.shapes[rank])

    def get_attr(self, peer_rank: int) -> WindowAttr:
        """Return c10d's attributes of the part of a rank."""
        checked_rank(self.group, "get_attr", peer_rank)
        return WindowAttr()

    # ---- order ----------------------------------------------------------------------------

    def signal(
        self,
        peer_rank: int,
        async_op: bool = False,
        opts: Any = None,
        *,
        timeout: Timeout | None = None,
    ) -> Work:
        """Signal a rank, which then sees what this rank has put into its part before.

        Args and errors are those of `put`.
        """
        part = self._near_part(peer_rank, timeout, opts)
        if part is not None and part.signal_now(self._me):
            return _DONE
        with Access(self, "signal", peer_rank, _limit(opts, timeout)) as call:
            if call.part is not None:
                call.part.signal(self._me)
            else:
                call.send(Kind.SIGNAL)
        return _DONE

    def wait_signal(
        self,
        peer_rank: int,
        async_op: bool = False,
        opts: Any = None,
        *,
        timeout: Timeout | None = None,
    ) -> Work:
        """Wait for a signal of a rank. Each signal ends one wait; signals are counted by rank.

        Args:
            peer_rank: The rank that signals.
            async_op: Return a work, whose `wait` waits.
            opts: c10d's `WaitSignalOptions`.
            timeout: The group's if None.

        Raises:
            CollectiveTimeoutError: The rank did not signal in time.
            PeerLostError: It has ended, or has closed its part, without a signal.
            UnisonoError: As of `put`.
        """
        if not isinstance(async_op, bool):
            raise ArgumentTypeError(
                f"wait_signal: async_op must be a bool, got {async_op!r}",
                hint="write timeout=... for a time-out",
            )
        limit = _limit(opts, timeout)
        is_near = type(peer_rank) is int and peer_rank in self._near
        soon_s = min(_SLICE_S, self.group.timeout_s)
        if is_near and not async_op and limit is None and self.take_signal(peer_rank, soon_s, True):
            return _DONE
        call = Access(self, "wait_signal", peer_rank, limit)
        pending = _Awaited(self, call)
        if not async_op:
            pending.wait_until(None)
            if pending.error is not None:
                raise pending.error
        return Work(pending, "wait_signal", self)

    def flush(self, rank: int | None = None, *, timeout: Timeout | None = None) -> None:
        """Wait until what this rank has put and accumulated is in the parts of one or all ranks.

        Raises:
            PeerLostError: A target has ended, or has closed its part.
            CollectiveTimeoutError: It did not answer in time.
        """
        late = set() if self.requests is None or rank is not None else self.requests.late()
        for each in sorted(self._touched | late) if rank is None else [rank]:
            with Access(self, "flush", each, timeout) as call:
                if call.part is None:
                    call.flush()
                self._touched.discard(call.rank)

    @on_host
    def fence(self, *, timeout: Timeout | None = None) -> None:
        """Flush, and wait for all ranks; a collective call.

        What any rank has put before the call is then in all parts.

        Raises:
            UnisonoError: As of `flush` and of a barrier.
        """
        require_open(self, "fence")
        deadline = Deadline(self.group.timeout_s if timeout is None else timeout)
        self.flush(timeout=deadline.remaining())
        self.group.barrier(timeout=deadline.remaining(), _label="Window.fence")

    def take_signal(
        self, rank: int, limit_s: float, records: bool = False, awaited: _Awaited | None = None
    ) -> bool:
        """Take a signal of a rank that nobody has waited for; wait for one, but not for long.

        Args:
            rank: The rank in the group.
            limit_s: How long it waits.
            records: Whether C++ records the call.
            awaited: Takes one signal, by whichever thread; True also if another thread ended it.
        """
        assert self.memory is not None
        part = self.memory.parts[self._me]
        taken, wait = self._taken[rank], part.wait_now if records else part.wait_signal
        if wait(rank, taken, limit_s, self.memory.is_crowded) <= taken and awaited is None:
            return False
        with self.lock:
            if awaited is None or not awaited.is_over:
                if part.signals(rank) <= self._taken[rank]:
                    return False  # another thread has taken it
                self._taken[rank] += 1
                if awaited is not None:
                    awaited.is_over = True
            return True

    def _near_part(self, rank: Any, timeout: Timeout | None, opts: Any = None) -> Any:
        """Return the part of a rank if C++ can make a call on it, or None."""
        part = self._near.get(rank) if type(rank) is int else None
        if part is None or timeout is not None or opts is not None:
            return None  # Python checks the time-out
        if self.comm.transport.down(self.comm.ranks[rank]) is not None:
            return None
        return part if self.comm.transport.failure(self.comm.context) is None else None

    def __repr__(self) -> str:
        what = "no array" if self.memory is None else str(self.memory.dtype)
        return f"<Window of {what} in group '{self.group.name}'>"


class _Awaited(Pending):
    """The end of a wait for a signal.

    Several threads may wait for it. The first of them that takes a signal or has an error sets
    `is_over` under the lock of the window, and all finish it with that result.
    """

    __slots__ = ("_access", "_window", "is_over")

    def __init__(self, window: Window, call: Access) -> None:
        super().__init__()
        self._window, self._access, self.is_over = window, call, False

    def done(self) -> bool:
        window, rank = self._window, self._access.rank
        if not self._done and window.take_signal(rank, 0.0, awaited=self):
            self.finish(self.error)
        elif not self._done and end_of(window, rank) is not None:
            self.wait_until(None)
        return self._done

    def wait_until(self, deadline: Deadline | None) -> bool:
        window, call = self._window, self._access
        own, rank = call.deadline, call.rank
        try:
            with call:
                while not window.take_signal(rank, _slice_s(own), awaited=self):
                    window.comm.transport.notice_end(call.call.peer)
                    # Again: the rank may have signalled just before it ended.
                    end = end_of(window, rank)
                    if end and not window.take_signal(rank, 0.0, awaited=self):
                        raise end
                    if end is None and own.expired():
                        raise Cancelled
                    if deadline is not None and deadline.expired():
                        return False
        except Exception as error:
            with window.lock:
                if not self.is_over:
                    self.is_over, self.error = True, error
        self.finish(self.error)
        return True

    def add_callback(self, callback: Callable[[Self], object]) -> None:
        super().add_callback(callback)
        if not self._done:
            wait = threading.Thread(target=self.wait_until, args=(None,), daemon=True)
            wait.start()


def new_window(x: Any = None, group: Any = None, *, timeout: Timeout | None = None) -> Window:
    """Make a window: memory of each rank that the others reach without its help; collective.

        window = dist.new_window(np.zeros(8))
        window.fetch_add(1, 0)

    Args:
        x: Array or tensor from which this rank's part is made; see `Window.tensor_register`. None:
            the window has no part, and the call is not collective, until `tensor_register`.
        group: The ranks; the default group if None.
        timeout: Of the call; the group's if None.

    Raises:
        UnsupportedError: The group has no backend for CPU memory.
        UnisonoError: As of `Window.tensor_register`.
    """
    window = Window(require_group(group))
    if x is not None:
        window.tensor_register(x, timeout=timeout)
    return window


def _slice_s(deadline: Deadline) -> float:
    return min(_SLICE_S, deadline.remaining())


def _limit(opts: Any, timeout: Timeout | None) -> Timeout | None:
    """Return the time-out of a call that takes c10d's options, too."""
    if opts is None:
        return timeout
    given: timedelta = opts.timeout
    return timeout if given == GROUP_DEFAULT else given


def _shaped(data: Elements, like: Any, shape: tuple[int, ...]) -> Any:
    """Return elements as an array or tensor of this shape, of the kind of a view's owner."""
    owner: Any = like.owner if isinstance(like, BufferView) else like
    if is_torch(owner):
        torch = sys.modules["torch"]
        return torch.from_numpy(data.view(np.uint8)).view(owner.dtype).reshape(shape)
    if isinstance(owner, np.ndarray):
        return data.view(owner.dtype.newbyteorder("=")).reshape(shape)
    return data.view(numpy_dtype(like.dtype)).reshape(shape)


def _close(pid: int, part: Any, requests: Requests | None) -> None:
    """End a part. Not in the child of a fork, because the memory is that of the parent."""
    if pid == os.getpid():
        part.close()
        if requests is not None:
            requests.close()
