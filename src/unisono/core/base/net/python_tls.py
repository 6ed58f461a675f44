"""Encryption by Python's ssl, where the extension module is not built.

The twins of what C++ has under these names, see native/tls/session.hpp. Both speak to each other.
Keys that both ends know need Python 3.13. Python's ssl has no update of keys. So a connection keeps
its first keys, also after the 400 GB for which AES-GCM has its full margin of safety.
"""

from __future__ import annotations

import contextlib
import errno
import os
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

from unisono.core.base.net.python_tls_context import TlsContext as TlsContext
from unisono.core.base.net.python_tls_context import why_no_openssl as why_no_openssl
from unisono.core.platform.posix import set_blocking

T = TypeVar("T")
_RECORD_BYTES = 16 * 1024
_HEAD_BYTES = 5
_GREETING_BYTES = 9  # head of the record; type and length of the message
_BATCH_BYTES = 8 * _RECORD_BYTES
_MOST_HELLO_BYTES = 4096

_OTHER_SECRET = (
    "BINDER_DOES_NOT_VERIFY",
    "NO_SUITABLE_SIGNATURE_ALGORITHM",
    "SSLV3_ALERT_HANDSHAKE_FAILURE",
    "SSLV3_ALERT_ILLEGAL_PARAMETER",
    "TLSV1_ALERT_DECRYPT_ERROR",
    "TLSV1_ALERT_UNKNOWN_PSK_IDENTITY",
)
_OLD = ("UNSUPPORTED_PROTOCOL", "WRONG_SSL_VERSION", "TLSV1_ALERT_PROTOCOL_VERSION")


class _Records:
    """What the bytes of records show to one who has no keys."""

    def __init__(self) -> None:
        self.first_byte = -1
        self._greeting = b""  # the first bytes
        self._head = b""  # of the incoming record
        self._left = 0  # bytes of that record that have not come

    def take(self, data: bytes) -> None:
        """Look at the next bytes."""
        self.first_byte = data[0] if self.first_byte < 0 else self.first_byte
        self._greeting += data[: _GREETING_BYTES - len(self._greeting)]
        at = 0
        while at < len(data):
            step = min(self._left or _HEAD_BYTES - len(self._head), len(data) - at)
            if self._left:
                self._left -= step
            else:
                self._head += data[at : at + step]
            if len(self._head) == _HEAD_BYTES:
                self._left, self._head = int.from_bytes(self._head[3:], "big"), b""
            at += step

    @property
    def is_plain(self) -> bool:
        """Whether what came is no TLS, whose records have the types 20 to 23."""
        return self.first_byte >= 0 and not 20 <= self.first_byte <= 23

    @property
    def is_whole(self) -> bool:
        """Whether the last record has ended."""
        return not (self._left or self._head)

    @property
    def is_huge_hello(self) -> bool:
        """Whether the first message announces more than any client of ours sends.

        OpenSSL would allocate it.
        """
        seen = self._greeting
        # A record that ends before the length of the message would hide it.
        if len(seen) >= _HEAD_BYTES and int.from_bytes(seen[3:5], "big") < 4:
            return True
        return len(seen) == _GREETING_BYTES and int.from_bytes(seen[6:], "big") >= _MOST_HELLO_BYTES


class _Wire:
    """The socket, and the bytes between it and OpenSSL."""

    def __init__(self, fd: int) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.records = _Records()
        self.has_ended = False
        self._fd = fd
        self._unsent = memoryview(b"")

    @property
    def has_unsent(self) -> bool:
        """Whether bytes are encrypted and not sent."""
        return bool(self._unsent) or bool(self.outgoing.pending)

    @property
    def is_cut(self) -> bool:
        """Whether the connection ended inside a record."""
        return self.has_ended and not self.records.is_whole

    def never_wait(self) -> None:
        """Make the socket so; its time-outs change that."""
        set_blocking(self._fd, False)

    def receive(self) -> None:
        """Take what has come.

        Raises:
            BlockingIOError: It is nothing.
        """
        data = os.read(self._fd, 4 * _RECORD_BYTES)
        if data:
            self.records.take(data)
            self.incoming.write(data)
        else:
            self.has_ended = True
            self.incoming.write_eof()

    def flush(self) -> None:
        """Send what is encrypted.

        Raises:
            BlockingIOError: The socket takes no more.
        """
        while self.has_unsent:
            if not self._unsent:
                self._unsent = memoryview(self.outgoing.read())
            self._unsent = self._unsent[os.write(self._fd, self._unsent) :]


