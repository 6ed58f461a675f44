"""Point-to-point calls of the CPU backend: one message each, matched by source and tag.

A plain call does not run this code: `Port` takes the call from the public function to the rings of
the host. Only its failure is worded through this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np

from unisono.backends.api import CallOptions, Pending
from unisono.base.buffers import as_bytes, view
from unisono.base.deadline import Deadline
from unisono.base.types import PARTIAL, code_of, dtype_of_code, dtype_of_numpy, numpy_dtype
from unisono.engines import Communicator
from unisono.engines.errors import MessageCall, message_error
from unisono.errors import ClosedError, InvalidArgumentError, UsageError
from unisono.trace import number_of_kind, write_after_failure
from unisono.transports import Key, Transfer
from unisono.transports.messages import Failure, Kind, MessageInfo
from unisono.transports.native_transfer import Outcome, Started
from unisono.transports.transfers import ANYTHING, NOTHING

# Longer than a thread needs from the end of a transfer to the end of its call.
_FINISH_S = 5.0


class _Message(Pending):
    """A send or receive under way."""

    __slots__ = ("_comm", "_message_call", "_record", "_transfer")

    def __init__(self, comm: Communicator, call: MessageCall, deadline: Deadline) -> None:
        outputs = [] if call.data is None else [call.data.owner]
        super().__init__(outputs, deadline, lambda: not comm.transport.may_wait())
        self._comm = comm
        self._message_call = call
        self._record = _begin_record(comm, call)
        self._transfer: Transfer | None = None

    def follow(self, transfer: Transfer) -> None:
        """End when the transfer ends."""
        self._transfer = transfer

        def ended(transfer: Transfer) -> None:
            if transfer.error is None and self._message_call.op != "send":
                self._receive(transfer)
            error = message_error(self._comm, self._message_call, transfer.error, self.deadline)
            source = self._message_call.peer if self.source is None else self.source
            _end_record(self._comm, self._record, error, source)
            self.finish(error)

        transfer.add_callback(ended)

    def _receive(self, transfer: Transfer) -> None:
        """Set the results of a receive or probe."""
        data = self._message_call.data
        self.source, self.tag = transfer.peer, transfer.tag[1]
        if data is not None:
            self.count = transfer.nbytes // data.dtype.itemsize
            data.unpack()
            return
        dtype = dtype_of_code(transfer.info)
        self.count = transfer.nbytes // (1 if dtype is None else dtype.itemsize)
        if transfer.into is NOTHING:
            assert self.source is not None
            name = None if dtype is None else dtype.name
            found = MessageInfo(self.source, self.tag, name, self.count, transfer.nbytes)
            self.outputs.append(found)
        else:
            elements = np.asarray(transfer.into)
            self.outputs.append(elements if dtype is None else elements.view(numpy_dtype(dtype)))

    def done(self) -> bool:
        # A caller that polls does not move bytes, so another thread must.
        if not self._done and self._transfer is not None:
            self._transfer.watch()
        return self._done

    def add_callback(self, callback: Callable[[Self], object]) -> None:
        super().add_callback(callback)
        self.done()

    def wait_until(self, deadline: Deadline | None) -> bool:
        # A thread that waits for a transfer moves its bytes, so it must wait for the transfer.
        if self._transfer is not None:
            self._transfer.wait_until(deadline)
        return super().wait_until(deadline)

    def expire(self) -> None:
        """Cancel the call. The group stays usable, and the memory is not touched any more."""
        if self._transfer is not None:
            self._comm.transport.cancel(self._transfer)
            # A thread that has just ended the transfer may not have come to `finish` yet.
            super().wait_until(Deadline(_FINISH_S))


def send(comm: Communicator, tensor: Any, peer: int, tag: int, options: CallOptions) -> Pending:
    """Start sending `tensor` to a rank of the group."""
    data = view(tensor, write=False)
    to = comm.ranks[peer]
    message = _open(comm, MessageCall("send", data, to, tag), options)
    key = Key(comm.context, Kind.P2P, tag)
    if to == comm.transport.rank and not (
        options.async_op or comm.transport.messages.has_receive(to, key)
    ):
        raise InvalidArgumentError(
            f"send to this rank itself ({to}) would wait for its own receive",
            hint="use isend, or call irecv before",
        )
    message.follow(comm.transport.send(to, key, as_bytes(data.array), code_of(data.dtype)))
    return _wait_or_cancel(message, options)


def recv(
    comm: Communicator, tensor: Any, peer: int | None, tag: int, options: CallOptions
) -> Pending:
    """Start receiving into `tensor`, from a rank of the group or from any."""
    data = view(tensor, write=True)
    info = code_of(data.dtype) | (PARTIAL if options.partial else 0)
    call = MessageCall("recv", data, _global(comm, peer), tag)
    return _receive(comm, call, as_bytes(data.array), info, options)


def recv_array(comm: Communicator, peer: int | None, tag: int, options: CallOptions) -> Pending:
    """Start receiving a message of any size and dtype, into a new array."""
    call = MessageCall("recv_array", None, _global(comm, peer), tag)
    return _receive(comm, call, ANYTHING, 0, options)


def probe(comm: Communicator, peer: int | None, tag: int, options: CallOptions) -> Pending:
    """Start waiting for a message that a receive would take, and leave the message there."""
    call = MessageCall("probe", None, _global(comm, peer), tag)
    return _receive(comm, call, NOTHING, 0, options)


def _global(comm: Communicator, peer: int | None) -> int | None:
    return None if peer is None else comm.ranks[peer]


def _receive(
    comm: Communicator, call: MessageCall, into: memoryview, info: int, options: CallOptions
) -> Pending:
    message = _open(comm, call, options)
    key = Key(comm.context, Kind.P2P, call.tag)
    message.follow(comm.transport.recv(call.peer, key, into, info, comm.others))
    return _wait_or_cancel(message, options)


class _PlainReceive(Started, Pending):
    """A plain receive: the end of the call is that of the message, without a `Transfer` between."""

    __slots__ = (
        *("_array", "_comm", "_messages", "_quiet", "_tag", "among", "cause", "context"),
        *("number", "outcomes", "peer", "receives", "record"),
    )

    record: int

    def __init__(
        self, port: Port, array: Any, peer: int | None, tag: int, owner: Any, timeout_s: float
    ) -> None:
        super().__init__((owner,), Deadline(timeout_s), port.is_server)
        self._comm = comm = port.comm
        self._array = array
        self._tag = tag
        self.peer, self.context, self.among = peer, comm.context, port.among

    def is_ended_by(self, failure: Failure) -> bool:
        return True

    def end(self, outcome: Outcome, status: BaseException | None) -> None:
        if status is None:
            _, _, self.source, nbytes, _, self.tag, _ = outcome
            self.count = nbytes // self._array.itemsize
            _end_record(self._comm, self.record, None, self.source)
            self.finish()
            return
        data = view(self._array, write=False)
        data.owner = self.outputs[0]
        call = MessageCall("recv", data, self.peer, self._tag)
        error = message_error(self._comm, call, status, self.deadline)
        _end_record(self._comm, self.record, error, self.peer)
        self.finish(error)

    def done(self) -> bool:
        if not super().done():
            # A caller that polls does not move bytes, so another thread must.
            self.watch()
        return self._done

    def add_callback(self, callback: Callable[[Self], object]) -> None:
        super().add_callback(callback)
        self.done()

    def expire(self) -> None:
        """Cancel the receive. The group stays usable, and the memory is not touched any more."""
        if not self.done():
            self._messages.cancel(self)


class Port:
    """Plain messages of one group, with little Python code on their way.

    All calls take a contiguous NumPy array of a common dtype, a global rank (None: any source)
    and a tag. They return None or False if the call is not plain, for example with another kind of
    array. A send to this rank itself or to another host is not plain either. Calls that wait go
    from the public functions to C++ without this class; see `engines.functions`.

    Records and errors are made here, because the transport's `PlainMessages` know neither.

    Attributes:
        try_send: Send an array if this takes no wait; returns whether it was sent.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.among = frozenset(comm.others)
        messages = comm.transport.messages
        self.is_server = messages.is_server
        self._plain = messages.plain(comm.context, comm.ranks, _CODES)
        if comm.trace is not None and self._plain.messenger is not None:
            self._plain.messenger.set_recorder(comm.trace.recorder, _kinds())
        self.try_send = self._plain.try_send

    def attach(self, calls: Any) -> None:
        """Carry the messages of public functions, which find `calls` through their group."""
        calls.set_messenger(self._plain.messenger, self.failure)

    def irecv(
        self, array: Any, peer: int | None, tag: int, owner: Any, timeout_s: float
    ) -> Pending | None:
        """Start receiving; None: not a plain call.

        Args:
            array: The memory.
            peer: Global rank; None for any.
            tag: Of the message.
            owner: The argument of the caller; keeps the memory alive.
            timeout_s: From now on.
        """
        receive = _PlainReceive(self, array, peer, tag, owner, timeout_s)
        return receive if self._plain.start_recv(receive, array, tag) else None

    def failure(
        self, op: str, outcome: Outcome, array: Any, peer: int | None, tag: int, timeout_s: float
    ) -> BaseException:
        """Return the error of a call that ended with `outcome`."""
        call = MessageCall(op, view(array, write=False), peer, tag)
        status = self._plain.status_of(outcome)
        error = message_error(self.comm, call, status, Deadline(timeout_s))
        assert error is not None
        write_after_failure()
        return error


