"""Point-to-point calls of the CPU backend: one message each, matched by source and tag.

A plain call does not come by here: `Port` takes it from the public function to the rings of the
host, and only its end is here.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np

from unisono.backends.api import CallOptions, Pending
from unisono.base.buffers import BufferView, as_bytes, view
from unisono.base.deadline import Deadline
from unisono.base.types import DType, all_dtypes, dtype_of_numpy
from unisono.engines import Communicator
from unisono.engines.errors import broken_group_error
from unisono.errors import (
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    UnisonoError,
    UsageError,
)
from unisono.transports import Cancelled, Key, LinkDown, MessageMismatch, Transfer
from unisono.transports.messages import Failure, Kind
from unisono.transports.native_messages import NativeMessages, Told

__all__ = ["Port", "recv", "send"]


class _Said(NamedTuple):
    """A call, in the words of its errors."""

    op: str
    data: BufferView
    peer: int | None
    tag: int

    def __str__(self) -> str:
        whom = "any" if self.peer is None else self.peer
        role = "dst" if self.op == "send" else "src"
        shape = ", ".join(map(str, self.data.shape))
        return f"{self.op}({self.data.dtype}[{shape}], {role}={whom}, tag={self.tag})"


class _Message(Pending):
    """A send or receive under way; knows how to explain its failure."""

    __slots__ = ("_comm", "_said", "_transfer")

    def __init__(self, comm: Communicator, said: _Said, deadline: Deadline) -> None:
        super().__init__([said.data.owner], deadline, lambda: not comm.transport.may_wait())
        self._comm = comm
        self._said = said
        self._transfer: Transfer | None = None

    def follow(self, transfer: Transfer) -> None:
        """End when the transfer ends."""
        self._transfer = transfer

        def ended(transfer: Transfer) -> None:
            if transfer.error is None and self._said.op == "recv":
                self.source = transfer.peer
                self._said.data.unpack()
            self.finish(self.explain(transfer.error))

        transfer.add_callback(ended)

    def done(self) -> bool:
        # Who asks instead of waiting wants the message to come by itself.
        if not self._done and self._transfer is not None:
            self._transfer.watch()
        return self._done

    def add_callback(self, callback: Callable[[Self], object]) -> None:
        super().add_callback(callback)
        self.done()

    def wait_until(self, deadline: Deadline | None) -> bool:
        # Whoever waits for a transfer may be the one who moves its bytes.
        if self._transfer is not None:
            self._transfer.wait_until(deadline)
        return super().wait_until(deadline)

    def expire(self) -> None:
        """Give up; the group stays usable, and the memory is not touched any more."""
        if self._transfer is not None:
            self._transfer.cancel()

    def explain(self, error: BaseException | None) -> BaseException | None:
        """Return the error that a user reads."""
        comm, op, nbytes = self._comm, self._said.op, self._said.data.nbytes
        if isinstance(error, Failure):
            return broken_group_error(error, comm, op)
        if isinstance(error, LinkDown):
            return PeerLostError(
                f"{self._said} in group '{comm.name}' failed on {comm.here}: "
                f"rank {error.peer} was lost: {error.reason}",
                context=comm.where(op=op, peers=(error.peer,), nbytes=nbytes),
            )
        if isinstance(error, MessageMismatch):
            return self._mismatch(error)
        if isinstance(error, Cancelled):
            return self._late()
        if isinstance(error, ClosedError):
            return ClosedError(
                f"{self._said} in group '{comm.name}' ended on {comm.here}: the group "
                "was destroyed here",
                context=comm.where(op=op, nbytes=nbytes),
            )
        return error

    def _late(self) -> UnisonoError:
        assert self.deadline is not None
        comm, peer = self._comm, self._said.peer
        if peer is None:
            whom = "no rank sent a message that fits"
        elif rows := comm.transport.unreached().get(peer):
            whom = f"rank {peer} could not be reached ({'; '.join(rows)})"
        else:
            whom = f"rank {peer} did not match it"
        return CollectiveTimeoutError(
            f"{self._said} in group '{comm.name}' timed out after "
            f"{self.deadline} on {comm.here}: {whom}",
            context=comm.where(
                op=self._said.op,
                peers=() if peer is None else (peer,),
                nbytes=self._said.data.nbytes,
                usable=True,
            ),
        )

    def _mismatch(self, error: MessageMismatch) -> UnisonoError:
        comm = self._comm
        dtype = _NAMES.get(error.info)
        if dtype is None:
            got = f"{error.nbytes} bytes of an unknown dtype"
        else:
            got = f"{dtype.name}[{error.nbytes // dtype.itemsize}]"
        return CollectiveMismatchError(
            f"{self._said} in group '{comm.name}' does not match on {comm.here}: "
            f"rank {error.source} sent {got}",
            context=comm.where(
                op="recv", peers=(error.source,), nbytes=self._said.data.nbytes, usable=True
            ),
            hint="the message was dropped; the receiver's array is unchanged",
        )


def send(comm: Communicator, tensor: Any, peer: int, tag: int, options: CallOptions) -> Pending:
    """Start sending `tensor` to a rank of the group."""
    data = view(tensor, write=False)
    to = comm.ranks[peer]
    message = _open(comm, _Said("send", data, to, tag), options)
    key = Key(comm.context, Kind.P2P, tag)
    message.follow(comm.transport.send(to, key, as_bytes(data.array), _word(data.dtype)))
    return _settle(message, options)


def recv(
    comm: Communicator, tensor: Any, peer: int | None, tag: int, options: CallOptions
) -> Pending:
    """Start receiving into `tensor`, from a rank of the group or from any."""
    data = view(tensor, write=True)
    source = None if peer is None else comm.ranks[peer]
    message = _open(comm, _Said("recv", data, source, tag), options)
    key = Key(comm.context, Kind.P2P, tag)
    into, word = as_bytes(data.array), _word(data.dtype)
    message.follow(comm.transport.recv(source, key, into, word, comm.others))
    return _settle(message, options)


class Port:
    """Plain messages of one group, with little Python code on their way.

    All calls take a contiguous NumPy array of a common dtype, a global rank (None: any source)
    and a tag. They return None if the call is not of the plain kind: another array, an argument
    that may be wrong, a rank that is this one or on another host. Those that wait go from the
    public functions to C++ without coming by here; see `engines.repeat`.
    """

    def __init__(self, comm: Communicator, messages: NativeMessages) -> None:
        self._comm = comm
        self._messages = messages
        self._among = frozenset(comm.others)
        self._native = messages.port(comm.context, comm.ranks, _FORMATS)

    def serve(self, calls: Any) -> None:
        """Take the messages of public functions, which find it through their group's `calls`."""
        calls.set_messenger(self._native, self.failure)

    def isend(self, array: Any, peer: int | None, tag: int, owner: Any) -> Pending | None:
        """Send if nothing has to be waited for; None: nothing was sent.

        Args:
            array: The memory.
            peer: Global rank.
            tag: Of the message.
            owner: What the user called it with; keeps the memory alive.
        """
        if not self._native.try_send(array, peer, tag):
            return None
        sent = Pending([owner])
        sent.finish()
        return sent

    def irecv(
        self, array: Any, peer: int | None, tag: int, owner: Any, timeout_s: float
    ) -> Pending | None:
        """Start receiving; None: not of the plain kind. Arguments as for `isend`."""
        self._messages.hold(array)
        before = self._messages.native.last_number()
        try:
            told = self._native.start_recv(array, peer, tag)
            if told is None:
                return None
            data = view(array, write=False)
            data.owner = owner
            message = _Message(self._comm, _Said("recv", data, peer, tag), Deadline(timeout_s))
            message.follow(self._messages.begun(peer, self._comm.context, told, self._among))
            return message
        except BaseException:
            self._messages.abandon(array, before)
            raise
        finally:
            self._messages.release(array)

    def failure(
        self, op: str, told: Told, array: Any, peer: int | None, tag: int, timeout_s: float
    ) -> BaseException:
        """Return the error of a call that ended as `told`."""
        said = _Said(op, view(array, write=False), peer, tag)
        message = _Message(self._comm, said, Deadline(timeout_s))
        error = message.explain(self._messages.error(told, self._comm.context))
        assert error is not None
        return error


def _open(comm: Communicator, said: _Said, options: CallOptions) -> _Message:
    if comm.closed():
        raise ClosedError(f"{said} on group '{comm.name}', which {comm.closed()}")
    if not options.async_op and not comm.transport.may_wait():
        raise UsageError(
            f"{said} on group '{comm.name}' waits for the thread it runs on",
            hint="in a callback of a future, call isend or irecv",
        )
    return _Message(comm, said, options.deadline)


def _settle(message: _Message, options: CallOptions) -> _Message:
    if options.async_op:
        return message
    try:
        if not message.wait_until(options.deadline):
            message.expire()
    except BaseException:
        # Ctrl-C: the caller does not wait any more, so nothing may write to its array.
        message.expire()
        raise
    return message


def _word(dtype: DType) -> int:
    return zlib.crc32(dtype.name.encode())


_NAMES = {_word(dtype): dtype for dtype in all_dtypes()}

# What NumPy says in the buffer protocol -> what a message says.
_FORMATS = {
    np.empty(0, letter).data.format: _word(dtype_of_numpy(np.dtype(letter)))
    for letter in "?bBhHiIlLqQefdFD"
}
