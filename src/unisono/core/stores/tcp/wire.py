"""torch's TCPStore protocol as bytes in, messages out: no socket, no clock, no thread.

A connection starts with VALIDATE (a magic number) and PING (the server echoes the nonce). Any
request may follow. A request is one byte of `RequestOp` and its fields. A reply has only fields,
without an op or a length, so the client must remember its requests. SET, APPEND, MULTI_SET and
QUEUE_PUSH have no reply. Integers are little-endian.

    field   on the wire
    KEY     u64 length, UTF-8 bytes
    VALUE   u64 length, bytes
    KEYS    u64 count, KEY ...
    PAIRS   u64 count, (KEY, VALUE) ...
    VALUES  VALUE ... as many as the request had keys
    POPPED  i64 length of the queue before; VALUE if that is not 0
    I64, U32, FLAG   8, 4 and 1 byte

Every size is checked before memory is allocated for it.

Source: protocol of TCPStore in torch 2.13 (libuv server), which adds LIST_KEYS and BARRIER to that
of torch 2.6.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from unisono.errors import InvalidArgumentError, TransportError

MAGIC = 0x3C85F7CE
# torch's limits; a longer key would be refused by its server anyway.
MAX_KEY_BYTES = 8 * 1024
MAX_KEYS = 128 * 1024
# torch's libuv server accepts 8 MiB; its older server has no limit and passes 64 MiB.
MAX_VALUE_BYTES = 64 * 1024 * 1024
# Without a sum, 128 Ki values of 64 MiB each would be a legal multi_set.
MAX_REQUEST_BYTES = 256 * 1024 * 1024
# A small multi_get may name one large value many times; the server refuses a larger reply.
MAX_REPLY_BYTES = 1024 * 1024 * 1024

READY, NOT_READY = 0, 1
STOP_WAITING, WAIT_CANCELED = 0, 1

_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
_U32 = struct.Struct("<I")


class WireError(TransportError):
    """Bytes that are not a TCPStore message; the connection is closed."""


class RequestOp(enum.IntEnum):
    """The operation of a request."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    NUM_KEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18


class Field(enum.Enum):
    """The kinds of fields; the table at the top of this module has their layout."""

    KEY = enum.auto()
    VALUE = enum.auto()
    KEYS = enum.auto()
    PAIRS = enum.auto()
    VALUES = enum.auto()
    POPPED = enum.auto()
    I64 = enum.auto()
    U32 = enum.auto()
    FLAG = enum.auto()


class _OpFields(NamedTuple):
    """The fields of a request and of its reply."""

    request: tuple[Field, ...]
    reply: Field | None


_LAYOUTS = {
    RequestOp.VALIDATE: _OpFields((Field.U32,), None),
    RequestOp.SET: _OpFields((Field.KEY, Field.VALUE), None),
    RequestOp.COMPARE_SET: _OpFields((Field.KEY, Field.VALUE, Field.VALUE), Field.VALUE),
    RequestOp.GET: _OpFields((Field.KEY,), Field.VALUE),
    RequestOp.ADD: _OpFields((Field.KEY, Field.I64), Field.I64),
    RequestOp.CHECK: _OpFields((Field.KEYS,), Field.FLAG),
    RequestOp.WAIT: _OpFields((Field.KEYS,), Field.FLAG),
    RequestOp.NUM_KEYS: _OpFields((), Field.I64),
    RequestOp.DELETE_KEY: _OpFields((Field.KEY,), Field.I64),
    RequestOp.APPEND: _OpFields((Field.KEY, Field.VALUE), None),
    RequestOp.MULTI_GET: _OpFields((Field.KEYS,), Field.VALUES),
    RequestOp.MULTI_SET: _OpFields((Field.PAIRS,), None),
    RequestOp.CANCEL_WAIT: _OpFields((), Field.FLAG),
    RequestOp.PING: _OpFields((Field.U32,), Field.U32),
    RequestOp.QUEUE_PUSH: _OpFields((Field.KEY, Field.VALUE), None),
    RequestOp.QUEUE_POP: _OpFields((Field.KEY,), Field.POPPED),
    RequestOp.QUEUE_LEN: _OpFields((Field.KEY,), Field.I64),
    RequestOp.LIST_KEYS: _OpFields((), Field.KEYS),
    RequestOp.BARRIER: _OpFields((Field.KEY, Field.I64), Field.FLAG),
}

