"""The messages of one object: a first message of fixed size, and the parts that do not fit.

    first   [FIRST_BYTES]  what | serializer | bytes of the head | tag | begin of the head
    rest                   end of the head
    large                  one message per large buffer, straight from and into its memory

    head    number of buffers | size of each | the small ones | the serializer's header

A small object is one message. `first` gives the length of `rest`, and `rest` lists the large
buffers, so no rank waits for a message that is not sent. In messages to a single rank, `rest` and
`large` have a tag that the sender uses for no other packet. So several threads may send to one
rank, or receive from one rank, without mixing their packets.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from unisono.core.c10d.objects.serializer import Serializer

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]

FIRST_BYTES = 1024

# Buffers up to this size are copied into the head. A larger limit copies more bytes; a smaller one
# sends more messages, and a message costs some microseconds.
_SMALL_BYTES = 16 * 1024

_FIRST = struct.Struct("<4sIQQ")
_OBJECT = b"uno2"
_REFUSAL = b"uno!"


# Far above the tags of users, which are usually small.
_tags = itertools.count(2**62 + 2**61)


class Packet:
    """An object that is sent or received.

    Attributes:
        first: [FIRST_BYTES]
        rest: [bytes of the head that `first` has no room for]
        large: The memory of each large buffer; empty until `open_rest`.
    """

    def __init__(self, first: ByteArray, rest: ByteArray, large: Sequence[ByteArray] = ()) -> None:
        self.first = first
        self.rest = rest
        self.large = list(large)
        self._known_head: bytes | None = None

    @classmethod
    def of(cls, obj: Any, serializer: Serializer) -> Packet:
        """Return the packet of an object; it refers to large arrays and does not copy them."""
        header, buffers = serializer.dumps(obj)
        sizes = [buffer.nbytes for buffer in buffers]
        small = [buffer for buffer in buffers if buffer.nbytes <= _SMALL_BYTES]
        table = struct.pack(f"<Q{len(sizes)}Q", len(sizes), *sizes)
        large = [_array(buffer) for buffer in buffers if buffer.nbytes > _SMALL_BYTES]
        return cls._made(_OBJECT, _word(serializer), b"".join([table, *small, header]), large)

    @classmethod
    def refusal(cls, error: BaseException) -> Packet:
        """Return the packet that reports an error instead of an object."""
        return cls._made(_REFUSAL, 0, f"{type(error).__name__}: {error}".encode(), [])

    @classmethod
    def _made(cls, kind: bytes, word: int, head: bytes, large: Sequence[ByteArray]) -> Packet:
        text = _FIRST.pack(kind, word, len(head), next(_tags)) + head
        first = np.zeros(FIRST_BYTES, np.uint8)
        known = min(len(text), FIRST_BYTES)
        first[:known] = _array(text)[:known]
        return cls(first, _array(text)[FIRST_BYTES:], large)

    @classmethod
    def arriving(cls, first: ByteArray) -> Packet | None:
        """Return the packet that begins with an arrived first message, with room for `rest`.

        Return None if the message is not of a packet.
        """
        kind, _, head_bytes, _ = _FIRST.unpack_from(first.data)
        if kind not in (_OBJECT, _REFUSAL):
            return None
        return cls(first, np.empty(max(0, _FIRST.size + head_bytes - FIRST_BYTES), np.uint8))

    def open_rest(self) -> None:
        """Allocate the large buffers; `rest` has arrived."""
        if self.refused() is None:
            self.large = [np.empty(n, np.uint8) for n in self._sizes() if n > _SMALL_BYTES]

    @property
    def tag(self) -> int:
        """Tag of the messages that follow the first one."""
        *_, tag = _FIRST.unpack_from(self.first.data)
        return int(tag)

    def refused(self) -> str | None:
        """Return why the sender had no object, or None."""
        kind, *_ = _FIRST.unpack_from(self.first.data)
        return self._head().decode() if kind == _REFUSAL else None

    def is_by(self, serializer: Serializer) -> bool:
        """Whether the sender used a serializer of the same name."""
        _, word, *_ = _FIRST.unpack_from(self.first.data)
        return bool(word == _word(serializer))

    def loads(self, serializer: Serializer, *, copy: bool = False) -> Any:
        """Return the object.

        Args:
            serializer: As the sender's.
            copy: Copy the large buffers; without it the object uses their memory.
        """
        head, at = self._head(), 8 * (1 + len(self._sizes()))
        large = iter([part.copy() for part in self.large] if copy else self.large)
        buffers: list[Any] = []
        for nbytes in self._sizes():
            if nbytes > _SMALL_BYTES:
                buffers.append(next(large))
            else:
                buffers.append(bytearray(head[at : at + nbytes]))
                at += nbytes
        return serializer.loads(head[at:], buffers)

    def _head(self) -> bytes:
        if self._known_head is None:
            _, _, head_bytes, _ = _FIRST.unpack_from(self.first.data)
            parts = self.first[_FIRST.size :], self.rest
            self._known_head = np.concatenate(parts)[:head_bytes].tobytes()
        return self._known_head

    def _sizes(self) -> tuple[int, ...]:
        head = self._head()
        (count,) = struct.unpack_from("<Q", head)
        return struct.unpack_from(f"<{count}Q", head, 8)


def _array(data: Any) -> ByteArray:
    return np.frombuffer(data, np.uint8)


def _word(serializer: Serializer) -> int:
    return zlib.crc32(serializer.name.encode())