def _begin_record(comm: Communicator, call: MessageCall) -> int:
    """Begin the record of a message; return its number."""
    if comm.trace is None:
        return 0
    data = call.data
    dtype, count = (None, 0) if data is None else (data.dtype, data.array.size)
    return comm.trace.begin_message(call.op, dtype, count, call.peer, call.tag)


def _end_record(
    comm: Communicator, record: int, error: BaseException | None, peer: int | None
) -> None:
    if comm.trace is not None:
        comm.trace.end_message(record, error, peer)
    if error is not None:
        write_after_failure(aside=True)


def _open(comm: Communicator, call: MessageCall, options: CallOptions) -> _Message:
    if comm.closed():
        raise ClosedError(f"{call} on group '{comm.name}', which {comm.closed()}")
    if not options.async_op and not comm.transport.may_wait():
        raise UsageError(
            f"{call} on group '{comm.name}' waits for the thread it runs on",
            hint="in a callback of a future, call isend or irecv",
        )
    return _Message(comm, call, options.deadline)


def _wait_or_cancel(message: _Message, options: CallOptions) -> _Message:
    if options.async_op:
        return message
    try:
        if not message.wait_until(options.deadline):
            message.expire()
    except BaseException:
        # After Ctrl-C the caller does not wait any more, so nothing may write to its array.
        message.expire()
        raise
    return message


# By NumPy's format in the buffer protocol; `_CODES`: the codes of the dtypes in a message.
_DTYPES = {
    np.empty(0, letter).data.format: dtype_of_numpy(np.dtype(letter))
    for letter in "?bBhHiIlLqQefdFD"
}
_CODES = {format: code_of(dtype) for format, dtype in _DTYPES.items()}


def _kinds() -> dict[str, tuple[int, int]]:
    """Return the kinds of the records of a send and a receive, by NumPy's format."""
    return {
        format: (
            number_of_kind("send", dtype, route="messages"),
            number_of_kind("recv", dtype, route="messages"),
        )
        for format, dtype in _DTYPES.items()
    }
