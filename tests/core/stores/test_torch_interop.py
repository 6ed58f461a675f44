"""torch's client on our server, and our client on torch's server."""

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from unisono.core.base.net.sockets import listen
from unisono.core.base.seam import is_wanted
from unisono.core.stores import TCPStore, start_server
from unisono.errors import StoreConnectionError, StoreKeyError, StoreTimeoutError
from unisono.testing.store_suite import STORE_CHECKS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)

SCRIPT = Path(__file__).with_name("torch_script.py")
END = ".\n"
TIMEOUT_S = 90


class Torch:
    """A process of its own: torch's client holds the GIL while it connects."""

    def __init__(self, **options):
        environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, str(SCRIPT)]
        self.process = subprocess.Popen(command, text=True, env=environment, **pipes, **options)

    def ask(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def answer(self):
        """Return the lines of the next answer."""
        lines = []
        timer = threading.Timer(TIMEOUT_S, self.process.kill)
        timer.start()
        try:
            while (line := self.process.stdout.readline()) != END:
                assert line, f"torch's process ended after {lines}"
                lines.append(line.rstrip("\n"))
        finally:
            timer.cancel()
            timer.join()
        return lines

    def output_of(self, *words):
        self.ask(*words)
        return self.answer()


@pytest.fixture(scope="module")
def listener():
    """A socket that torch's process has, too."""
    (listener,) = listen("127.0.0.1", 0)
    with listener:
        yield listener


@pytest.fixture(scope="module")
def theirs(listener):
    torch = Torch(pass_fds=[listener.fileno()])
    with torch.process as process:
        try:
            yield torch
        finally:
            process.kill()


@pytest.fixture(scope="module")
def torch_on_torch(theirs):
    """What torch's client sees on torch's server."""
    lines = theirs.output_of("serve")
    assert len(lines) > 25
    return lines


@pytest.mark.sweep(1)
def test_torch_client_sees_the_same_on_both_servers(server_kind, theirs, torch_on_torch):
    server = start_server(listen("127.0.0.1", 0))
    try:
        assert theirs.output_of("client", "127.0.0.1", server.port) == torch_on_torch
    finally:
        server.close()


@pytest.mark.skipif(not is_wanted(), reason="the Python server would wait for the GIL for ever")
def test_torch_client_in_the_servers_own_process(theirs, torch_on_torch):
    assert theirs.output_of("beside") == torch_on_torch


@pytest.mark.parametrize("master", ["unisono", "torch"])
def test_master_of_one_waits_for_worker_of_the_other(master, theirs, listener):
    """Shared servers on sockets that were opened before; keys are the same seen from both."""
    if master == "unisono":
        (own,) = listen("127.0.0.1", 0)
        port = own.getsockname()[1]
        mine = {"multi_tenant": True, "master_listen_fd": own.detach()}
        theirs.ask("worker", port)
    else:
        port, mine = listener.getsockname()[1], {}
        theirs.ask("master", port, listener.fileno())
    with TCPStore(
        "127.0.0.1", port, 2, is_master=master == "unisono", timeout=TIMEOUT_S, **mine
    ) as store:
        assert store.get("torch") == b"met"
        store.set("unisono", "too")
        store.barrier("both", 2)
        assert theirs.answer() == ["b'too'"]


@pytest.fixture(scope="module")
def torch_port(theirs):
    return int(theirs.output_of("hold")[0])


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
