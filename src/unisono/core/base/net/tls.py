"""Encryption of connections: which are encrypted, with which keys, and sockets that encrypt.

UNISONO_TLS decides. With a token every connection to another host is TLS 1.3, and both ends show
that they know the token: TLS proves a pre-shared key that is derived from it. The key differs by
purpose and by the end that is called, and TLS makes fresh keys of it for each connection. Nothing
is resumed, and no early data is sent. With `cert` both ends show certificates instead.

A client begins with a TLS record or without one. The end that is called looks at the first byte,
and refuses what its own UNISONO_TLS forbids, so no connection is plain because somebody wished so.
"""

from __future__ import annotations

import enum
import errno
import functools
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Self

from unisono.core.base import config
from unisono.core.base.log import get_logger, log_once
from unisono.core.base.net.sockets import is_local
from unisono.core.base.net.tls_maker import tls_maker
from unisono.errors import InvalidArgumentError, UnsupportedError

_LOG = get_logger("tls")

_MODES = ("auto", "on", "off", "cert")
_FILES = ("CERT", "PKEY", "CA_FILE")
_SHOWN = ("TLS 1.3 (token)", "TLS 1.3 (certificates)")
_HANDSHAKE = b"\x16"
_HINT = "install OpenSSL 3 or 1.1.1 (libssl), or set UNISONO_TLS=off on all hosts"

Secrets = list[tuple[str, bytes]]
"""Names of keys, which are sent, and the keys."""


class TlsRule(enum.IntEnum):
    """The connections that must be encrypted."""

    NONE = 0
    OTHER_HOSTS = 1
    ALL = 2


def rule_for(token: str | bytes) -> TlsRule:
    """Return what UNISONO_TLS asks of a job with this token, which may be empty.

    Raises:
        InvalidArgumentError: Its value is unknown, or it needs a token or files that are not there.
        UnsupportedError: It needs OpenSSL, which is not there.
    """
    mode = config.get("UNISONO_TLS")
    if mode not in _MODES:
        raise InvalidArgumentError(
            f"environment variable UNISONO_TLS={mode!r} is none of auto, on, off and cert"
        )
    if mode == "off" or (mode == "auto" and not token):
        return TlsRule.NONE
    if mode == "on" and not token:
        raise InvalidArgumentError(
            "UNISONO_TLS=on encrypts with keys from the job's token, and there is no token",
            hint="set UNISONO_TOKEN to the same secret on all hosts",
        )
    if absent := why_no_tls():
        if mode == "auto":
            return TlsRule.NONE
        raise UnsupportedError(
            f"UNISONO_TLS={mode} cannot encrypt connections here: {absent}", hint=_HINT
        )
    if mode == "cert":
        _certificates()
    return TlsRule.ALL if mode == "on" else TlsRule.OTHER_HOSTS


def _warn_of_plain(sock: socket.socket) -> None:
    """Log, once, that a connection of a job with a token is plain because OpenSSL is missing."""
    if config.get("UNISONO_TLS") == "auto" and (absent := why_no_tls()) and not is_local(sock):
        text = "connections to other hosts are not encrypted: %s; %s"
        log_once(_LOG, logging.WARNING, text, absent, _HINT)


def why_no_tls() -> str:
    """Return why this process cannot encrypt; "" if it can."""
    return str(tls_maker().why_no_openssl())


def protection(token: str) -> str:
    """Return what protects the connections of a job to other hosts, in words."""
    return "none" if rule_for(token) is TlsRule.NONE else _SHOWN[uses_certificates()]


def protection_of(sock: socket.socket) -> str:
    """Return what protects a connection, in words."""
    return _SHOWN[uses_certificates()] if is_secured(sock) else "plain"


def uses_certificates() -> bool:
    """Whether both ends show certificates."""
    return config.get("UNISONO_TLS") == "cert"


