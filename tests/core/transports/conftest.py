import pytest

from tests.support.transport_worlds import KINDS, WAYS, connected, use_native
from unisono.core.engines import is_native_built

NATIVE = ["inproc:rings", *(f"tcp:{ways}" for ways in WAYS)]
NATIVE += ["tcp:wires:2", "tcp:wires:4"]  # so many channels


@pytest.fixture(params=[*KINDS, *(NATIVE if is_native_built() else [])])
def make(request, monkeypatch):
    kind, ways, channels = [*request.param.split(":"), "", ""][:3]
    monkeypatch.setenv("UNISONO_CHANNELS", channels)

    def build(size):
        world = connected(kind, size)
        if ways:
            use_native(world, WAYS[ways])
        return world

    build.kind, build.messages = kind, bool(ways)
    return build
