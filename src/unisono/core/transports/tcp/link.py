"""One TCP connection between two ranks: frames out, frames in, nothing else.

`write` may be called from any thread; `read` belongs to the I/O thread. Neither blocks.
`cancel` may end a transfer at any time. The rest of an outgoing frame is then sent from a copy, and
the rest of an incoming frame is dropped. So the byte stream stays in step. The locks are reentrant,
because a signal handler may send or cancel while its thread writes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from unisono.core.base.net.tls import has_unsent
from unisono.core.platform.posix import sendmsg
from unisono.core.transports.messages import (
    Arrival,
    Cancelled,
    Key,
    LinkDown,
    MessageMismatch,
    Purpose,
)
from unisono.core.transports.tcp.io_loop import CHUNK_BYTES
from unisono.core.transports.tcp.wire import FRAME, Frame
from unisono.core.transports.transfers import AnyMessages, Transfer, is_of_user

# How often one readable event may read before other links are served.
_READS_PER_TURN = 64

# Control messages have some hundred bytes. A longer one is not from a rank.
_CONTROL_MAX_BYTES = 1 << 24

# Receives the bytes of cancelled transfers, of all links at once.
_SINK = memoryview(bytearray(CHUNK_BYTES))

_DATA = (Purpose.COLLECTIVE, Purpose.P2P)

Control = Callable[[int, int, Purpose, bytes], None]


class _Out:
    """A frame on its way out: the rest of its header and payload.

    Attributes:
        is_sending: Whether an unknown part of it is sent at this moment.
    """

    __slots__ = ("data", "head", "is_sending", "transfer")

    def __init__(self, key: Key, transfer: Transfer) -> None:
        self.head = memoryview(Frame(key, transfer.into.nbytes, transfer.info).pack())
        self.data = transfer.into
        self.transfer = transfer
        self.is_sending = False

    @property
    def started(self) -> bool:
        return self.is_sending or len(self.head) < FRAME.size

    def advance(self, nbytes: int) -> bool:
        """Count sent bytes; return whether the frame is complete."""
        head = min(nbytes, len(self.head))
        self.head = self.head[head:]
        self.data = self.data[nbytes - head :]
        return not self.head and not self.data


class _In:
    """The incoming frame; its payload is dropped if `data` is None."""

    __slots__ = ("data", "filled", "frame", "transfer")

    def __init__(self, frame: Frame, transfer: Transfer | None, data: memoryview | None) -> None:
        self.frame = frame
        self.transfer = transfer
        self.data = data
        self.filled = 0

    @property
    def missing(self) -> int:
        return self.frame.nbytes - self.filled

    def room(self) -> memoryview:
        """Return the memory for the next bytes."""
        return _SINK[: self.missing] if self.data is None else self.data[self.filled :]

    def take(self, chunk: memoryview) -> int:
        """Copy the part of the payload that `chunk` holds; return its size."""
        count = min(len(chunk), self.missing)
        if self.data is not None:
            self.data[self.filled : self.filled + count] = chunk[:count]
        self.filled += count
        return count

    def lose_receive(self, *, keep: bool) -> None:
        """Stop using the memory of a cancelled receive; with `keep` another gets the message."""
        if keep and self.data is not None and is_of_user(self.frame.key[1:]):
            with contextlib.suppress(MemoryError):
                self.data = np.array(self.data).data
                self.transfer = None
                return
        self.data = None


class Link:
    """Frames between this rank and `peer` over a connected, non-blocking socket.

    Frames wait in a queue until `attach` sets the socket.

    Args:
        peer: The other rank.
        messages: Receives the messages.
        control: Receives the control messages: (peer, context, kind, body).
        chunk: [CHUNK_BYTES] buffer of the I/O thread; holds no data between two reads.
    """

    def __init__(
        self, peer: int, messages: AnyMessages, control: Control, chunk: memoryview
    ) -> None:
        self.peer = peer
        self.sock: socket.socket | None = None
        self.ready = False
        self._closed: LinkDown | None = None
        self._messages = messages
        self._control = control
        self._frames: deque[_Out] = deque()
        self._write_lock = threading.RLock()
        self._read_lock = threading.RLock()
        self._chunk = chunk
        self._rest = b""  # the first part of a header, from the last read
        self._in: _In | None = None

    def attach(self, sock: socket.socket) -> None:
        """Use this socket from now on; the handshake on it is over."""
        with self._write_lock:
            self.sock = sock
            self.ready = True

    # ---- out ------------------------------------------------------------------------------

    def submit(self, key: Key, transfer: Transfer) -> bool:
        """Queue a frame and send what the socket accepts; return whether bytes are left.

        Raises:
            OSError: The connection is broken.
        """
        out = _Out(key, transfer)
        with self._write_lock:
            closed = self._closed
            if closed is None:
                self._frames.append(out)
            idle = len(self._frames) == 1
        if closed is not None:
            transfer.finish(closed)
            return False
        # If not idle, another thread is writing, or the I/O thread waits until the socket is ready.
        return not (self.ready and idle) or self.write()

    def write(self) -> bool:
        """Send what the socket accepts now; return whether frames are left.

        Raises:
            OSError: The connection is broken.
        """
        finished: list[Transfer] = []
        try:
            with self._write_lock:
                self._write(finished)
                return self.pending()
        finally:
            # Outside the lock: a callback may submit the next frame to this very link.
            for transfer in finished:
                transfer.finish()

    def _write(self, finished: list[Transfer]) -> None:
        if not self.ready or self.sock is None:
            return
        while self._frames:
            out = self._frames[0]
            out.is_sending = True
            try:
                sent = sendmsg(self.sock, [out.head, out.data])
            except (BlockingIOError, InterruptedError):
                out.is_sending = False
                return
            if out.advance(sent):
                self._frames.popleft()
                finished.append(out.transfer)
            out.is_sending = False
        if has_unsent(self.sock):
            with contextlib.suppress(BlockingIOError, InterruptedError):
                self.sock.send(b"")

    # ---- in -------------------------------------------------------------------------------

    def read(self) -> bool:
        """Receive what has arrived; return whether there may be more.

        Raises:
            EOFError: The peer closed the connection.
            OSError: The connection is broken.
            ValueError: The stream is not that of a rank.
        """
        for _ in range(_READS_PER_TURN):
            incoming = self._in
            large = incoming is not None and incoming.missing >= CHUNK_BYTES
            if not (self._read_body() if large else self._read_chunk()):
                return False
        return True

    def _read_body(self) -> bool:
        """Receive payload straight into its place; return whether bytes were received."""
        assert self.sock is not None
        with self._read_lock:
            incoming = self._in
            assert incoming is not None
            received = _recv_into(self.sock, incoming.room())
            incoming.filled += received
            complete = not incoming.missing
            if complete:
                self._in = None
        if complete:
            self._complete(incoming)
        return received > 0

    def _read_chunk(self) -> bool:
        """Receive through the buffer; return whether the socket may hold more."""
        assert self.sock is not None
        begin = len(self._rest)
        received = _recv_into(self.sock, self._chunk[begin:])
        if not received:
            return False
        self._chunk[:begin] = self._rest
        at, end = 0, begin + received
        while taken := self._parse(self._chunk[at:end]):
            at += taken
        self._rest = bytes(self._chunk[at:end])
        return end == CHUNK_BYTES

    def _parse(self, chunk: memoryview) -> int:
        """Take one header or payload from the chunk; return its size, 0 if the chunk is used up."""
        with self._messages.matching, self._read_lock:
            taken = 0
            if self._in is None:
                if len(chunk) < FRAME.size:
                    return 0
                taken = FRAME.size
                self._in = self._begin(Frame.parse(chunk[:taken]))
            incoming = self._in
            taken += incoming.take(chunk[taken:])
            complete = not incoming.missing
            if complete:
                self._in = None
        if complete:
            self._complete(incoming)
        return taken

    def _begin(self, frame: Frame) -> _In:
        """Find the place of a payload.

        Called with the lock held. Otherwise `cancel` could run between the claim and the
        assignment of `_in`, would not find the receive, and its memory would be written later.
        """
        if frame.key.kind in _DATA:
            transfer = self._messages.claim(self.peer, frame.key)
            if transfer is not None:
                fits = transfer.fits(frame.nbytes, frame.info)
                return _In(frame, transfer, transfer.into if fits else None)
        elif frame.nbytes > _CONTROL_MAX_BYTES:
            raise ValueError(f"it sent a control message of {frame.nbytes} bytes")
        try:
            # Not a bytearray, which would be zeroed first.
            return _In(frame, None, np.empty(frame.nbytes, np.uint8).data)
        except (MemoryError, OverflowError, ValueError):
            raise ValueError(
                f"it sent {frame.nbytes} bytes before their receive, which do not fit in memory"
            ) from None

    def _complete(self, incoming: _In) -> None:
        frame, transfer, data = incoming.frame, incoming.transfer, incoming.data
        if transfer is not None and data is None:
            # No effect on a cancelled transfer, which is done already.
            transfer.finish(MessageMismatch(self.peer, frame.nbytes, frame.info))
        elif transfer is not None:
            transfer.finish()
        elif data is not None and frame.key.kind in _DATA:
            self._messages.deliver(frame.key, Arrival(self.peer, data, frame.info))
        elif data is not None:
            self._control(self.peer, frame.key.context, frame.key.kind, bytes(data))

    # ---- ends -----------------------------------------------------------------------------

    def cancel(self, unwanted: Callable[[Transfer], bool], error: BaseException) -> None:
        """End the transfers that `unwanted` selects with `error`, and stop using their memory."""
        failed: list[Transfer] = []
        with self._write_lock:
            kept: deque[_Out] = deque()
            for out in self._frames:
                if unwanted(out.transfer):
                    failed.append(out.transfer)
                    if not out.started:
                        continue
                    out.data = memoryview(bytes(out.data))
                kept.append(out)
            self._frames = kept
        with self._read_lock:
            incoming = self._in
            if incoming is not None and incoming.transfer and unwanted(incoming.transfer):
                failed.append(incoming.transfer)
                incoming.lose_receive(keep=isinstance(error, Cancelled))
        for transfer in failed:
            transfer.finish(error)

    def pending(self) -> bool:
        """Whether frames wait to be sent, or bytes of them."""
        return bool(self._frames) or has_unsent(self.sock)

    def end_writing(self) -> None:
        """Close the socket for writing; it can still be read."""
        with self._write_lock, contextlib.suppress(OSError):
            if self.sock is not None:
                self.sock.shutdown(socket.SHUT_WR)

    @property
    def closed(self) -> bool:
        """Whether the link has ended."""
        return self._closed is not None

    def disconnect(self) -> None:
        """Close the socket; the transfers under way wait for `close`."""
        with self._write_lock, self._read_lock:
            self.ready = False
            sock, self.sock = self.sock, None
        if sock is not None:
            sock.close()

    def close(self, error: LinkDown) -> None:
        """Close the socket and end all transfers under way with `error`."""
        self.disconnect()
        with self._write_lock, self._read_lock:
            self._closed = error
            failed = [out.transfer for out in self._frames]
            self._frames.clear()
            if self._in is not None and self._in.transfer is not None:
                failed.append(self._in.transfer)
            self._in = None
        for transfer in failed:
            transfer.finish(error)


def _recv_into(sock: socket.socket, buffer: memoryview) -> int:
    """Receive into `buffer`; return 0 if no bytes have arrived."""
    try:
        received = sock.recv_into(buffer)
    except (BlockingIOError, InterruptedError):
        return 0
    if received == 0:
        raise EOFError("connection closed")
    return received