def secret_of(token: bytes, purpose: str, end: bytes = b"") -> tuple[str, bytes]:
    """Return the key for one purpose, and its name.

    Args:
        token: Of the job.
        purpose: Such as "store".
        end: Random bytes of the end that is called, if it has published them.

    Source: RFC 5869 (HKDF-SHA256).
    """
    import hmac  # as in stores.tcp.token: it takes long to load

    whole = hmac.digest(b"unisono TLS", token, "sha256")
    return purpose, hmac.digest(whole, purpose.encode() + b"\0" + end + b"\1", "sha256")


def certificate_files() -> list[str]:
    """Return the files of UNISONO_TLS_CERT, _PKEY and _CA_FILE, or of Gloo's variables."""
    gloo = "GLOO_DEVICE_TRANSPORT_TCP_TLS_"
    return [
        config.get(f"UNISONO_TLS_{name}") or config.environ().get(gloo + name, "")
        for name in _FILES
    ]


@functools.lru_cache(maxsize=8)
def _context(files: tuple[str, ...]) -> Any:
    return tls_maker().TlsContext(*files)


def _certificates() -> Any:
    files = certificate_files()
    if missing := [f"UNISONO_TLS_{n}" for n, file in zip(_FILES, files, strict=True) if not file]:
        raise InvalidArgumentError(f"UNISONO_TLS=cert needs {', '.join(missing)}")
    try:
        return _context(tuple(files))
    except RuntimeError as error:
        raise InvalidArgumentError(f"UNISONO_TLS=cert cannot use the file {error}") from None


def context() -> Any:
    """Return what the sessions of this process share."""
    return _certificates() if uses_certificates() else _context(())


class TlsRefusal(ConnectionError):
    """A connection is refused because one end encrypts and the other does not."""


class TlsPolicy(NamedTuple):
    """What one end of connections does about encryption.

    Attributes:
        rule: The connections that must be encrypted.
        secrets: The keys that both ends know; a caller has one, or none without a token.
    """

    rule: TlsRule
    secrets: Secrets

    @classmethod
    def of(cls, token: bytes, purpose: str, end: bytes = b"") -> Self:
        """Return the policy of a job with this token, see `rule_for` and `secret_of`."""
        return cls(rule_for(token), [secret_of(token, purpose, end)] if token else [])

    def call(self, sock: socket.socket, name: str = "") -> socket.socket:
        """Return the socket to use in place of one that has just called another end.

        Args:
            sock: Connected. It is taken over if the connection must be encrypted.
            name: Host name or address that a certificate must have.
        """
        if self.rule is TlsRule.NONE:
            if self.secrets:
                _warn_of_plain(sock)
            return sock
        if self.rule is TlsRule.OTHER_HOSTS and is_local(sock):
            return sock
        return SecuredSocket(sock, self.secrets, name if uses_certificates() else "")

    def answer(self, sock: socket.socket, *, refuses_plain: bool = True) -> socket.socket:
        """Return the socket to use in place of one that was accepted, and can be read.

        Raises:
            BlockingIOError: There is nothing to read.
            TlsRefusal: The connection must not be plain, or not be encrypted.
        """
        first = sock.recv(1, socket.MSG_PEEK)
        if first == _HANDSHAKE and self.rule is TlsRule.NONE:
            raise TlsRefusal("it encrypts, and this end does not (UNISONO_TLS)")
        if first == _HANDSHAKE:
            return SecuredSocket(sock, self.secrets, is_server=True)
        if refuses_plain and first and self.rule is not TlsRule.NONE and not is_local(sock):
            raise TlsRefusal("it does not encrypt; give it the UNISONO_TLS of this end")
        return sock

    def forbids(self, sock: socket.socket, *, is_stranger: bool = False) -> bool:
        """Whether a connection must be encrypted and is not.

        Args:
            sock: The connection.
            is_stranger: Whether the other end has no token, so that other rules admit it if this
                end has no certificate.
        """
        if is_secured(sock) or self.rule is TlsRule.NONE:
            return False
        is_spared = is_stranger and not uses_certificates()
        return self.rule is TlsRule.ALL or not (is_spared or is_local(sock))


