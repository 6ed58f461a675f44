import socket
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.core.transports import Cancelled, Key, LinkDown
from unisono.core.transports.mailbox import Messages
from unisono.core.transports.messages import Purpose
from unisono.core.transports.tcp.io_loop import CHUNK_BYTES
from unisono.core.transports.tcp.link import Link
from unisono.core.transports.tcp.wire import FRAME, Frame
from unisono.core.transports.transfers import Transfer

PEER = 3


class NoLinks:
    """A transport without ranks that are gone and without broken contexts."""

    closed = False

    def down(self, peer):
        pass

    def failure(self, context):
        pass

    def notice_end(self, peer, context=0):
        pass


class End:
    """A link at one end of a socket pair; the test plays the peer at the other end."""

    def __init__(self):
        self.messages = Messages(NoLinks())
        self.controls = []
        chunk = memoryview(bytearray(CHUNK_BYTES))
        self.link = Link(PEER, self.messages, lambda *args: self.controls.append(args), chunk)
        sock, self.peer = socket.socketpair()
        sock.setblocking(False)
        self.link.attach(sock)

    def close(self):
        self.link.close(LinkDown(PEER, "closed"))
        self.peer.close()

    def post(self, key, nbytes, info=0):
        into = memoryview(bytearray(nbytes))
        transfer = Transfer(PEER, key.context, key[1:], into, info)
        self.messages.recv(transfer)
        return transfer

    def feed(self, data):
        """Give the link bytes, and let it read them."""
        view = memoryview(data)
        while view:
            view = view[self.peer.send(view[:100_000]) :]
            while self.link.read():
                pass


@pytest.fixture
def end():
    end = End()
    yield end
    end.close()


def key(tag=0, kind=Purpose.P2P):
    return Key(5, kind, tag)


def pattern(nbytes, seed=0):
    return np.random.default_rng(seed).bytes(nbytes)


SIZES = st.one_of(
    st.integers(0, 200),
    st.sampled_from([CHUNK_BYTES - FRAME.size, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES]),
)


@settings(max_examples=60)
@given(
    frames=st.lists(st.tuples(SIZES, st.booleans(), st.booleans()), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 2**20), max_size=12),
)
def test_frames_decode_equally_wherever_the_stream_is_cut(frames, cuts):
    end = End()
    stream, posted = b"", {}
    for i, (nbytes, post, control) in enumerate(frames):
        kind = Purpose.ASK if control else Purpose.P2P
        body = pattern(nbytes, i)
        stream += Frame(key(i, kind), nbytes, 0).pack() + body
        if post and not control:
            posted[i] = end.post(key(i), nbytes)
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    for first, last in pairwise(edges):
        end.feed(stream[first:last])
    controls = iter(end.controls)
    for i, (nbytes, _, control) in enumerate(frames):
        if control:
            assert next(controls) == (PEER, 5, Purpose.ASK, pattern(nbytes, i))
            continue
        transfer = posted.get(i) or end.post(key(i), nbytes)
        assert transfer.done()
        assert transfer.error is None
        assert bytes(transfer.into) == pattern(nbytes, i)
    assert next(controls, None) is None
    end.close()


@pytest.mark.parametrize("cancelled_at", [0, 1, 40, CHUNK_BYTES, 250_000, 299_999])
def test_cancelled_receive_is_not_touched_and_the_stream_stays_in_step(end, cancelled_at):
    nbytes = 300_000
    transfer = end.post(key(), nbytes)
    head = Frame(key(), nbytes, 0).pack()
    body = pattern(nbytes)
    end.feed(head + body[:cancelled_at])
    end.link.cancel(lambda t: t is transfer, Cancelled())
    assert isinstance(transfer.error, Cancelled)
    before = bytes(transfer.into)
    end.feed(body[cancelled_at:] + Frame(key(1), 4, 0).pack() + b"next")
    assert bytes(transfer.into) == before
    following = end.post(key(1), 4)
    assert bytes(following.into) == b"next"


def test_cancelled_send_is_completed_from_a_copy(end):
    nbytes = 8 << 20
    data = bytearray(pattern(nbytes))
    transfer = Transfer(PEER, 5, key()[1:], memoryview(data))
    assert end.link.submit(key(), transfer)
    unsent = Transfer(PEER, 5, key(1)[1:], memoryview(b"never sent"))
    end.link.submit(key(1), unsent)
    end.link.cancel(lambda t: True, Cancelled())
    assert isinstance(transfer.error, Cancelled)
    assert isinstance(unsent.error, Cancelled)
    expected = Frame(key(), nbytes, 0).pack() + bytes(data)
    data[:] = bytes(nbytes)
    got = bytearray()
    while len(got) < len(expected):
        got += end.peer.recv(1 << 20)
        end.link.write()
    assert got == expected
    assert not end.link.pending()


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (Frame(key(), 2**63 - 1, 0).pack(), "do not fit in memory"),
        (Frame(key(), 2**64 - 1, 0).pack(), "do not fit in memory"),
        (Frame(key(kind=Purpose.ASK), 2**30, 0).pack(), "control message of 1073741824 bytes"),
        (b"\x63" + bytes(FRAME.size - 1), "99 is not a valid Purpose"),
    ],
)
def test_absurd_frames_are_refused(end, frame, text):
    with pytest.raises(ValueError, match=text):
        end.feed(frame)


def test_close_fails_what_is_under_way(end):
    sent = Transfer(PEER, 5, key()[1:], memoryview(bytes(8 << 20)))
    end.link.submit(key(), sent)
    received = end.post(key(), 100)
    end.feed(Frame(key(), 100, 0).pack() + b"half")
    down = LinkDown(PEER, "gone")
    end.link.close(down)
    late = Transfer(PEER, 5, key()[1:], memoryview(b"late"))
    end.link.submit(key(), late)
    assert [t.error for t in (sent, received, late)] == [down] * 3
