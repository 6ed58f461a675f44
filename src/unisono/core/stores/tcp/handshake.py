"""The client's side of the handshake with a store server."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from typing import NoReturn

from unisono.core.base.deadline import Deadline
from unisono.core.base.net.sockets import is_foreign, is_local
from unisono.core.base.net.tls import session_of
from unisono.core.stores.tcp.token import HELLO, NONCE_BYTES, PROOF_BYTES, Answer, is_proof, proof
from unisono.core.stores.tcp.wire import MAGIC, RequestOp, encode_request
from unisono.errors import HandshakeError, StoreConnectionError, StoreTimeoutError

_OPENING = encode_request(RequestOp.VALIDATE, MAGIC) + bytes([RequestOp.PING])

TOKEN_HINT = (
    "set UNISONO_TOKEN to the same secret on all hosts; or, on a network where any process may use "
    "the store, UNISONO_INSECURE=1 for the server's process"
)

_TLS_HINT = "give all processes of a job the same UNISONO_TLS and UNISONO_TOKEN, and OpenSSL"

_REASONS = {
    Answer.WRONG_TOKEN: (
        "it has another token than this client",
        "UNISONO_TOKEN has to be the same for all processes of a job",
    ),
    Answer.TOKEN_NEEDED: (
        "it needs the job's token, and this client has none",
        "set UNISONO_TOKEN to what the server's process has",
    ),
    Answer.NO_TOKEN_HERE: (
        "this client has a token, and the server has none",
        "set UNISONO_TOKEN for the process that runs the server too, or for neither",
    ),
    Answer.LOCAL_ONLY: (
        "it has no token, and then serves only its own machine",
        TOKEN_HINT,
    ),
    Answer.TLS_NEEDED: (
        "it encrypts its connections, and this client does not",
        _TLS_HINT,
    ),
    Answer.NO_TLS_HERE: (
        "this client encrypts its connections, and the server does not",
        _TLS_HINT,
    ),
}


def shake_hands(sock: socket.socket, address: str, token: bytes, deadline: Deadline) -> None:
    """Introduce this client and make sure that a TCPStore server answers.

    Args:
        sock: Connected to the server.
        address: Where, for error texts.
        token: Of the job; empty if there is none.
        deadline: When to give up.

    Raises:
        HandshakeError: Another kind of program answered, or the server refused this client.
        StoreConnectionError: The server went away.
        StoreTimeoutError: The server is connected, but does not answer.
    """
    try:
        if token:
            _prove(sock, address, token, deadline)
        else:
            _introduce(sock, address, b"", deadline)
    except TimeoutError as error:
        if isinstance(error, StoreTimeoutError):
            raise
        if error.errno is not None:
            raise _lost(address, error) from error
        raise StoreTimeoutError(
            f"connecting timed out: the store server at {address} accepted the connection but "
            f"did not answer within {deadline}",
            hint="another program has the port, or the process that runs the server is stopped or "
            "overloaded",
        ) from error
    except OSError as error:
        if isinstance(error, HandshakeError):
            raise
        if error.errno == errno.EPROTO:
            _not_encrypted(sock, address, error)
        raise _lost(address, error) from error


def asks_for_tls(error: HandshakeError) -> bool:
    """Whether a server has refused a client because it does not encrypt."""
    return error.what.endswith(_REASONS[Answer.TLS_NEEDED][0])


def _not_encrypted(sock: socket.socket, address: str, error: OSError) -> NoReturn:
    """Raise the error for a TLS handshake that has failed."""
    session = session_of(sock)
    if session is not None and session.is_other_secret:
        _refused(address, Answer.WRONG_TOKEN)
    if session is not None and session.first_byte in list(_REASONS):
        _refused(address, session.first_byte)
    raise HandshakeError(
        f"the connection to the store server at {address} cannot be encrypted: {error.strerror}",
        hint=_TLS_HINT,
    ) from error


def _lost(address: str, error: OSError) -> StoreConnectionError:
    return StoreConnectionError(
        f"connecting failed: lost the connection to the store at {address} ({error})",
        hint="the process that runs the store's server ended, or is not up yet; torch's server "
        "knows no UNISONO_TOKEN",
    )


def _introduce(sock: socket.socket, address: str, before: bytes, deadline: Deadline) -> None:
    """Send VALIDATE and PING after `before`, and check what comes back."""
    nonce = os.urandom(4)
    _send(sock, before + _OPENING + nonce, deadline)
    # After a proof the server sends its verdict first.
    expected = (bytes([Answer.WELCOME]) if before else b"") + nonce
    answer = _receive(sock, len(expected), deadline)
    if answer == expected:
        return
    if not answer:
        raise ConnectionResetError("the server closed the connection")
    if len(answer) == 1:
        _refused(address, answer[0])
    _no_server(address)


def _prove(sock: socket.socket, address: str, token: bytes, deadline: Deadline) -> None:
    mine = os.urandom(NONCE_BYTES)
    _send(sock, HELLO + mine, deadline)
    answer = _receive(sock, 1, deadline)
    if answer == bytes([Answer.CHALLENGE]):
        answer += _receive(sock, NONCE_BYTES + PROOF_BYTES, deadline)
    if not answer:
        raise ConnectionResetError("the server closed the connection")
    if answer == bytes([Answer.NO_TOKEN_HERE]) and is_local(sock) and not is_foreign(sock):
        # A process of this user could read the token anyway; see `Gate`.
        _introduce(sock, address, b"", deadline)
        return
    if answer[0] != Answer.CHALLENGE:
        _refused(address, answer[0])
    if len(answer) < 1 + NONCE_BYTES + PROOF_BYTES:
        _no_server(address)
    theirs, shown = answer[1 : 1 + NONCE_BYTES], answer[1 + NONCE_BYTES :]
    own = proof(token, b"client", mine, theirs)
    if not is_proof(shown, proof(token, b"server", mine, theirs)):
        # So that the server logs the refusal too. The proof reveals nothing to it.
        with contextlib.suppress(OSError):
            _send(sock, own, deadline)
        _refused(address, Answer.WRONG_TOKEN)
    _introduce(sock, address, own, deadline)


def _refused(address: str, code: int) -> NoReturn:
    if code not in list(_REASONS):
        _no_server(address)
    reason, hint = _REASONS[Answer(code)]
    raise HandshakeError(
        f"the store server at {address} does not let this client in: {reason}", hint=hint
    )


def _no_server(address: str) -> NoReturn:
    raise HandshakeError(
        f"what listens at {address} is not a TCPStore server",
        hint="another program has the port; choose another port, or 0 for any free port",
    )


def _send(sock: socket.socket, data: bytes, deadline: Deadline) -> None:
    # settimeout() refuses infinity and anything beyond the C time type.
    sock.settimeout(min(max(deadline.remaining(), 0.001), 1e6))
    sock.sendall(data)


def _receive(sock: socket.socket, nbytes: int, deadline: Deadline) -> bytes:
    """Return `nbytes` bytes, or fewer if the other end stops there."""
    received = b""
    while len(received) < nbytes:
        sock.settimeout(min(max(deadline.remaining(), 0.001), 1e6))
        chunk = sock.recv(nbytes - len(received))
        if not chunk:
            break
        received += chunk
    return received
