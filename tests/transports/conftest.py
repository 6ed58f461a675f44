from __future__ import annotations

import pytest

from unisono.engines import is_native_built
from unisono.transports import InprocTransport, TCPTransport
from unisono.transports.native import NativeMessages

KINDS = {"inproc": InprocTransport, "tcp": TCPTransport}
# What carries messages between two ranks, by the sum of their numbers.
WAYS = {
    "rings": ["ring"],
    "wires": ["wire"],
    "rings+links": ["link", "ring"],
    "rings+wires": ["wire", "ring"],
    "all": ["wire", "ring", "link"],
}
NATIVE = ["inproc:rings", "inproc:rings+links", *(f"tcp:{ways}" for ways in WAYS)]


@pytest.fixture(params=[*KINDS, *(NATIVE if is_native_built() else [])])
def make(request):
    kind, _, ways = request.param.partition(":")

    def build(size):
        addresses = {}
        world = [KINDS[kind](r, size, lambda p: addresses[p]) for r in range(size)]
        addresses.update(enumerate(transport.address for transport in world))
        if ways:
            use_native(world, WAYS[ways])
        return world

    build.kind, build.messages = kind, bool(ways)
    return build


def use_native(world, ways):
    """Give transports messages in C++."""
    everybody = [NativeMessages.make(transport) for transport in world]
    for rank, messages in enumerate(everybody):
        kinds = [ways[(rank + peer) % len(ways)] for peer in range(len(world))]
        words = [
            "" if way == "link" else other.word for way, other in zip(kinds, everybody, strict=True)
        ]
        messages.introduce(words, [way == "ring" for way in kinds], crowded=True)
        world[rank].use_messages(messages)
