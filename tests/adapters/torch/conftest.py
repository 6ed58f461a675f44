"""Ranks of the tests in this folder are forked from a server of their own, which has loaded torch.

The fork of a process with torch takes 11 ms longer, so other tests do not use this server.
"""

from multiprocessing import forkserver

import pytest

from tests.conftest import PRELOADED

# Importing torch takes 2 s, and what DDP, FSDP and DTensor import later takes 2 s more.
MODULES = [
    "torch.distributed.checkpoint",
    "torch.distributed.flight_recorder.fr_trace",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "unisono.torch",
    "unisono.parallel",
]


@pytest.fixture(scope="session")
def _server():
    import torch

    # Ranks that are threads of this process need no further threads either.
    torch.set_num_threads(1)
    server = forkserver.ForkServer()
    server.set_forkserver_preload([*PRELOADED, *MODULES])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        server.ensure_running()
    return server


@pytest.fixture
def forked_with_torch(_server, monkeypatch):
    """Fork the ranks of a test from the server with torch."""
    monkeypatch.setattr(forkserver, "connect_to_new_process", _server.connect_to_new_process)
