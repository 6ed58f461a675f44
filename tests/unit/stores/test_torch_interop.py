"""torch's client on our server, and our client on torch's server."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.base.sockets import listen
from unisono.errors import StoreConnectionError, StoreKeyError, StoreTimeoutError
from unisono.stores import TCPStore, start_server
from unisono.stores.tcp.native_server import engine
from unisono.testing.check_store import STORE_CHECKS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)

SCRIPT = Path(__file__).with_name("torch_script.py")
TIMEOUT_S = 90


def torch_process(*args: str, **options) -> subprocess.Popen[str]:
    # A process of its own: torch's client holds the GIL while it connects.
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def output_of(*args: str) -> list[str]:
    with torch_process(*args) as process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    return output.splitlines()


@pytest.fixture(scope="module")
def torch_on_torch():
    """What torch's client sees on torch's server."""
    theirs = output_of("serve")
    assert len(theirs) > 25
    return theirs


@pytest.mark.sweep(1)
def test_torch_client_sees_the_same_on_both_servers(server_kind, torch_on_torch):
    server = start_server(listen("127.0.0.1", 0))
    try:
        assert output_of("client", "127.0.0.1", str(server.port)) == torch_on_torch
    finally:
        server.close()


@pytest.mark.skipif(engine() is None, reason="the Python server would wait for the GIL for ever")
def test_torch_client_in_the_servers_own_process(torch_on_torch):
    assert output_of("beside") == torch_on_torch


@pytest.mark.parametrize("master", ["unisono", "torch"])
def test_master_of_one_waits_for_worker_of_the_other(master):
    """Shared servers on sockets that were opened before; keys are the same seen from both."""
    (listener,) = listen("127.0.0.1", 0)
    port, fd = listener.getsockname()[1], listener.detach()
    mine = {"multi_tenant": True, "master_listen_fd": fd} if master == "unisono" else {}
    theirs = ["worker", str(port)] if master == "unisono" else ["master", str(port), str(fd)]
    pass_fds = [] if master == "unisono" else [fd]
    with torch_process(*theirs, pass_fds=pass_fds, stdin=subprocess.PIPE) as process:
        if master == "torch":
            os.close(fd)
        try:
            with TCPStore(
                "127.0.0.1", port, 2, is_master=master == "unisono", timeout=TIMEOUT_S, **mine
            ) as store:
                assert store.get("torch") == b"met"
                store.set("unisono", "too")
                store.barrier("both", 2)
                output, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert (process.returncode, output) == (0, "b'too'\n"), errors


@pytest.fixture(scope="module")
def torch_port():
    with torch_process("hold", stdin=subprocess.PIPE) as process:
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(TIMEOUT_S)


@pytest.fixture
def client(torch_port):
    with TCPStore("127.0.0.1", torch_port, timeout=20) as store:
        for key in store.list_keys():
            store.delete_key(key)
        yield store


# torch's server reads a leading number, wraps around, and counts those who left a barrier.
NOT_IN_TORCH = {"_check_add", "_check_barrier"}


@pytest.mark.parametrize(
    "check",
    [check for check in STORE_CHECKS if check.__name__ not in NOT_IN_TORCH],
    ids=lambda check: check.__name__,
)
def test_our_client_on_torchs_server(client, check):
    check(client)


def test_add_on_torchs_server(client):
    assert client.add("n", 5) == 5
    assert client.add("n", -7) == -2
    client.set("word", "xyz")
    with pytest.raises(StoreKeyError, match=r"'word'.*b'xyz' is not an integer"):
        client.add("word", 1)
    assert client.get("word") == b"xyz"


def test_barrier_on_torchs_server(client):
    client.barrier("alone", 1)
    with pytest.raises(StoreTimeoutError, match=r"barrier 'pair'.*at most 1 of 2"):
        client.barrier("pair", 2, 0.05)


def test_value_beyond_torchs_limit(client):
    with pytest.raises(StoreConnectionError, match="lost the connection"):
        client.set("large", bytes(8 * 1024 * 1024 + 1))
    client.set("small", "1")
    assert client.get("small") == b"1"