NO_REPLY = frozenset(op for op, layout in _LAYOUTS.items() if layout.reply is None)


class Request(NamedTuple):
    """One request: its op and one argument for each field (str, bytes, int, list)."""

    op: RequestOp
    args: tuple[Any, ...] = ()


def encode_request(op: RequestOp, *args: Any) -> bytes:
    """Return the bytes of one request.

    Raises:
        InvalidArgumentError: A key, value or list is beyond the limits.
    """
    data = b"".join([bytes([op]), *map(_encode, _LAYOUTS[op].request, args)])
    if len(data) > MAX_REQUEST_BYTES:
        raise InvalidArgumentError(
            f"one store request may have {MAX_REQUEST_BYTES} bytes, got {len(data)}"
        )
    return data


def encode_reply(op: RequestOp, result: Any) -> bytes:
    """Return the bytes that answer a request of kind `op`; `result` has the kind of its reply.

    Replies have no limits of their own: appended values may outgrow what one request carries.
    """
    field = _LAYOUTS[op].reply
    return b"" if field is None else _encode(field, result, limited=False)


def _encode(field: Field, item: Any, limited: bool = True) -> bytes:
    match field:
        case Field.KEY:
            data = item.encode("utf-8", "surrogateescape")
            return _sized(data, MAX_KEY_BYTES if limited else None, "key")
        case Field.VALUE:
            return _sized(item, MAX_VALUE_BYTES if limited else None, "value")
        case Field.KEYS:
            keys = b"".join([_encode(Field.KEY, key, limited) for key in item])
            return _counted(item, limited) + keys
        case Field.PAIRS:
            pairs = [_encode(Field.KEY, k) + _encode(Field.VALUE, v) for k, v in item]
            return _counted(item, limited) + b"".join(pairs)
        case Field.VALUES:
            return b"".join([_encode(Field.VALUE, value, limited) for value in item])
        case Field.POPPED:
            before, value = item
            return _I64.pack(before) + (_encode(Field.VALUE, value, limited) if before else b"")
        case Field.I64:
            return _I64.pack(item)
        case Field.U32:
            return _U32.pack(item)
        case Field.FLAG:
            return bytes([item])


def _sized(data: bytes, limit: int | None, what: str) -> bytes:
    if limit is not None and len(data) > limit:
        raise InvalidArgumentError(
            f"a store {what} may have {limit} bytes, got {len(data)}",
            hint="split it, or move large data with a collective" if what == "value" else None,
        )
    return _U64.pack(len(data)) + data


def _counted(items: Sequence[Any], limited: bool) -> bytes:
    if limited and len(items) > MAX_KEYS:
        raise InvalidArgumentError(f"one request may have {MAX_KEYS} keys, got {len(items)}")
    return _U64.pack(len(items))


# A reader is a generator: it yields the number of bytes it needs next, receives exactly these, and
# returns the result. So a message that arrives in pieces is never parsed twice.
_Reader = Generator[int, bytes, Any]


def _read(field: Field, count: int, limits: _Limits) -> _Reader:
    match field:
        case Field.KEY:
            data = yield from _read_sized(limits.key_bytes, "key", limits)
            return data.decode("utf-8", "surrogateescape")
        case Field.VALUE:
            return (yield from _read_sized(limits.value_bytes, "value", limits))
        case Field.KEYS:
            return (yield from _read_list((Field.KEY,), limits))
        case Field.PAIRS:
            return (yield from _read_list((Field.KEY, Field.VALUE), limits))
        case Field.VALUES:
            values = []
            for _ in range(count):
                values.append((yield from _read(Field.VALUE, 0, limits)))
            return values
        case Field.POPPED:
            before = _I64.unpack((yield 8))[0]
            return before, (yield from _read(Field.VALUE, 0, limits)) if before else None
        case Field.I64:
            return _I64.unpack((yield 8))[0]
        case Field.U32:
            return _U32.unpack((yield 4))[0]
        case Field.FLAG:
            return (yield 1)[0]


