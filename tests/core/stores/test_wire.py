"""The TCPStore protocol codec, without a socket."""

import itertools
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.stores.tcp import wire
from unisono.core.stores.tcp.wire import ReplyDecoder, Request, RequestDecoder, RequestOp, WireError
from unisono.errors import InvalidArgumentError

HELLO = wire.encode_request(RequestOp.VALIDATE, wire.MAGIC)
KEY = st.text("ab/\0\u00e9\u6f22", max_size=20)
VALUE = st.binary(max_size=50)
I64 = st.integers(-(2**63), 2**63 - 1)
FIELDS = {
    wire.Field.KEY: KEY,
    wire.Field.VALUE: VALUE,
    wire.Field.KEYS: st.lists(KEY, max_size=4),
    wire.Field.PAIRS: st.lists(st.tuples(KEY, VALUE), max_size=4),
    wire.Field.I64: I64,
    wire.Field.U32: st.integers(0, 2**32 - 1),
}
REPLIES = {
    RequestOp.GET: VALUE,
    RequestOp.COMPARE_SET: VALUE,
    RequestOp.ADD: I64,
    RequestOp.CHECK: st.integers(0, 1),
    RequestOp.LIST_KEYS: st.lists(KEY, max_size=4),
    RequestOp.MULTI_GET: st.lists(VALUE, min_size=1, max_size=4),
    RequestOp.QUEUE_POP: st.one_of(st.just((0, None)), st.tuples(st.integers(1, 2**40), VALUE)),
    RequestOp.PING: st.integers(0, 2**32 - 1),
}


@st.composite
def requests(draw):
    op = draw(st.sampled_from([op for op in RequestOp if op is not RequestOp.VALIDATE]))
    return Request(op, tuple(draw(FIELDS[field]) for field in wire._LAYOUTS[op].request))


def in_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[low:high] for low, high in itertools.pairwise(edges)]


def test_requests_are_torchs_bytes():
    # Recorded from torch 2.13's client.
    assert bytes.fromhex("00cef7853c") == HELLO
    number = struct.Struct("<q").pack
    assert wire.encode_request(RequestOp.ADD, "init/", 1) == b"\x04" + number(
        5
    ) + b"init/" + number(1)
    pair = number(2) + b"/m" + number(1) + b"1"
    assert wire.encode_request(RequestOp.MULTI_SET, [("/m", b"1")]) == b"\x0b" + number(1) + pair
    assert wire.encode_request(RequestOp.BARRIER, "/b2", 2) == b"\x12" + number(
        3
    ) + b"/b2" + number(2)
    assert wire.encode_reply(RequestOp.QUEUE_POP, (1, b"1")) == number(1) + number(1) + b"1"
    assert wire.encode_reply(RequestOp.QUEUE_POP, (0, None)) == number(0)
    assert wire.encode_reply(RequestOp.CANCEL_WAIT, wire.WAIT_CANCELED) == b"\x01"


@given(st.lists(requests(), max_size=6), st.lists(st.integers(0), max_size=8))
def test_requests_survive_any_split(sent, cuts):
    data = HELLO + b"".join(wire.encode_request(op, *args) for op, args in sent)
    decoder = RequestDecoder()
    received = [request for piece in in_pieces(data, cuts) for request in decoder.feed(piece)]
    assert received == [Request(RequestOp.VALIDATE, (wire.MAGIC,)), *sent]


@given(st.data(), st.lists(st.integers(0), max_size=8))
def test_replies_survive_any_split(data, cuts):
    ops = data.draw(st.lists(st.sampled_from(sorted(REPLIES)), max_size=6))
    results = [data.draw(REPLIES[op]) for op in ops]
    decoder = ReplyDecoder()
    for op, result in zip(ops, results, strict=True):
        decoder.expect(op, len(result) if op is RequestOp.MULTI_GET else 0)
    stream = b"".join(map(wire.encode_reply, ops, results))
    received = [reply for piece in in_pieces(stream, cuts) for reply in decoder.feed(piece)]
    assert received == results


@pytest.mark.parametrize(
    "message",
    [
        b"\x01" + struct.pack("<Q", wire.MAX_KEY_BYTES + 1),
        b"\x01" + struct.pack("<Q", 1) + b"k" + struct.pack("<Q", wire.MAX_VALUE_BYTES + 1),
        b"\x06" + struct.pack("<Q", wire.MAX_KEYS + 1),
        b"\x0b" + struct.pack("<Q", 2**63),
        b"\x13",
        b"\xff",
    ],
)
def test_announced_sizes_are_refused_before_anything_is_allocated(message):
    decoder = RequestDecoder()
    decoder.feed(HELLO)
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decoder.feed(message)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_sum_of_one_request_is_bounded(monkeypatch):
    monkeypatch.setattr(wire, "MAX_REQUEST_BYTES", 1000)
    pairs = [("k", bytes(300))] * 4
    with pytest.raises(InvalidArgumentError, match="may have 1000 bytes"):
        wire.encode_request(RequestOp.MULTI_SET, pairs)
    data = HELLO + b"\x0b" + wire._encode(wire.Field.PAIRS, pairs)
    with pytest.raises(WireError, match="larger than the sum"):
        RequestDecoder().feed(data)


@pytest.mark.parametrize(
    ("first", "text"),
    [(b"GET / HTTP/1.1\r\n", "first byte is 71"), (b"\0\0\0\0\0", "magic number")],
)
def test_strangers_are_refused(first, text):
    with pytest.raises(WireError, match=text):
        RequestDecoder().feed(first)


def test_too_large_arguments_are_refused():
    with pytest.raises(InvalidArgumentError, match="key may have 8192 bytes, got 8193"):
        wire.encode_request(RequestOp.GET, "k" * 8193)
    with pytest.raises(InvalidArgumentError, match="may have 131072 keys, got 131073"):
        wire.encode_request(RequestOp.CHECK, ["k"] * (wire.MAX_KEYS + 1))


def test_unasked_reply_is_an_error():
    with pytest.raises(WireError, match="more than was asked"):
        ReplyDecoder().feed(b"\0")


def test_keys_that_are_not_utf8_survive():
    key = b"\xff\xfe".decode("utf-8", "surrogateescape")
    decoder = RequestDecoder()
    decoder.feed(HELLO)
    assert decoder.feed(wire.encode_request(RequestOp.GET, key)) == [Request(RequestOp.GET, (key,))]
