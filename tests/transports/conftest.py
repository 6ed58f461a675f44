from __future__ import annotations

import pytest

from unisono.transports import InprocTransport, TCPTransport

KINDS = {"inproc": InprocTransport, "tcp": TCPTransport}


@pytest.fixture(params=list(KINDS))
def make(request):
    def build(size):
        addresses = {}
        world = [KINDS[request.param](r, size, lambda p: addresses[p]) for r in range(size)]
        addresses.update(enumerate(transport.address for transport in world))
        return world

    build.kind = request.param
    return build
