import pytest

from tests.support.transport_worlds import connected, reference_engines
from unisono.core.base.seam import cpp
from unisono.core.engines import Communicator, is_native_built
from unisono.core.engines.native_engine import NativeEngine
from unisono.core.transports.native_messages import NativeMessages

_isas = cpp.isas() if is_native_built() else []
needs_native = pytest.mark.skipif(not is_native_built(), reason="the C++ engine is not built")


def native_engines(kind, size, per_host):
    """Return native engines of ranks that are `per_host` to a host, with wires between hosts."""
    world = connected(kind, size)
    if size > 1:
        messages = [NativeMessages(transport) for transport in world]
        words = [each.endpoint for each in messages]
        for transport, each in zip(world, messages, strict=True):
            near = [rank // per_host == transport.rank // per_host for rank in range(size)]
            each.introduce(words, near, crowded=True)
            transport.messages = each
    for transport in world:
        transport.hosts = tuple(f"host {rank // per_host}" for rank in range(size))
    comms = [Communicator(t, tuple(range(size)), "g") for t in world]
    return [NativeEngine(comm, crowded=True) for comm in comms]


@pytest.fixture(
    params=[
        "inproc",
        "tcp",
        *(pytest.param(name, marks=needs_native) for name in ("one host", "hosts", "pairs")),
    ]
)
def make(request):
    """Return a function: world size -> the engines of all ranks."""
    per_host = {"one host": 64, "hosts": 1, "pairs": 2}.get(request.param)
    if per_host is not None:
        return lambda size: native_engines("tcp", size, per_host)

    return lambda size: reference_engines(size, request.param)


@pytest.fixture(params=_isas)
def isa(request):
    """An instruction set of this machine, which the loops in C++ use in the test."""
    before = cpp.isa()
    cpp.set_isa(request.param)
    yield request.param
    cpp.set_isa(before)
