"""Bytes of the TCP transport: handshake and frame header. Pure; no socket here.

A connection starts with a hello of fixed size, answered by one byte. So an unknown client can send
44 bytes that are parsed, and no more. Frames follow: a fixed header, then `nbytes` of payload.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from unisono.core.transports.messages import Key, Purpose
from unisono.errors import HandshakeError

_MAGIC = b"unisono\x00"
_VERSION = 4

HELLO = struct.Struct("<8sIIIII16s")
"""magic, version, world size, sender's rank, receiver's rank, channel, receiver's token."""

ACCEPT = b"\x01"
"""The connection stands."""
REFUSE = b"\x02"
"""The caller is refused: wrong world, wrong token, or a rank that counts as lost."""

INSPECT = 0xFFFF_FFFF
"""The channel of a client that wants the state of the rank. The rank answers and hangs up."""
RECORDS = 0xFFFF_FFFE
"""As INSPECT, for the recorded calls of the rank."""
CLOCK = 0xFFFF_FFFD
"""As INSPECT, for the monotonic clock of the rank: CLOCK_TIME."""

CLOCK_TIME = struct.Struct("<q")

FRAME = struct.Struct("<BxxxIQqQ")
"""kind, info, context, tag, nbytes."""


class Hello(NamedTuple):
    """The two ranks of a connection, and its purpose: channel 0 is the link, 1 and up are wires.

    The receiver's token proves that the caller has read the store.
    """

    world_size: int
    rank: int
    peer: int
    channel: int
    token: bytes

    def pack(self) -> bytes:
        return HELLO.pack(_MAGIC, _VERSION, *self)

    @classmethod
    def parse(cls, data: bytes) -> Hello:
        """Decode a hello.

        Raises:
            HandshakeError: Not a hello of unisono, or another protocol version.
        """
        magic, version, *rest = HELLO.unpack(data)
        if magic != _MAGIC:
            raise HandshakeError(f"a stranger called: first bytes {magic!r}, expected {_MAGIC!r}")
        if version != _VERSION:
            raise HandshakeError(f"protocol version {version} called, this is version {_VERSION}")
        return cls(*rest)


class Frame(NamedTuple):
    """Header of one message."""

    key: Key
    nbytes: int
    info: int

    def pack(self) -> bytes:
        context, kind, tag = self.key
        return FRAME.pack(kind, self.info, context, tag, self.nbytes)

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> Frame:
        """Decode a header.

        Raises:
            ValueError: The kind is unknown, so the stream is out of step.
        """
        kind, info, context, tag, nbytes = FRAME.unpack(data)
        return cls(Key(context, Purpose(kind), tag), nbytes, info)
