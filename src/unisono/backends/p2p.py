"""Point-to-point calls of the CPU backend: one message each, matched by source and tag."""

from __future__ import annotations

import zlib
from typing import Any

from unisono.backends.api import CallOptions, Pending
from unisono.base.buffers import BufferView, as_bytes, view
from unisono.base.deadline import Deadline
from unisono.base.types import all_dtypes
from unisono.engines import Communicator
from unisono.engines.failures import broken_group_error
from unisono.errors import (
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    UnisonoError,
    UsageError,
)
from unisono.transports import Cancelled, Key, LinkDown, MessageMismatch, Transfer
from unisono.transports.api import Failure, Kind

__all__ = ["recv", "send"]


class _Message(Pending):
    """A send or receive under way; knows how to explain its failure."""

    __slots__ = ("_comm", "_text", "_transfer", "_view")

    def __init__(self, comm: Communicator, data: BufferView, text: str, deadline: Deadline) -> None:
        super().__init__([data.owner], deadline, lambda: not comm.transport.may_wait())
        self._comm = comm
        self._view = data
        self._text = text
        self._transfer: Transfer | None = None

    def follow(self, transfer: Transfer, *, receive: bool) -> None:
        """End when the transfer ends."""
        self._transfer = transfer

        def ended(transfer: Transfer) -> None:
            if receive and transfer.error is None:
                self.source = transfer.peer
                self._view.unpack()
            self.finish(self._explain(transfer.error))

        transfer.add_callback(ended)

    def expire(self) -> None:
        """Give up; the group stays usable, and the memory is not touched any more."""
        if self._transfer is not None:
            self._comm.transport.cancel(self._transfer)

    def _explain(self, error: BaseException | None) -> BaseException | None:
        comm = self._comm
        op = self._text.partition("(")[0]
        if isinstance(error, Failure):
            return broken_group_error(error, comm, op)
        if isinstance(error, LinkDown):
            return PeerLostError(
                f"{self._text} in group '{comm.name}' failed on {comm.here}: "
                f"rank {error.peer} was lost: {error.reason}",
                context=comm.where(op=op, peers=(error.peer,), nbytes=self._view.nbytes),
            )
        if isinstance(error, MessageMismatch):
            return self._mismatch(error)
        if isinstance(error, Cancelled):
            return self._late()
        if isinstance(error, ClosedError):
            return ClosedError(
                f"{self._text} in group '{comm.name}' ended on {comm.here}: the group "
                "was destroyed here",
                context=comm.where(op=op, nbytes=self._view.nbytes),
            )
        return error

    def _late(self) -> UnisonoError:
        assert self._transfer is not None
        assert self.deadline is not None
        comm, peer = self._comm, self._transfer.peer
        if peer is None:
            whom = "no rank sent a message that fits"
        elif rows := comm.transport.unreached().get(peer):
            whom = f"rank {peer} could not be reached ({'; '.join(rows)})"
        else:
            whom = f"rank {peer} did not match it"
        return CollectiveTimeoutError(
            f"{self._text} in group '{comm.name}' timed out after "
            f"{self.deadline.timeout_s:.1f} s on {comm.here}: {whom}",
            context=comm.where(
                op=self._text.partition("(")[0],
                peers=() if peer is None else (peer,),
                nbytes=self._view.nbytes,
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
            f"{self._text} in group '{comm.name}' does not match on {comm.here}: "
            f"rank {error.source} sent {got}",
            context=comm.where(
                op="recv", peers=(error.source,), nbytes=self._view.nbytes, usable=True
            ),
            hint="the message was dropped; the receiver's array is unchanged",
        )


def send(comm: Communicator, tensor: Any, peer: int, tag: int, options: CallOptions) -> Pending:
    """Start sending `tensor` to a rank of the group."""
    data = view(tensor, write=False)
    to = comm.ranks[peer]
    message = _open(comm, data, f"send({_text(data)}, dst={to}, tag={tag})", options)
    key = Key(comm.context, Kind.P2P, tag)
    transfer = comm.transport.send(to, key, as_bytes(data.array), _word(data))
    message.follow(transfer, receive=False)
    return _settle(message, options)


def recv(
    comm: Communicator, tensor: Any, peer: int | None, tag: int, options: CallOptions
) -> Pending:
    """Start receiving into `tensor`, from a rank of the group or from any."""
    data = view(tensor, write=True)
    source = None if peer is None else comm.ranks[peer]
    shown = "any" if source is None else source
    message = _open(comm, data, f"recv({_text(data)}, src={shown}, tag={tag})", options)
    key = Key(comm.context, Kind.P2P, tag)
    transfer = comm.transport.recv(source, key, as_bytes(data.array), _word(data), comm.others)
    message.follow(transfer, receive=True)
    return _settle(message, options)


def _open(comm: Communicator, data: BufferView, text: str, options: CallOptions) -> _Message:
    if comm.closed():
        raise ClosedError(f"{text} on group '{comm.name}', which {comm.closed()}")
    if not options.async_op and not comm.transport.may_wait():
        raise UsageError(
            f"{text} on group '{comm.name}' waits for the thread it runs on",
            hint="in a callback of a future, call isend or irecv",
        )
    return _Message(comm, data, text, options.deadline)


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


def _text(data: BufferView) -> str:
    return f"{data.dtype}[{', '.join(map(str, data.shape))}]"


def _word(data: BufferView) -> int:
    return zlib.crc32(data.dtype.name.encode())


_NAMES = {zlib.crc32(dtype.name.encode()): dtype for dtype in all_dtypes()}
