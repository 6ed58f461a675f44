"""Point-to-point calls of the CPU backend: one message each, matched by source and tag.

A plain call does not run this code: C++ takes it from the public function to the rings of the host
or to a wire. Only its failure, and more than a wait for a started receive, are a matter of `Port`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np

from unisono.core.backends.api import CallOptions, DeviceBackend, Pending
from unisono.core.base.buffers import as_bytes, view
from unisono.core.base.deadline import Deadline
from unisono.core.base.threads.completion import Completion
from unisono.core.base.types import code_of, dtype_of_code, dtype_of_numpy, numpy_dtype, word_of
from unisono.core.engines import Communicator
from unisono.core.engines.errors import MessageCall, message_error
from unisono.core.recorder import number_of_kind, write_after_failure
from unisono.core.transports import Key, Transfer
from unisono.core.transports.messages import MessageInfo, Purpose
from unisono.core.transports.transfers import ANYTHING, NOTHING, Outcome
from unisono.errors import ClosedError, InvalidArgumentError, UsageError

# Longer than a thread needs from the end of a transfer to the end of its call.
_FINISH_S = 5.0


class Message(Transfer):
    """A send or receive of a user under way: what it is for, its record, and its result."""

    __slots__ = ("_comm", "_is_open", "_record", "_words")

    def __init__(
        self,
        comm: Communicator,
        words: tuple[str, Any, int | None, int],
        deadline: Deadline,
        into: memoryview,
        info: int,
        among: frozenset[int],
        runs_here: Callable[[], bool],
    ) -> None:
        _, _, peer, tag = words
        super().__init__(peer, comm.context, (Purpose.P2P, tag), into, info, among)
        self.deadline, self._runs_here = deadline, runs_here
        self._comm, self._words, self._record = comm, words, 0
        # Deleted by the call that ends it, as in `Completion`.
        self._is_open = True

    def finish(self, error: BaseException | None = None) -> bool:
        """End the call as its transfer has ended."""
        try:
            # Once: the caller may change the array after it.
            del self._is_open
        except AttributeError:
            return False
        try:
            try:
                error = self._conclude(error)
            except Exception as failed:
                error = failed
            return super().finish(error)
        except BaseException as interrupt:
            # Ctrl-C, for example. The outcome in C++ stays known, and the next look ends the call.
            if self._messages is None:
                super().finish(interrupt)
            elif not self._done:
                self._is_open = True
            raise

    def _conclude(self, error: BaseException | None) -> BaseException | None:
        """Set the results, end the record, and return the error in the user's words."""
        comm, (op, data, peer, _) = self._comm, self._words
        if error is not None:
            error = message_error(comm, MessageCall(*self._words), error, self.deadline)
        elif op != "send":
            self.source = peer = self.peer
            if data is None:
                self._take_unknown()
            else:
                self.count = self.nbytes // data.dtype.itemsize
                if not isinstance(data, np.ndarray):
                    data.unpack()
        if comm.trace is not None and self._record:
            comm.trace.end_message(self._record, error, peer)
        if error is not None:
            write_after_failure(aside=True)
        return error

    def _take_unknown(self) -> None:
        """Set the results of a probe, or of a receive into new memory."""
        dtype = dtype_of_code(self.info)
        self.count = self.nbytes // (1 if dtype is None else dtype.itemsize)
        if self.into is NOTHING:
            assert self.source is not None
            name = None if dtype is None else dtype.name
            found = MessageInfo(self.source, self.tag[1], name, self.count, self.nbytes)
            self.outputs = [found]
        else:
            elements = np.asarray(self.into)
            self.outputs = [elements if dtype is None else elements.view(numpy_dtype(dtype))]

    def done(self) -> bool:
        # A caller that polls does not move bytes, so another thread must.
        if not super().done():
            self.watch()
        return self._done

    def add_callback(self, callback: Callable[[Self], object]) -> None:
        super().add_callback(callback)
        self.done()

    def expire(self) -> None:
        """Cancel the call. The group stays usable, and the memory is not touched any more."""
        self._comm.transport.cancel(self)
        # A thread that has just ended the transfer may not have come to the end of the call yet.
        # The server may have both ends at hand, and must not wait for itself.
        if not self._comm.transport.messages.is_server():
            Completion.wait_until(self, Deadline(_FINISH_S))


