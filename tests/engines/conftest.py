from __future__ import annotations

import pytest

from unisono.engines import Communicator, ReferenceEngine
from unisono.transports import InprocTransport, TCPTransport

KINDS = {"inproc": InprocTransport, "tcp": TCPTransport}


@pytest.fixture(params=list(KINDS))
def make(request):
    """Return a function: world size -> the reference engines of all ranks."""

    def build(size):
        addresses = {}
        world = [KINDS[request.param](r, size, lambda p: addresses[p]) for r in range(size)]
        addresses.update(enumerate(transport.address for transport in world))
        return [ReferenceEngine(Communicator(t, tuple(range(size)), "g")) for t in world]

    return build