class TlsSession:
    """One end of a connection whose bytes pass through TLS 1.3.

    Any threads may call it; no call waits.

    Args:
        context: What sessions share.
        fd: The socket, which the caller owns.
        is_server: Whether the other end has called.
        secrets: The keys that both ends know.
        name: Host name or address that the certificate of a server must have; "" for any.

    Attributes:
        is_ready: Whether the handshake is over.
        is_other_secret: Whether the other end has another key, or none.
    """

    def __init__(
        self,
        context: TlsContext,
        fd: int,
        is_server: bool,
        secrets: Sequence[tuple[str, bytes]],
        name: str,
    ) -> None:
        self.is_ready = self.is_other_secret = False
        self._wire, self._is_server = _Wire(fd), is_server
        self._has_certificate = context.has_certificate
        self._shown: list[str] = []
        checks_name = bool(name) and not is_server
        made = context.end(is_server, checks_name, secrets, self._shown)
        host = name if checks_name else None
        self._tls = made.wrap_bio(self._wire.incoming, self._wire.outgoing, is_server, host)
        self._why: tuple[int, str] | None = None
        # A signal handler may call inside a call of its thread.
        self._lock, self._is_called = threading.RLock(), False

    @property
    def secret_name(self) -> str:
        """The name of the key that a client has shown; "": of none."""
        return self._shown[-1] if self._shown and self.is_ready else ""

    @property
    def first_byte(self) -> int:
        """The first byte received; -1: none."""
        return self._wire.records.first_byte

    @property
    def has_unsent(self) -> bool:
        """Whether bytes are encrypted and not sent."""
        return self._wire.has_unsent

    @property
    def has_unread(self) -> bool:
        """Whether bytes may be read that have left the socket already."""
        has_bytes = self._tls.pending() or self._wire.incoming.pending
        return self.is_ready and bool(self._why or has_bytes)

    def read(self, into: Any) -> int:
        """Receive bytes after the handshake; return how many, 0 at the end."""
        view = memoryview(into).cast("B")
        with self._turn():
            self._shake()
            return int(self._go_on(lambda: self._tls.read(len(view), view))) if view else 0

    def write(self, head: Any, rest: Any) -> int:
        """Take bytes of both after the handshake; return how many."""
        first, second = memoryview(head).cast("B"), memoryview(rest).cast("B")
        with self._turn():
            self._shake()
            self._wire.flush()
            if len(first) < _RECORD_BYTES // 4:  # a head and what follows it are one record
                skip = _RECORD_BYTES - len(first)
                parts = [memoryview(bytes(first) + bytes(second[:skip])), second[skip:]]
            else:
                parts = [first, second]
            taken = 0
            with contextlib.suppress(BlockingIOError):  # what was taken is sent later
                for part in parts:
                    for at in range(0, len(part), _RECORD_BYTES):
                        record = part[at : at + _RECORD_BYTES]
                        taken += self._go_on(partial(self._tls.write, record))
                        if self._wire.outgoing.pending >= _BATCH_BYTES:
                            self._wire.flush()
                self._wire.flush()
            return taken

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            if self._is_called:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            self._is_called = True
            try:
                self._wire.never_wait()
                yield
            finally:
                self._is_called = False

    def _shake(self) -> None:
        if self.is_ready:
            return
        self._go_on(self._tls.do_handshake)
        # The other end has shown that it knows the key, or a certificate of the authority.
        if not (self._has_certificate or self._tls.session_reused):
            self.is_other_secret = True
            self._fail(errno.EPROTO, "the other end did not use the job's key")
        self.is_ready = True
        self._flush_now()

    def _go_on(self, call: Callable[[], T]) -> T:
        """Return the result of a call, which gets the bytes that it asks for."""
        if self._why is not None:
            raise OSError(*self._why)
        while True:
            try:
                return call()
            except ssl.SSLWantReadError:
                self._flush_now()
                self._wire.receive()
                if self._is_server and self._wire.records.is_huge_hello:
                    text = os.strerror(errno.EMSGSIZE)
                    self._fail(errno.EPROTO, f"the TLS handshake failed: {text}")
            except ssl.SSLZeroReturnError:
                return cast(T, 0)
            except ssl.SSLError as error:
                with contextlib.suppress(OSError):
                    self._flush_now()  # an alert
                if self._wire.has_ended and self.is_ready and not self._wire.is_cut:
                    return cast(T, 0)
                self._explain(error)

    def _flush_now(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wire.flush()

    def _fail(self, code: int, why: str) -> NoReturn:
        self._why = code, why
        raise OSError(code, why)

    def _explain(self, error: ssl.SSLError) -> NoReturn:
        name = error.reason or ""
        reason = name.lower().replace("_", " ") or str(error)
        secret = not (self._has_certificate or self._wire.has_ended) and name in _OTHER_SECRET
        if self.is_ready and self._wire.is_cut:
            self._fail(errno.EBADMSG, "the connection was cut inside a TLS record")
        if self.is_ready:
            text = f"a TLS record was changed, lost, repeated or reordered on the way ({reason})"
            self._fail(errno.EBADMSG, text)
        if self._wire.records.is_plain:
            self._fail(errno.EPROTO, "the other end does not encrypt")
        if self._wire.has_ended:
            self._fail(errno.ECONNRESET, "the other end hung up during the TLS handshake")
        if secret:
            self.is_other_secret = True
            self._fail(errno.EPROTO, "the other end has another token, or none")
        if name in _OLD:
            self._fail(errno.EPROTO, "the other end has no TLS 1.3")
        if isinstance(error, ssl.SSLCertVerificationError):
            self._fail(errno.EPROTO, f"its certificate is refused: {error.verify_message}")
        self._fail(errno.EPROTO, f"the TLS handshake failed: {reason}")