class SecuredSocket(socket.socket):
    """A connected socket whose bytes pass through TLS.

    It waits as other sockets do: for ever, for its time-out, or not at all. Then what `send` has
    taken may be unsent, see `has_unsent`; another `send`, also of nothing, goes on.

    Args:
        sock: The connection, which is taken over.
        secrets: The keys that both ends know.
        name: Host name or address that the certificate of the other end must have.
        is_server: Whether the other end has called.
    """

    def __init__(
        self,
        sock: socket.socket,
        secrets: Secrets,
        name: str = "",
        *,
        is_server: bool = False,
    ) -> None:
        shared, timeout = context(), sock.gettimeout()
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self.settimeout(timeout)
        try:
            self.tls: Any = tls_maker().TlsSession(shared, self.fileno(), is_server, secrets, name)
        except RuntimeError as error:
            self.close()
            raise OSError(errno.ENOMEM, str(error)) from None

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        if flags:
            self._refuse()
        view = memoryview(buffer).cast("B")
        return self._wait(self.tls.read, view[:nbytes] if nbytes else view, reads=True)

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        data = bytearray(bufsize)
        return bytes(data[: self.recv_into(data, 0, flags)])

    def sendmsg(self, buffers: Any, ancdata: Any = (), flags: int = 0, address: Any = None) -> int:
        if flags or ancdata or address:
            self._refuse()
        head, rest = (*buffers, b"", b"")[:2]
        return self._wait(self.tls.write, head, rest)

    def send(self, data: Any, flags: int = 0) -> int:
        if flags:
            self._refuse()
        return self._wait(self.tls.write, data, b"")

    def sendall(self, data: Any, flags: int = 0) -> None:
        if flags:
            self._refuse()
        view = memoryview(data).cast("B")
        while view or self.tls.has_unsent:
            view = view[self.send(view) :]

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    # They would pass by TLS.
    recvfrom = recvfrom_into = recvmsg = recvmsg_into = sendto = sendfile = dup = _refuse

    def _wait(self, call: Callable[..., int], *args: Any, reads: bool = False) -> int:
        if self.fileno() < 0:  # another connection may have the number
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        timeout_s = self.gettimeout()
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                return call(*args)
            except BlockingIOError:
                if timeout_s == 0:
                    raise
            except InterruptedError:
                continue
            left_s = None if until_s is None else until_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError("timed out")
            waits = selectors.EVENT_READ if reads or not self.tls.is_ready else 0
            waits |= selectors.EVENT_WRITE if self.tls.has_unsent else 0
            with selectors.DefaultSelector() as selector:
                selector.register(self, waits or selectors.EVENT_WRITE)
                selector.select(left_s)


def is_secured(sock: socket.socket) -> bool:
    """Whether the bytes of a socket pass through TLS."""
    return isinstance(sock, SecuredSocket)


def session_of(sock: socket.socket) -> Any:
    """Return what encrypts a socket, or None."""
    return sock.tls if isinstance(sock, SecuredSocket) else None


def key_shown_by(sock: socket.socket) -> str:
    """Return the name of the key that the caller of an encrypted socket has shown, or ""."""
    return str(sock.tls.secret_name) if isinstance(sock, SecuredSocket) else ""


def has_unread(sock: socket.socket) -> bool:
    """Whether bytes may be read that have left the socket, so that no selector reports them."""
    return isinstance(sock, SecuredSocket) and bool(sock.tls.has_unread)


def has_unsent(sock: socket.socket | None) -> bool:
    """Whether bytes that the socket has taken wait until it is writable."""
    return isinstance(sock, SecuredSocket) and bool(sock.tls.has_unsent)
