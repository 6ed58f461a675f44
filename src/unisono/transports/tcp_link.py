"""One TCP connection between two ranks: frames out, frames in, nothing else.

`write` may be called from any thread; `read` belongs to the I/O thread. Both never block.
Memory of a transfer can be taken away at any time (`withdraw`): the rest of the frame then
goes to, or comes from, memory of the link's own, so that the byte stream stays in step.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable

from unisono.transports.api import Key, Kind, LinkDown, MessageMismatch, Transfer
from unisono.transports.matching import Arrival, Mailbox
from unisono.transports.wire import FRAME, Frame

__all__ = ["Link"]

# How many frames one readable event may take before other links get their turn.
_FRAMES_PER_TURN = 64

Control = Callable[[int, int, Kind, bytes], None]


class _Out:
    """A frame on its way out: what is left of its header and payload."""

    __slots__ = ("data", "head", "transfer")

    def __init__(self, key: Key, transfer: Transfer) -> None:
        assert transfer.into is not None
        self.head = memoryview(Frame(key, transfer.into.nbytes, transfer.info).pack())
        self.data = transfer.into
        self.transfer = transfer

    @property
    def started(self) -> bool:
        return len(self.head) < FRAME.size

    def advance(self, nbytes: int) -> bool:
        """Note bytes that went out; return whether the frame is complete."""
        head = min(nbytes, len(self.head))
        self.head = self.head[head:]
        self.data = self.data[nbytes - head :]
        return not self.head and not self.data


class _In:
    """The frame that is coming in."""

    __slots__ = ("data", "filled", "frame", "transfer")

    def __init__(self, frame: Frame, transfer: Transfer | None, data: memoryview) -> None:
        self.frame = frame
        self.transfer = transfer
        self.data = data
        self.filled = 0


class Link:
    """Frames between this rank and `peer` over a connected, non-blocking socket.

    Without a socket yet, frames wait in the outbox until `attach`.
    """

    def __init__(self, peer: int, mailbox: Mailbox, control: Control) -> None:
        self.peer = peer
        self.sock: socket.socket | None = None
        self.ready = False
        self._closed: LinkDown | None = None
        self._mailbox = mailbox
        self._control = control
        self._outbox: deque[_Out] = deque()
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._head = bytearray(FRAME.size)
        self._head_filled = 0
        self._in: _In | None = None

    def attach(self, sock: socket.socket) -> None:
        """Use this socket from now on; the handshake on it is over."""
        with self._write_lock:
            self.sock = sock
            self.ready = True

    # ---- out ------------------------------------------------------------------------------

    def submit(self, key: Key, transfer: Transfer) -> bool:
        """Queue a frame and send what the socket takes; return whether some is left."""
        with self._write_lock:
            closed = self._closed
            if closed is None:
                self._outbox.append(_Out(key, transfer))
            idle = len(self._outbox) == 1
        if closed is not None:
            transfer.finish(closed)
            return False
        return not (self.ready and idle) or self.write()

    def write(self) -> bool:
        """Send what the socket takes now; return whether the outbox still holds something.

        Raises:
            OSError: The connection is broken.
        """
        finished: list[Transfer] = []
        try:
            with self._write_lock:
                self._write(finished)
                return bool(self._outbox)
        finally:
            # Outside the lock: a callback may submit the next frame to this very link.
            for transfer in finished:
                transfer.finish()

    def _write(self, finished: list[Transfer]) -> None:
        if not self.ready or self.sock is None:
            return
        while self._outbox:
            out = self._outbox[0]
            try:
                sent = self.sock.sendmsg([out.head, out.data])
            except (BlockingIOError, InterruptedError):
                return
            if out.advance(sent):
                self._outbox.popleft()
                finished.append(out.transfer)

    # ---- in -------------------------------------------------------------------------------

    def read(self) -> None:
        """Take in what has arrived.

        Raises:
            EOFError: The peer closed the connection.
            OSError: The connection is broken.
            ValueError: The stream is not ours.
        """
        for _ in range(_FRAMES_PER_TURN):
            if self._in is None and not self._read_head():
                return
            if not self._read_body():
                return

    def _read_head(self) -> bool:
        assert self.sock is not None
        received = _recv_into(self.sock, memoryview(self._head)[self._head_filled :])
        self._head_filled += received
        if self._head_filled < FRAME.size:
            return False
        self._head_filled = 0
        frame = Frame.parse(self._head)
        transfer = None
        if frame.key.kind in (Kind.COLLECTIVE, Kind.P2P):
            transfer = self._mailbox.claim(self.peer, frame.key.context, frame.key[1:])
        with self._read_lock:
            if transfer is not None and _fits(transfer, frame):
                assert transfer.into is not None
                self._in = _In(frame, transfer, transfer.into)
            else:
                self._in = _In(frame, transfer, memoryview(bytearray(frame.nbytes)))
        return True

    def _read_body(self) -> bool:
        assert self.sock is not None
        with self._read_lock:
            incoming = self._in
            assert incoming is not None
            while incoming.filled < incoming.frame.nbytes:
                received = _recv_into(self.sock, incoming.data[incoming.filled :])
                if not received:
                    return False
                incoming.filled += received
            self._in = None
        self._complete(incoming)
        return True

    def _complete(self, incoming: _In) -> None:
        frame, transfer = incoming.frame, incoming.transfer
        if frame.key.kind not in (Kind.COLLECTIVE, Kind.P2P):
            self._control(self.peer, frame.key.context, frame.key.kind, bytes(incoming.data))
        elif transfer is None:
            arrival = Arrival(self.peer, incoming.data, frame.info)
            self._mailbox.keep(frame.key.context, frame.key[1:], arrival)
        elif _fits(transfer, frame):
            transfer.finish()
        else:
            transfer.finish(MessageMismatch(self.peer, frame.nbytes, frame.info))

    # ---- ends -----------------------------------------------------------------------------

    def withdraw(self, unwanted: Callable[[Transfer], bool], error: BaseException | None) -> None:
        """Stop touching the memory of the transfers that `unwanted` picks, and fail them."""
        failed: list[Transfer] = []
        with self._write_lock:
            kept: deque[_Out] = deque()
            for out in self._outbox:
                if unwanted(out.transfer):
                    failed.append(out.transfer)
                    if not out.started:
                        continue
                    out.data = memoryview(bytes(out.data))
                kept.append(out)
            self._outbox = kept
        with self._read_lock:
            incoming = self._in
            if incoming is not None and incoming.transfer and unwanted(incoming.transfer):
                failed.append(incoming.transfer)
                incoming.data = memoryview(bytearray(incoming.frame.nbytes))
        for transfer in failed:
            transfer.finish(error)

    def pending(self) -> bool:
        """Whether frames wait to be sent."""
        return bool(self._outbox)

    def close(self, error: LinkDown) -> None:
        """Close the socket and fail whatever was under way."""
        with self._write_lock, self._read_lock:
            self.ready = False
            self._closed = error
            sock, self.sock = self.sock, None
            failed = [out.transfer for out in self._outbox]
            self._outbox.clear()
            if self._in is not None and self._in.transfer is not None:
                failed.append(self._in.transfer)
            self._in = None
        if sock is not None:
            sock.close()
        for transfer in failed:
            transfer.finish(error)


def _fits(transfer: Transfer, frame: Frame) -> bool:
    assert transfer.into is not None
    return transfer.into.nbytes == frame.nbytes and transfer.info == frame.info


def _recv_into(sock: socket.socket, buffer: memoryview) -> int:
    """Receive into `buffer`; 0 means nothing is there yet."""
    try:
        received = sock.recv_into(buffer)
    except (BlockingIOError, InterruptedError):
        return 0
    if received == 0:
        raise EOFError("connection closed")
    return received