class MessageBackend(DeviceBackend):
    """The sends and receives of the CPU backend."""

    _comm: Communicator

    @property
    def comm(self) -> Communicator:
        """The communicator, for what is made of messages beside these calls, such as windows."""
        return self._comm

    def send(self, tensor: Any, peer: int, tag: int, options: CallOptions) -> Pending:
        """Start sending `tensor` to a rank of the group."""
        comm, data = self._comm, view(tensor, write=False)
        to, key = comm.ranks[peer], Key(comm.context, Purpose.P2P, tag)
        waits_for_itself = to == comm.transport.rank and not options.async_op and not comm.closed()
        if waits_for_itself and not comm.transport.messages.has_receive(to, key):
            raise InvalidArgumentError(
                f"send to this rank itself ({to}) would wait for its own receive",
                hint="use isend, or call irecv before",
            )
        call, info = MessageCall("send", data, to, tag), code_of(data.dtype)
        message = self._begin(call, options, as_bytes(data.array), info)
        comm.transport.messages.send(message)
        return _wait(message, options)

    def recv(self, tensor: Any, peer: int | None, tag: int, options: CallOptions) -> Pending:
        """Start receiving into `tensor`, from a rank of the group or from any."""
        data = view(tensor, write=True)
        word = word_of(data.dtype, options.partial)
        return self._receive("recv", peer, tag, options, data, as_bytes(data.array), word)

    def recv_any_source(self, tensor: Any, tag: int, options: CallOptions) -> Pending:
        """Start receiving into `tensor`, from any rank."""
        return self.recv(tensor, None, tag, options)

    def recv_array(self, peer: int | None, tag: int, options: CallOptions) -> Pending:
        """Start receiving a message of any size and dtype, into a new array."""
        return self._receive("recv_array", peer, tag, options, None, ANYTHING)

    def probe(self, peer: int | None, tag: int, options: CallOptions) -> Pending:
        """Start waiting for a message that a receive would take, and leave the message there."""
        return self._receive("probe", peer, tag, options, None, NOTHING)

    def _receive(
        self,
        op: str,
        peer: int | None,
        tag: int,
        options: CallOptions,
        data: Any,
        into: memoryview,
        info: int = 0,
    ) -> Pending:
        comm = self._comm
        source = None if peer is None else comm.ranks[peer]
        message = self._begin(MessageCall(op, data, source, tag), options, into, info)
        comm.transport.messages.recv(message)
        return _wait(message, options)

    def _begin(
        self, call: MessageCall, options: CallOptions, memory: memoryview, info: int
    ) -> Message:
        comm, data = self._comm, call.data
        if comm.closed():
            raise ClosedError(f"{call} on group '{comm.name}', which {comm.closed()}")
        may_wait = comm.transport.may_wait
        if not options.async_op and not may_wait():
            raise UsageError(
                f"{call} on group '{comm.name}' waits for the thread it runs on",
                hint="in a callback of a future, call isend or irecv",
            )
        among = frozenset(comm.others if call.peer is None else ())
        message = Message(comm, call, options.deadline, memory, info, among, lambda: not may_wait())
        if data is not None:
            message.outputs = [data.owner]
        if comm.trace is not None:
            dtype, count = (None, 0) if data is None else (data.dtype, data.count)
            words = call.op, dtype, count, call.peer, call.tag
            message._record = comm.trace.begin_message(*words)
        return message


def _wait(message: Message, options: CallOptions) -> Message:
    """Wait for a message unless the call is asynchronous."""
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


class _Sent:
    """The end of a message that C++ has sent at once, in place of its `Pending`."""

    def wait_well(self) -> bool:
        """Return True, as the call has ended."""
        return True

    has_ended_well = wait_well

    def pending(self, output: Any) -> Pending:
        """Return the end, with the result `output`."""
        return Pending([output], done=True)

    def on_end(self, callback: Callable[[], object]) -> bool:
        """Return False: `pending` must have the callback."""
        return False


class Port:
    """Makes what C++ needs of Python for the plain messages of one group.

    A plain message is that of a NumPy array of a common dtype, or of a contiguous tensor. A send to
    this rank itself or to another host is not plain. See `operations.methods.in_cpp`.
    """

    def __init__(self, comm: Communicator, messenger: Any) -> None:
        self._comm = comm
        self._messages: Any = comm.transport.messages
        self._among = frozenset(comm.others)
        # It ends the records in the recorder.
        self._messenger = messenger
        if comm.trace is not None:
            messenger.set_recorder(comm.trace.recorder, _kinds())

    @classmethod
    def of(cls, comm: Communicator, calls: Any) -> Port | None:
        """Return the port of a group, also for the public functions; None without C++.

        The public functions find `calls` through their group.
        """
        messenger = comm.transport.messages.plain(comm.context, comm.ranks, _CODES)
        if messenger is None:
            return None
        port = cls(comm, messenger)
        if calls is not None:
            calls.set_messenger(messenger, port.failure, port.message, _Sent())
        return port

    def message(self, started: Any) -> Message:
        """Return the end of a receive that C++ has started (`Receive` in native/bindings)."""
        words = "recv", started.array, started.peer, started.tag
        deadline = Deadline.ending(started.timeout_s, started.left_s)
        is_server = self._messages.is_server
        message = Message(self._comm, words, deadline, started.array, 0, self._among, is_server)
        message.outputs = [started.owner]
        if started.is_forked:
            message._forks = -1
        self._messages.adopt(message, started.number)
        return message

    def failure(
        self, op: str, outcome: Outcome, array: Any, peer: int | None, tag: int, timeout_s: float
    ) -> BaseException:
        """Return the error of a call that ended with `outcome`."""
        comm, call = self._comm, MessageCall(op, array, peer, tag)
        status = self._messages.status_of(outcome, comm.context)
        error = message_error(comm, call, status, Deadline(timeout_s))
        assert error is not None
        write_after_failure()
        return error


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
