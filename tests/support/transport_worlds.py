"""Worlds of transports in one process, with and without messages in C++."""

import contextlib
import itertools
import os
import runpy

import pytest

from tests.support.together import on_threads
from tests.support.tools import ROOT
from unisono.core.base.deadline import Deadline
from unisono.core.engines import Communicator, ReferenceEngine
from unisono.core.transports import InprocTransport, Key, TCPTransport
from unisono.core.transports.messages import Purpose
from unisono.core.transports.native_messages import NativeMessages

UnixTransport = runpy.run_path(str(ROOT / "examples/unix_transport.py"))["UnixTransport"]
KINDS = {
    "inproc": InprocTransport,
    "tcp": TCPTransport,
    "unix": lambda rank, size, find: UnixTransport(None, rank, size, find),
}
KEY = Key(1, Purpose.P2P, 0)
SOON = 30.0

# From this size on a message goes over all channels.
LARGE = 512 * 1024

# What carries messages between two ranks, by the sum of their numbers.
WAYS = {
    "rings": ["ring"],
    "wires": ["wire"],
    "rings+wires": ["wire", "ring"],
}


def connected(kind, size, edit=lambda addresses: None):
    """Return the transports of all ranks; `edit` may change the addresses that they know."""
    addresses = {}
    world = [KINDS[kind](rank, size, lambda p: addresses[p]) for rank in range(size)]
    addresses.update(enumerate(transport.address for transport in world))
    edit(addresses)
    return world


def reference_engines(size, kind="inproc"):
    """Return reference engines of all ranks."""
    comms = [Communicator(t, tuple(range(size)), "g") for t in connected(kind, size)]
    return [ReferenceEngine(comm) for comm in comms]


@contextlib.contextmanager
def tcp_world(size, edit=lambda addresses: None):
    world = connected("tcp", size, edit)
    try:
        yield world
    finally:
        on_threads(*(transport.close for transport in world))


def works(a, b, nbytes=1000):
    data, into = os.urandom(nbytes), bytearray(nbytes)
    received = b.recv(a.rank, KEY, memoryview(into))
    sent = a.send(b.rank, KEY, memoryview(data))
    assert sent.wait_until(Deadline(SOON))
    assert received.wait_until(Deadline(SOON))
    assert (sent.error, received.error) == (None, None)
    assert into == data


def use_native(world, ways, channels=()):
    """Give transports messages in C++; `channels`: what each rank finds in its environment."""
    everybody = []
    with pytest.MonkeyPatch.context() as patch:
        for transport, number in itertools.zip_longest(world, channels):
            if number is not None:
                patch.setenv("UNISONO_CHANNELS", str(number))
            everybody.append(NativeMessages(transport))
    for rank, messages in enumerate(everybody):
        kinds = [ways[(rank + peer) % len(ways)] for peer in range(len(world))]
        words = [other.endpoint for other in everybody]
        messages.introduce(words, [way == "ring" for way in kinds], crowded=True)
        world[rank].messages = messages