def _read_sized(limit: int, what: str, limits: _Limits) -> Generator[int, bytes, bytes]:
    size = _U64.unpack((yield 8))[0]
    if size > limit:
        raise WireError(f"a {what} of {size} bytes is announced; at most {limit} are allowed")
    limits.spend(size)
    return (yield size) if size else b""


def _read_list(fields: tuple[Field, ...], limits: _Limits) -> _Reader:
    count = _U64.unpack((yield 8))[0]
    if count > limits.keys:
        raise WireError(f"a list of {count} keys is announced; at most {limits.keys} are allowed")
    items = []
    for _ in range(count):
        item = []
        for field in fields:
            item.append((yield from _read(field, 0, limits)))
        items.append(item[0] if len(fields) == 1 else tuple(item))
    return items


@dataclass(slots=True)
class _Limits:
    """The sizes that one message may still announce."""

    key_bytes: int
    value_bytes: int
    keys: int
    left_bytes: int

    def spend(self, nbytes: int) -> None:
        self.left_bytes -= nbytes
        if self.left_bytes < 0:
            raise WireError("a message is larger than the sum allowed for one")


class _Decoder:
    """Feeds a reader from chunks of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._reader: _Reader | None = None
        self._need = 0

    def _start(self) -> _Reader:
        raise NotImplementedError

    def feed(self, chunk: bytes) -> list[Any]:
        """Take bytes and return the messages that they complete.

        Raises:
            WireError: Not a message; the decoder must not be used again.
        """
        self._buffer += chunk
        messages = []
        position = 0
        while True:
            if self._reader is None:
                if position == len(self._buffer):
                    break
                self._reader = self._start()
                self._need = next(self._reader)
            if len(self._buffer) - position < self._need:
                break
            taken = bytes(memoryview(self._buffer)[position : position + self._need])
            position += self._need
            try:
                self._need = self._reader.send(taken)
            except StopIteration as stop:
                messages.append(stop.value)
                self._reader = None
        del self._buffer[:position]
        return messages


class RequestDecoder(_Decoder):
    """The server's side: bytes of one connection in, requests out."""

    def __init__(self) -> None:
        super().__init__()
        self._first = True

    def feed(self, chunk: bytes) -> list[Request]:
        """Take bytes and return the requests that they complete.

        Raises:
            WireError: No request, or the connection did not open with VALIDATE.
        """
        return super().feed(chunk)

    def _start(self) -> _Reader:
        return self._request()

    def _request(self) -> _Reader:
        code = (yield 1)[0]
        if self._first and code != RequestOp.VALIDATE:
            raise WireError(f"the first byte is {code}, not VALIDATE: not a TCPStore client")
        if code not in _LAYOUTS:
            raise WireError(f"request {code} is unknown (known: 0 to {max(_LAYOUTS)})")
        op = RequestOp(code)
        limits = _Limits(MAX_KEY_BYTES, MAX_VALUE_BYTES, MAX_KEYS, MAX_REQUEST_BYTES)
        args = []
        for field in _LAYOUTS[op].request:
            args.append((yield from _read(field, 0, limits)))
        if op is RequestOp.VALIDATE and args[0] != MAGIC:
            raise WireError(f"magic number {args[0]:#x} instead of {MAGIC:#x}")
        self._first = False
        return Request(op, tuple(args))


class ReplyDecoder(_Decoder):
    """The client's side: `expect` announces each request, `feed` takes bytes, returns results."""

    def __init__(self) -> None:
        super().__init__()
        self._expected: list[tuple[Field, int]] = []

    def expect(self, op: RequestOp, count: int = 0) -> None:
        """Announce that a request was sent; `count` is the number of keys of MULTI_GET."""
        field = _LAYOUTS[op].reply
        if field is Field.VALUES and count == 0:
            # The reply has zero bytes, so no byte would ever complete it.
            raise InvalidArgumentError("MULTI_GET without keys has no reply to expect")
        if field is not None:
            self._expected.append((field, count))

    def _start(self) -> _Reader:
        if not self._expected:
            raise WireError("the server sent more than was asked for")
        field, count = self._expected.pop(0)
        # The server is trusted with totals (list_keys of a large store), not with sizes.
        limits = _Limits(2**16, MAX_REPLY_BYTES, 2**24, 2 * MAX_REPLY_BYTES)
        return _read(field, count, limits)
