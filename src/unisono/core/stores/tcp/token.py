"""Access to a store server: both ends prove that they know the job's token. No I/O.

A client with a token proves it before its first request; the token itself is never sent.

    client  HELLO, 32 random bytes
    server  CHALLENGE, 32 random bytes, proof("server")
    client  proof("client"), then requests
    server  WELCOME, then replies

    proof(end) = HMAC-SHA256(token, "unisono store " end, client's bytes, server's bytes)

A recorded handshake cannot be replayed, because each proof covers fresh random bytes of the other
end. A client without a token begins with its first request, as torch's does. The server accepts it
if it is a process of the server's user on the same machine: such a process could read the token
anyway. The server also accepts it if it serves strangers. A server without a token
answers NO_TOKEN_HERE, and a client of the same user on the same machine goes on without a proof. A
refused client gets one byte, an `Answer`, and the connection ends. Until a client is accepted the
server reads only a fixed number of bytes.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable

from unisono.core.stores.tcp.wire import MAGIC, RequestOp, encode_request

HELLO = b"UNISONO\x01"
NONCE_BYTES = 32
PROOF_BYTES = 32

REFUSED_KEY = "refused"
"""The key, which users cannot write, of the first client that was refused for lack of a token."""

REFUSAL_KEY = "refusal"
"""The key of the first client that was refused for any reason, and of the reason."""

_OPENING = encode_request(RequestOp.VALIDATE, MAGIC)


class Answer(enum.IntEnum):
    """The first byte that a server sends to a client with a token or to a refused client."""

    CHALLENGE = 1
    WELCOME = 2
    WRONG_TOKEN = 3
    TOKEN_NEEDED = 4
    NO_TOKEN_HERE = 5
    LOCAL_ONLY = 6
    TLS_NEEDED = 7
    NO_TLS_HERE = 8


class Refused(Exception):
    """The server refuses a client.

    Attributes:
        answer: Bytes for the client; they end with an Answer, or are empty.
        why: The reason for the server's log.
        lacks_token: Whether it speaks the protocol, and would be served if both had a token.
    """

    def __init__(self, answer: bytes, why: str, *, lacks_token: bool = False) -> None:
        super().__init__(why)
        self.answer = answer
        self.why = why
        self.lacks_token = lacks_token


def proof(token: bytes, end: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return the proof that `end` (b"server" or b"client") knows the token."""
    # Imported here because it takes as long to load as the rest of a store's client.
    import hmac

    return hmac.digest(token, b"unisono store " + end + client_nonce + server_nonce, "sha256")


def is_proof(shown: bytes, expected: bytes) -> bool:
    """Return whether two proofs are equal, in a time that does not depend on their difference."""
    import hmac

    return hmac.compare_digest(shown, expected)


def _byte(answer: Answer) -> bytes:
    return bytes([answer])


class Gate:
    """The server's side of one connection, until its first request.

    Args:
        token: Of the job; empty if there is none.
        serves_strangers: Clients without a token may be on other machines too.
        is_local: Returns whether the client is on this machine.
        is_foreign: Returns whether a client on this machine is another user's.
        lacks_tls: Returns, for a client with or without a token, whether the connection must be
            encrypted and is not.
        is_certified: Returns whether the client has shown a certificate, which is enough.
    """

    def __init__(
        self,
        token: bytes,
        serves_strangers: bool,
        is_local: Callable[[], bool],
        is_foreign: Callable[[], bool],
        lacks_tls: Callable[[bool], bool] = lambda has_token: False,
        is_certified: Callable[[], bool] = bool,
    ) -> None:
        self._is_certified = is_certified
        self._lacks_tls = lacks_tls
        self._is_foreign = is_foreign
        self._token = token
        self._serves_strangers = serves_strangers
        self._is_local = is_local
        self._data = b""
        self._expected = b""
        self.is_open = False

    def feed(self, chunk: bytes) -> tuple[bytes, bytes]:
        """Take bytes; return an answer and, after acceptance, the bytes that follow the handshake.

        Raises:
            Refused: The server does not accept this client.
        """
        self._data += chunk
        answer = b""
        if not self._expected and self._data[:1] == _OPENING[:1]:
            self._check_stranger()
            self.is_open = True
        elif not self._expected:
            answer = self._challenge()
        if self._expected and len(self._data) >= PROOF_BYTES:
            shown, self._data = self._data[:PROOF_BYTES], self._data[PROOF_BYTES:]
            if not is_proof(shown, self._expected):
                raise Refused(answer + _byte(Answer.WRONG_TOKEN), "it has another token")
            answer += _byte(Answer.WELCOME)
            self.is_open = True
        return answer, self._data if self.is_open else b""

    def _check_tls(self, *, has_token: bool) -> None:
        if self._lacks_tls(has_token):
            why = "it does not encrypt; give it the UNISONO_TLS of this server"
            raise Refused(_byte(Answer.TLS_NEEDED), why)

    def _check_stranger(self) -> None:
        self._check_tls(has_token=False)
        if self._serves_strangers or self._is_certified():
            return
        why, insecure = "it is on another machine", "or UNISONO_INSECURE=1 here accepts any client"
        if self._is_local():
            if not self._token or not self._is_foreign():
                return
            why = "it is another user's"
        if self._token:
            remedy = f"give it the job's token, UNISONO_TOKEN; {insecure}"
            raise Refused(_byte(Answer.TOKEN_NEEDED), f"{why} and has no token; {remedy}")
        remedy = f"set UNISONO_TOKEN to the same secret here and there; {insecure}"
        raise Refused(
            _byte(Answer.LOCAL_ONLY),
            f"{why}, and there is no token; {remedy}",
            lacks_token=self._data.startswith(_OPENING),
        )

    def _challenge(self) -> bytes:
        """Answer a complete HELLO with the proof that this server knows the token."""
        if not (self._data.startswith(HELLO) or HELLO.startswith(self._data)):
            raise Refused(b"", "it is no client of a store")
        if len(self._data) < len(HELLO) + NONCE_BYTES:
            return b""
        self._check_tls(has_token=True)
        if not self._token:
            if not (self._serves_strangers or self._is_local()):
                why = "it has a token, and there is none here"
                raise Refused(_byte(Answer.NO_TOKEN_HERE), why, lacks_token=True)
            # The client goes on without a token if it is on this machine.
            self._data = self._data[len(HELLO) + NONCE_BYTES :]
            self.is_open = True
            return _byte(Answer.NO_TOKEN_HERE)
        theirs = self._data[len(HELLO) : len(HELLO) + NONCE_BYTES]
        self._data = self._data[len(HELLO) + NONCE_BYTES :]
        mine = os.urandom(NONCE_BYTES)
        self._expected = proof(self._token, b"client", theirs, mine)
        return _byte(Answer.CHALLENGE) + mine + proof(self._token, b"server", theirs, mine)
