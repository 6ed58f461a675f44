"""Proofs of a client that looks at a rank, and of the rank that answers. No I/O.

Both ends know a key, which neither sends. So a process that took the port of an ended rank can
neither answer in its place nor ask another rank.

    client  a hello: random bytes in place of the ranks, and proof("viewer") in place of the token
    rank    ACCEPT, proof("rank", answer), answer

    proof(end, data) = HMAC-SHA256(key, end, hello without token, data)

A client of the same user on the same host has no key, see `status`. It takes a socket of its own
user for the rank.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Iterable

from unisono.core.base.net.tls import secret_of
from unisono.core.transports.tcp.address import TCPAddress
from unisono.core.transports.tcp.wire import ACCEPT, Hello

VIEWERS = "viewers"
"""The key of the addresses that `unisono top HOST:PORT` reads, a rank per line."""

NO_KEY = b""
"""The key of a client of the same user."""

_RANDOM = struct.Struct("<III")
_SHOWN_BYTES = 16
_PROOF_BYTES = 32


def key_of(job_token: str, address: TCPAddress) -> bytes:
    """Return the key that the holder of a job's token shares with a rank.

    Args:
        job_token: UNISONO_TOKEN; not empty.
        address: Of the rank, without its token.
    """
    return hmac.digest(job_token.encode(), b"unisono top" + address.token, "sha256")


def secret_by(key: bytes) -> tuple[str, bytes]:
    """Return the key for encryption that goes with the key of a viewer, and its name."""
    name, secret = secret_of(key, "viewer")
    return f"{name} {_proof(secret, b'name', Hello(0, 0, 0, 0, b''))[:4].hex()}", secret


def question(channel: int, key: bytes) -> Hello:
    """Return the hello of a client: a question that no other client has asked."""
    number, rank, peer = _RANDOM.unpack(os.urandom(_RANDOM.size))
    asked = Hello(number, rank, peer, channel, b"")
    return asked._replace(token=_proof(key, b"viewer", asked)[:_SHOWN_BYTES])


def key_shown(hello: Hello, keys: Iterable[bytes]) -> bytes:
    """Return the key of which a hello has the proof; NO_KEY if it has none."""
    for key in keys:
        if hmac.compare_digest(hello.token, _proof(key, b"viewer", hello)[:_SHOWN_BYTES]):
            return key
    return NO_KEY


def sealed(hello: Hello, key: bytes, data: bytes) -> bytes:
    """Return the answer of a rank."""
    return ACCEPT + _proof(key, b"rank", hello, data) + data


def opened(hello: Hello, key: bytes, answer: bytes) -> bytes | None:
    """Return the data of an answer; None if it refuses, or is not of a process with the key."""
    start = len(ACCEPT) + _PROOF_BYTES
    data = answer[start:]
    return data if hmac.compare_digest(answer, sealed(hello, key, data)) else None


def _proof(key: bytes, end: bytes, hello: Hello, data: bytes = b"") -> bytes:
    return hmac.digest(key, end + hello._replace(token=b"").pack() + data, "sha256")
