"""Messages in C++: over rings in shared memory inside a host, over wires between hosts.

Every rank makes its rings and publishes how to open them. A rank that sends to a rank of its host
opens the rings through the owner's process id and compares a nonce. For ranks of other hosts, or if
the rings cannot be opened, the transport makes a wire: a connection whose socket C++ takes over.
C++ matches the messages of both kinds, so that a receive from any source searches one place.

A rank that waits moves the bytes itself. A server thread, started on first use, moves the bytes of
other transfers. It releases the interpreter lock while it works or sleeps. The transport detects
lost ranks and broken groups, as for its own messages.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unisono.core.base import config
from unisono.core.base.deadline import Deadline
from unisono.core.base.log import get_logger
from unisono.core.base.net.tls import session_of
from unisono.core.base.seam import cpp as _engine
from unisono.core.base.threads.completion import Completion
from unisono.core.base.threads.worker import WorkerThread
from unisono.core.platform.nodes import memory_node
from unisono.core.transports.messages import (
    ANY_TAG,
    CLOSED,
    Cancelled,
    Failure,
    Key,
    LinkDown,
    MessageMismatch,
    Purpose,
)
from unisono.core.transports.transfers import (
    ANYTHING,
    NOTHING,
    Address,
    AnyMessages,
    LinkView,
    Outcome,
    Transfer,
)
from unisono.errors import ClosedError

_log = get_logger("transports.native")

# As for TCP: how long close() goes on sending what isend left.
_LINGER_S = 2.0

# How long cancel() waits for another thread that has ended the transfer.
_COPY_S = 5.0

# How often the waiting thread checks this itself.
_LOOK_S = 1.0

_NONCE_BYTES = 16

# Why a wire has ended, as C++ reports it.
_CHANGED = 2

# Each channel costs a file descriptor and its polling. Networks hardly gain from more than 16.
_MOST_CHANNELS = 16


def tag_of(kind: Purpose, tag: int) -> int:
    """Return the tag that stands for a kind and its tag in C++.

    Tags of calls are not negative. Programs in C++ use the tags -1, -2, ... of the same contexts.
    """
    return tag if kind is Purpose.P2P and tag != ANY_TAG else tag - (1 << 62)


class NativeMessages(AnyMessages):
    """One rank's end of the messages in C++.

    Args:
        links: The transport. It makes wires, and detects ranks that are gone.

    Attributes:
        endpoint: How other ranks reach this rank's rings, or make wires to it; without spaces.

    Raises:
        OSError: The memory cannot be made.
    """

    def __init__(self, links: LinkView) -> None:
        self._links = links
        if links.wires is not None:
            links.wires.take = self._add_wire
        self._channels = config.get_int("UNISONO_CHANNELS", _MOST_CHANNELS)
        self._lock = threading.RLock()
        # Transfers, receives that C++ has started, and ends of what has not been entered yet.
        self._open: dict[int, Any] = {}
        # By id: memory of calls on their way to C++. Ctrl-C would free it while C++ uses it.
        self._held: dict[int, object] = {}
        self._server = WorkerThread(f"unisono-messages-{links.rank}")
        self._closed = False
        self.native = _engine.Messages(links.rank, links.world_size)
        nonce = os.urandom(_NONCE_BYTES)
        fd = self.native.create(nonce, memory_node())
        if fd < 0:
            raise OSError(-fd, os.strerror(-fd))
        self.endpoint = f"{os.getpid()}:{fd}:{nonce.hex()}:{self._channels}"
        # Weak, because the collector sees no cycles through C++.
        stuck = weakref.WeakMethod(self._stuck)
        self.native.set_stuck(lambda *news: (method := stuck()) and method(*news))
        wire = weakref.WeakMethod(self._wire)
        self.native.set_wire(lambda *news: (method := wire()) and method(*news))

    @classmethod
    def make(cls, links: LinkView) -> tuple[NativeMessages | None, str]:
        """Return new messages and their endpoint.

        If this process cannot have C++ messages, return None, and the name of the error.
        """
        try:
            messages = cls(links)
            return messages, messages.endpoint
        except OSError as error:
            level = "info" if error.errno == errno.ENOSYS else "warning"
            getattr(_log, level)("no shared memory for messages: %s", error)
            return None, errno.errorcode.get(error.errno or 0, "error")

    def introduce(
        self, endpoints: Sequence[str], near: Sequence[bool], *, crowded: bool, far: bool = False
    ) -> None:
        """Set how to reach the other ranks; called before the first message.

        Args:
            endpoints: The endpoints of all ranks.
            near: Whether the memory of a rank may be opened.
            crowded: Whether more ranks than cores take part on this host.
            far: Whether hosts are far apart, equal on all ranks. Larger data then travel with the
                agreement on a call.
        """
        addresses: list[Address] = []
        theirs = []
        for endpoint, is_near in zip(endpoints, near, strict=True):
            pid, fd, nonce, most = endpoint.split(":")
            theirs.append(int(most))
            channels = 0 if self._links.wires is None else min(self._channels, theirs[-1])
            addresses.append((int(pid) if is_near else 0, int(fd), bytes.fromhex(nonce), channels))
        self._warn_of_channels(theirs)
        self.addresses = addresses
        self.native.introduce(addresses, crowded, far)

    def make_team(self, threads: int) -> None:
        """Have so many threads share the loops of large calls; called before the first call."""
        if threads > 1:
            _log.info("%d threads share the loops of calls above 1 MiB", threads)
            self.team = _engine.ThreadTeam(threads)

    def _warn_of_channels(self, channels: Sequence[int]) -> None:
        others = [rank for rank, theirs in enumerate(channels) if theirs != self._channels]
        if others:
            _log.warning(
                "UNISONO_CHANNELS is %d on rank %d, %d on rank %d: the lower number of two ranks "
                "is used between them",
                *(self._channels, self._links.rank, channels[others[0]], others[0]),
            )

    def has_left(self, peer: int) -> bool:
        return bool(self.native.has_left(peer))

    # ---- messages -------------------------------------------------------------------------

    def send(self, transfer: Transfer) -> None:
        assert transfer.peer is not None
        transfer._move_by(self, receives=False)
        self._held[id(transfer)] = transfer
        outcome = self.native.start_send(
            transfer.peer, transfer.context, tag_of(*transfer.tag), transfer.info, transfer.into
        )
        self._begun(transfer, outcome)
        del self._held[id(transfer)]
        if not transfer.done():
            self._links.notice_end(transfer.peer)

    def recv(self, transfer: Transfer) -> None:
        """Start receiving.

        Its bytes may not be moved, nor its end be detected, before a thread waits for it or calls
        `watch`. A server thread that ran for every message would cost more than the message.
        """
        peer, into = transfer.peer, transfer.into
        takes = 2 if into is NOTHING else int(into is ANYTHING)
        # An address of its own, for `cancel_interrupted`.
        into = memoryview(bytearray(1)) if takes else into
        source, sources = (-1, list(transfer.among)) if peer is None else (peer, [])
        to = source, transfer.context, tag_of(*transfer.tag), transfer.info
        transfer._move_by(self, receives=True)
        self._held[id(transfer)] = transfer
        before = self.native.last_number()
        try:
            self._begun(transfer, self.native.start_recv(*to, into, sources, takes))
        except BaseException:
            self._cancel_interrupted(into, before)
            raise
        finally:
            del self._held[id(transfer)]

    def adopt(self, transfer: Transfer, number: int) -> None:
        """End a receive that C++ has started and entered."""
        transfer._move_by(self, receives=True)
        transfer._number = number
        self._ensure_server()

    def has_receive(self, peer: int, key: Key) -> bool:
        return bool(self.native.has_receive(peer, key.context, tag_of(key.kind, key.tag)))

    def watch(self, transfer: Transfer) -> None:
        """Make the server move the bytes of a receive and detect its end."""
        transfer._receives = 2
        self.native.watch(transfer._number)
        for source in transfer.among if transfer.peer is None else (transfer.peer,):
            if not transfer.done():
                self._links.notice_end(source)

    def wait(self, transfer: Transfer, deadline: Deadline | None) -> bool:
        """Move bytes until this transfer is done; return False at the deadline."""
        limit_s = float("inf") if deadline is None else deadline.remaining()
        try:
            code = self.native.wait(transfer._number, limit_s, transfer._outcomes)
        finally:
            # Also if Ctrl-C came with the end of the message: other threads may wait for the end.
            ended = Transfer.done(transfer)
        if not ended and (code == _engine.UNKNOWN or transfer._outcomes):
            # Another thread waits for it, or is about to end it.
            return self._wait_for_other(transfer, deadline)
        return ended

    def finish(self, transfer: Transfer) -> None:
        """Finish a transfer whose outcome is known; may be called repeatedly, by any thread."""
        outcome = transfer._outcomes[0]
        self._open.pop(outcome[0], None)
        self._finish(transfer, outcome)

    def cancel(self, transfer: Transfer, error: BaseException | None = None) -> None:
        """End a transfer with `error`, by default `Cancelled`, unless it has ended."""
        if Transfer.done(transfer):
            return
        # A thread that waits for the transfer finishes it, with this cause.
        transfer._cause = error
        code = self.native.cancel(transfer._number, transfer._outcomes)
        is_over = code == _engine.UNKNOWN or transfer._outcomes
        if not Transfer.done(transfer) and is_over and not self.is_server():
            # Another thread has just ended it, and is about to finish it.
            self._wait_for_other(transfer, Deadline(_COPY_S))

    def status_of(self, outcome: Outcome, context: int) -> BaseException | None:
        """Return the status that an outcome stands for; None: success."""
        _, code, source, nbytes, info, _, _ = outcome
        if code == _engine.OK:
            return None
        if code == _engine.MISMATCH:
            return MessageMismatch(source, nbytes, info)
        if code in (_engine.LOST, _engine.LEFT):
            left = bool(code == _engine.LEFT)
            reason = CLOSED if left else "it is gone"
            return self._links.down(source) or LinkDown(source, reason, left)
        if code == _engine.UNREACHABLE:
            return LinkDown(source, "it cannot be reached")
        if code == _engine.ABORTED and (failure := self._links.failure(context)) is not None:
            return failure
        if code in (_engine.CANCELLED, _engine.TIMEOUT):
            return Cancelled()
        return ClosedError("the transport was closed")

    def plain(self, context: int, ranks: Sequence[int], codes: Mapping[str, int]) -> Any:
        return _engine.Port(self.native, context, list(ranks), np.ndarray, codes, self._open)

    def _cancel_interrupted(self, into: Any, before: int) -> None:
        """Cancel a receive that Ctrl-C interrupted while it was started, if it was started.

        Args:
            into: Its memory, as given by the caller.
            before: The last number of a transfer before this receive.
        """
        number = self.native.number_of(into, before)
        if number:
            transfer = _transfer(self._open.get(number, ()))
            self.native.cancel(number, [] if transfer is None else transfer._outcomes)
            if transfer is not None:
                Transfer.done(transfer)

    # ---- calls of the transport -----------------------------------------------------------

    def _add_wire(self, peer: int, channel: int, sock: socket.socket) -> None:
        self.native.add_wire(peer, channel, sock.detach(), session_of(sock))

    def peer_down(self, error: LinkDown) -> None:
        if self.native.peer_down(error.peer, error.left):
            self._ensure_server()

    def fail(self, context: int, failure: Failure) -> None:
        self.native.fail_context(context, failure.after)
        for transfer in self._of_context(context):
            if failure.ends(*transfer.tag):
                self.cancel(transfer)

    def forget(self, context: int, error: BaseException) -> None:
        for transfer in self._of_context(context):
            if transfer._receives:
                self.cancel(transfer, error)
        self.native.forget_context(context)

    def _ensure_server(self) -> None:
        """Start the server, which moves the bytes of transfers without a waiting thread."""
        if self._server.thread is None:
            with self._lock:
                if not self._closed:
                    self._server.start(self._serve)

    def attend(self) -> None:
        self._ensure_server()
        self.native.attend()

    def is_server(self) -> bool:
        return self._server.is_here()

    def close(self) -> None:
        """End all transfers, after the sends have gone out or _LINGER_S have passed."""
        with self._lock:
            self._closed = True
        for fd in self.native.close(_LINGER_S):
            assert self._links.wires is not None
            self._links.wires.read_to_end(socket.socket(fileno=fd))
        self._server.join()
        if self.team is not None:
            self.team.close()

    def before_fork(self) -> None:
        self.native.hold()

    def after_fork(self) -> None:
        self.native.release()

    def close_in_child(self) -> None:
        self.native.close_in_child()

    # ---- beginning and ending -------------------------------------------------------------

    def _wait_for_other(self, transfer: Transfer, deadline: Deadline | None) -> bool:
        """Wait until another thread finishes it; finish it here if Ctrl-C stopped that thread."""
        while not Transfer.done(transfer):
            left_s = math.inf if deadline is None else deadline.remaining()
            if not left_s:
                return False
            Completion.wait_until(transfer, Deadline(min(left_s, _LOOK_S)))
        return True

    def _of_context(self, context: int) -> list[Transfer]:
        # A copy, because other threads remove transfers.
        found = [_transfer(each) for each in list(self._open.values())]
        return [t for t in found if t is not None and t.context == context]

    def _begun(self, transfer: Transfer, outcome: Outcome) -> None:
        """Finish a transfer that C++ has started with this outcome, now or when it ends."""
        transfer._number = number = outcome[0]
        if not number:
            self._finish(transfer, outcome)
            return
        if (early := self._open.setdefault(number, transfer)) is not transfer:
            del self._open[number]
            self._finish(transfer, early)
        self._ensure_server()

    def _end(self, outcome: Outcome) -> None:
        number = outcome[0]
        # If it ended before the call that started it came back, that call finds the outcome.
        if (found := self._open.setdefault(number, outcome)) is not outcome:
            self._open.pop(number, None)
            transfer = _transfer(found)
            assert transfer is not None
            self._finish(transfer, outcome)

    def _finish(self, transfer: Transfer, outcome: Outcome) -> None:
        status = None
        if outcome[1] != _engine.OK:
            status = self.status_of(outcome, transfer.context)
            if isinstance(status, Cancelled):
                status = transfer._cause or status
        if transfer._receives and outcome[1] in (_engine.OK, _engine.MISMATCH):
            _, _, transfer.peer, transfer.nbytes, transfer.info, tag, memory = outcome
            transfer.tag = (transfer.tag[0], tag)
            transfer.into = transfer.into if memory is None else memory.data
        transfer.finish(status)

    # ---- threads --------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            outcomes = self.native.serve()
            if not outcomes:
                return
            for outcome in outcomes:
                self._end(outcome)

    def _wire(self, rank: int, channel: int, ended: int) -> None:
        assert self._links.wires is not None
        if ended:
            self._links.wires.ended(rank, changed=ended == _CHANGED)
        else:
            self._links.wires.make(rank, channel)

    def _stuck(self, ranks: list[int], sends: bool, context: int) -> None:
        """Make sure that the end of these ranks is detected, and that they receive messages.

        A receive may have waited for a second; `context` is that of its group then.
        """
        links = self._links
        for rank in ranks:
            if rank != links.rank:
                links.notice_end(rank, context)
                if sends:
                    links.knock(rank)


def _transfer(entry: Any) -> Transfer | None:
    """Return what an entry of the open transfers stands for; None: of an end without one."""
    if isinstance(entry, tuple):
        return None
    return entry if isinstance(entry, Transfer) else entry.pending(None)
