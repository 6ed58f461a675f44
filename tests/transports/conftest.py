from __future__ import annotations

import pytest

from unisono.engines import is_native_built
from unisono.transports import InprocTransport, TCPTransport
from unisono.transports.native import NativeMessages

KINDS = {"inproc": InprocTransport, "tcp": TCPTransport}
WITH_RINGS = ["inproc+rings", "tcp+rings", "inproc+some", "tcp+some"]


@pytest.fixture(params=[*KINDS, *(WITH_RINGS if is_native_built() else [])])
def make(request):
    kind, _, rings = request.param.partition("+")

    def build(size):
        addresses = {}
        world = [KINDS[kind](r, size, lambda p: addresses[p]) for r in range(size)]
        addresses.update(enumerate(transport.address for transport in world))
        if rings:
            # With "some", ranks 0 and 2 cannot open the memory of one another, nor 1 and 3.
            share_memory(world, lambda rank, peer: rings == "rings" or (rank + peer) % 2 == 1)
        return world

    build.kind, build.messages = kind, bool(rings)
    return build


def share_memory(world, reaches):
    """Give transports rings, between the pairs of ranks for which `reaches(rank, peer)`."""
    everybody = [NativeMessages.make(transport) for transport in world]
    words = [messages.word for messages in everybody]
    for rank, messages in enumerate(everybody):
        known = [word if reaches(rank, peer) else "" for peer, word in enumerate(words)]
        messages.introduce(known, crowded=True)
        world[rank].use_messages(messages)
