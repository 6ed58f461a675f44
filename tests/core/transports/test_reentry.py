"""A signal handler that sends and receives inside a send or receive of its own thread."""

import pytest

from tests.support.handlers import at_each_line
from tests.support.together import on_threads
from tests.support.transport_worlds import SOON, connected
from unisono.core.base.deadline import Deadline
from unisono.core.transports import Key, api, control, mailbox
from unisono.core.transports.messages import Purpose
from unisono.core.transports.tcp import link, transport

MODULES = [api, control, mailbox, link, transport]
MINE, THEIRS = Key(1, Purpose.P2P, 0), Key(1, Purpose.P2P, 1)


def exchange(a, b, key, data):
    """Start a message; return its receive and the memory of it."""
    into = bytearray(len(data))
    a.send(b.rank, key, memoryview(data))
    return b.recv(a.rank, key, memoryview(into)), into


@pytest.mark.parametrize("kind", ["inproc", "tcp"])
def test_messages_of_a_handler_mix_with_no_others(kind):
    world = connected(kind, 2)
    a, b = world
    theirs, mine = [], []

    def handle():
        data = bytes([len(theirs) % 251]) * (1 + 40 * (len(theirs) % 7))
        theirs.append((data, *exchange(a, b, THEIRS, data)))
        assert a.failure(1) is None

    try:
        with at_each_line(MODULES, handle, 600):
            for number in range(30):
                data = bytes([number]) * (1 + 3000 * number)
                mine.append((data, *exchange(a, b, MINE, data)))
        assert len(theirs) > 300
        for data, received, into in mine + theirs:
            assert received.wait_until(Deadline(SOON))
            assert received.error is None
            assert into == data
    finally:
        on_threads(*(each.close for each in world))
