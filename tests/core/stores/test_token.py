"""Who gets into a store server: tokens, replays, false servers, and other machines."""

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import netns
from tests.support.calls import wait_until
from tests.support.ports import reserved_port
from tests.support.programs import python, start_python
from unisono.core.base import log
from unisono.core.base.net import sockets
from unisono.core.base.net.sockets import is_foreign, listen
from unisono.core.stores import TCPStore, start_server
from unisono.core.stores.tcp.server import ServerOptions, StoreServer
from unisono.core.stores.tcp.token import (
    HELLO,
    NONCE_BYTES,
    PROOF_BYTES,
    Answer,
    Gate,
    Refused,
    proof,
)
from unisono.core.stores.tcp.wire import MAGIC, RequestOp, encode_request
from unisono.errors import HandshakeError

VALIDATE = encode_request(RequestOp.VALIDATE, MAGIC)
TOKEN = "right"
NOBODY = 65534


@pytest.fixture
def server(server_kind, monkeypatch):
    monkeypatch.delenv("UNISONO_TOKEN", raising=False)
    monkeypatch.delenv("UNISONO_INSECURE", raising=False)
    options = ServerOptions(token=TOKEN.encode())
    with contextlib.closing(start_server(listen("127.0.0.1", 0), options)) as server:
        yield server


def received(sock: socket.socket) -> bytes:
    """Everything until the other end closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(4096):
            data += chunk
    return data


def log_of(caplog, server) -> list[str]:
    """What the server logged in its life."""
    server.close()
    return [record.getMessage() for record in caplog.records]


def test_right_token(server):
    with TCPStore("127.0.0.1", server.port, token=TOKEN) as store, store.clone() as clone:
        store.set("k", "v")
        assert clone.get("k") == b"v"


def test_token_comes_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("UNISONO_TOKEN", TOKEN)
    with TCPStore("127.0.0.1", server.port) as store:
        assert store.add("n", 1) == 1


def test_local_client_without_token(server):
    # Torch's client, for one.
    with TCPStore("127.0.0.1", server.port, token="") as store:
        assert store.add("n", 1) == 1


def system_tells_whose_sockets_are() -> bool:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sock,
        mock.patch.object(os, "geteuid", return_value=NOBODY),
    ):
        return is_foreign(sock)


needs_another_user = pytest.mark.skipif(
    os.geteuid() != 0 or not system_tells_whose_sockets_are(),
    reason="only root can become another user, and the kernel has to tell whose a socket is",
)


def as_another_user(call) -> int:
    """Call in a child that is nobody; return its exit code: 1 if the call returned False."""
    pid = os.fork()
    if pid == 0:
        code = 2
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            code = 0 if call() else 1
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def knock(port: int) -> bytes:
    """What a client without a token hears, as torch's is one."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(VALIDATE + encode_request(RequestOp.PING, 7))
        return sock.recv(4)


def test_a_system_that_does_not_tell_whose_sockets_are_is_named(monkeypatch, caplog):
    monkeypatch.setattr(log, "_logged", set())
    monkeypatch.setattr(sockets, "user_of_peer", lambda sock: None)
    server = StoreServer(listen("127.0.0.1", 0), ServerOptions(token=TOKEN.encode()))
    try:
        for _ in range(2):
            assert knock(server.port) == (7).to_bytes(4, "little")
    finally:
        server.close()
    (told,) = [each.getMessage() for each in caplog.records]
    assert told.endswith("without the job's token, every user of this host counts as its owner")


@needs_another_user
def test_another_users_client_without_token(server, caplog):
    """Without a proof nobody gets in but this user, torch's client that is."""
    assert knock(server.port) == (7).to_bytes(4, "little")
    needed = bytes([Answer.TOKEN_NEEDED])
    assert as_another_user(lambda: knock(server.port) == needed) == 0
    with TCPStore("127.0.0.1", server.port, token=TOKEN) as store:
        store.set("k", "v")
        assert as_another_user(lambda: knock(server.port) == needed) == 0
    lines = log_of(caplog, server)
    assert len(lines) == 2
    assert "it is another user's and has no token; give it the job's token" in lines[0]


def send_and_close(port: int) -> bool:
    """Send a request in the packet that ends the connection, many times."""
    for number in range(50):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
            sock.sendall(VALIDATE + encode_request(RequestOp.SET, f"/{number}", b"forged"))
    return True


@needs_another_user
def test_another_users_client_that_is_gone(server):
    """The kernel reports the remains of a closed socket as of user 0."""
    assert as_another_user(lambda: send_and_close(server.port)) == 0
    with TCPStore("127.0.0.1", server.port, token=TOKEN) as store:
        assert store.num_keys() == 0


@needs_another_user
def test_another_users_server_without_token(server_kind, monkeypatch):
    """A client with a token does not take the word of a server that cannot know it."""
    monkeypatch.delenv("UNISONO_TOKEN", raising=False)

    def is_refused():
        try:
            TCPStore("127.0.0.1", master.port, token=TOKEN, timeout=20).close()
        except HandshakeError as error:
            return "the server has none" in str(error)
        return False

    with TCPStore("127.0.0.1", 0, is_master=True, token="") as master:
        assert as_another_user(is_refused) == 0
        assert not is_refused()


def test_wrong_token(server, caplog):
    with caplog.at_level(logging.WARNING, "unisono"):
        with pytest.raises(HandshakeError, match="another token than this client"):
            TCPStore("127.0.0.1", server.port, token="guess", timeout=20)
        with TCPStore("127.0.0.1", server.port, token=TOKEN) as store:
            assert store.num_keys() == 0
        (line,) = log_of(caplog, server)
    assert "it has another token" in line
    assert "127.0.0.1:" in line


def test_local_server_without_token(server_kind, monkeypatch):
    monkeypatch.delenv("UNISONO_TOKEN", raising=False)
    with (
        TCPStore("127.0.0.1", 0, is_master=True) as master,
        TCPStore("127.0.0.1", master.port, token=TOKEN) as store,
    ):
        store.set("k", "v")
        assert master.get("k") == b"v"


def test_replay(server, caplog):
    """What one client said is no use to another."""
    nonce = bytes(NONCE_BYTES)
    request = VALIDATE + encode_request(RequestOp.SET, "/k", b"stolen")
    address = ("127.0.0.1", server.port)
    with socket.create_connection(address, timeout=20) as sock:
        sock.sendall(HELLO + nonce)
        challenge = sock.recv(1 + NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
        theirs, shown = challenge[1 : 1 + NONCE_BYTES], challenge[1 + NONCE_BYTES :]
        assert challenge[0] == Answer.CHALLENGE
        assert shown == proof(TOKEN.encode(), b"server", nonce, theirs)
        mine = proof(TOKEN.encode(), b"client", nonce, theirs)
        sock.sendall(mine + VALIDATE)
        assert sock.recv(1) == bytes([Answer.WELCOME])
    with socket.create_connection(address, timeout=20) as sock:
        sock.sendall(HELLO + nonce + mine + request)
        answer = received(sock)
    assert answer[1 : 1 + NONCE_BYTES] != theirs
    assert answer[1 + NONCE_BYTES + PROOF_BYTES :] == bytes([Answer.WRONG_TOKEN])
    with TCPStore("127.0.0.1", server.port, token=TOKEN) as store:
        assert store.num_keys() == 0
    assert len(log_of(caplog, server)) == 1


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n", b"UNISONX" + bytes(64), b"\xff" * 4096])
def test_strangers_are_hung_up_on(server, sent):
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(sent)
        assert received(sock) == b""
    with TCPStore("127.0.0.1", server.port, token=TOKEN) as store:
        assert store.num_keys() == 0


@pytest.mark.usefixtures("server_kind")
def test_silent_strangers_are_bounded(caplog):
    listeners = listen("127.0.0.1", 0)
    options = ServerOptions(token=TOKEN.encode(), max_greetings=8)
    with (
        contextlib.closing(start_server(listeners, options)) as server,
        contextlib.ExitStack() as stack,
    ):
        address = ("127.0.0.1", server.port)
        silent = [
            stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(12)
        ]
        assert [received(sock) for sock in silent[:4]] == [b""] * 4
        with TCPStore("127.0.0.1", server.port, token=TOKEN, timeout=20) as store:
            store.set("k", "v")
        # Those who came last still have their time.
        silent[-1].sendall(HELLO + bytes(NONCE_BYTES))
        assert silent[-1].recv(1) == bytes([Answer.CHALLENGE])
        assert server.clients <= 8
        assert "did not identify itself in time" in log_of(caplog, server)[0]


@pytest.mark.usefixtures("server_kind")
def test_silent_strangers_do_not_keep_others_out():
    script = (
        "import resource, sys; from unisono.core.stores import TCPStore\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))\n"
        f"store = TCPStore('127.0.0.1', 0, is_master=True, token={TOKEN!r})\n"
        "print(store.port, flush=True); sys.stdin.read()\n"
    )
    with start_python("-c", script) as process:
        port = int(process.stdout.readline())
        with contextlib.ExitStack() as stack:
            for _ in range(150):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            with TCPStore("127.0.0.1", port, token=TOKEN, timeout=15) as store:
                store.set("k", "v")
        process.stdin.close()


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (bytes([Answer.CHALLENGE]) + bytes(NONCE_BYTES + PROOF_BYTES), "another token"),
        (bytes([Answer.CHALLENGE]) + bytes(5), "is not a TCPStore server"),
        (b"HTTP/1.1 400 Bad Request\r\n", "is not a TCPStore server"),
    ],
)
def test_false_server(answer, match):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            sock, _ = listener.accept()
            # The client may have hung up already.
            with sock, contextlib.suppress(OSError):
                sock.recv(len(HELLO) + NONCE_BYTES, socket.MSG_WAITALL)
                sock.sendall(answer)
                sock.shutdown(socket.SHUT_WR)
                received(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(HandshakeError, match=match):
            TCPStore("127.0.0.1", listener.getsockname()[1], token=TOKEN, timeout=20)
        thread.join()


@pytest.mark.parametrize("token", ["", TOKEN])
def test_forwarder_whose_server_is_not_up_yet(token):
    """It accepts and hangs up, as `docker -p` does; later a server has the port."""
    with reserved_port() as port:
        listener = socket.create_server(("127.0.0.1", port))
        servers = []

        def forward():
            for _ in range(5):
                listener.accept()[0].close()
            listener.close()
            servers.append(TCPStore("127.0.0.1", port, is_master=True, token=token))

        thread = threading.Thread(target=forward)
        thread.start()
        with TCPStore("127.0.0.1", port, token=token, timeout=60) as store:
            store.set("k", "v")
            assert store.get("k") == b"v"
        thread.join()
        servers[0].close()


@given(st.lists(st.binary(max_size=60)), st.booleans(), st.booleans(), st.booleans())
def test_gate_lets_nobody_in_without_a_proof(chunks, local, foreign, starts_right):
    gate = Gate(b"token", False, lambda: local, lambda: foreign)
    said = b""
    try:
        for chunk in [HELLO, *chunks] if starts_right else chunks:
            said += chunk
            gate.feed(chunk)
    except Refused:
        pass
    assert not gate.is_open or (local and not foreign and said[:1] == b"\x00")


def test_gate_without_a_token_is_for_local_clients():
    hello = HELLO + bytes(NONCE_BYTES)
    assert Gate(b"", False, lambda: True, lambda: True).feed(hello + b"x") == (
        bytes([Answer.NO_TOKEN_HERE]),
        b"x",
    )
    with pytest.raises(Refused) as caught:
        Gate(b"", False, lambda: False, lambda: True).feed(hello)
    assert caught.value.answer == bytes([Answer.NO_TOKEN_HERE])


def test_launcher_gives_its_workers_a_token(monkeypatch):
    monkeypatch.delenv("UNISONO_TOKEN", raising=False)
    script = (
        "import os, unisono as dist\n"
        "host, port = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
        "assert len(os.environ['UNISONO_TOKEN']) >= 32\n"
        "dist.TCPStore(host, port).close()\n"
        "try: dist.TCPStore(host, port, token='guess')\n"
        "except ConnectionError as error: print(str(error).splitlines()[0])\n"
    )
    done = python("-m", "unisono", "run", "--no-python", sys.executable, "-c", script)
    assert "another token" in done.stdout, done.stderr


SERVE = """
import sys, unisono.core.stores as s
from unisono.core.stores.tcp.server import ServerOptions
from unisono.core.base.net.sockets import listen
kinds = [ServerOptions(token=token) for token in (b"", b"right")]
servers = [s.start_server(listen("0.0.0.0", 0), options) for options in kinds]
ports = [server.port for server in servers]
print(*ports, flush=True)
sys.stdin.read()
for server in servers: server.close()
"""
VISIT = """
import sys
from unisono.core.stores import TCPStore
host, *ports = sys.argv[1:]
for port in ports:
    for token in ("", "right"):
        try:
            TCPStore(host, int(port), token=token, timeout=20).close()
            print("in")
        except ConnectionError as error:
            print(str(error).splitlines()[0].partition(": ")[2])
"""


@pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not()))
@pytest.mark.parametrize("insecure", [False, True])
def test_other_machines_need_the_token(server_kind, insecure):
    variables = {**os.environ, "UNISONO_INSECURE": "1" if insecure else ""}
    with netns.Network(2) as network:
        first, second = network.hosts
        with subprocess.Popen(
            first.inside(sys.executable, "-c", SERVE),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
            text=True,
        ) as process:
            ports = process.stdout.readline().split()
            told = [
                subprocess.run(
                    host.inside(sys.executable, "-c", VISIT, first.v4, *ports),
                    capture_output=True,
                    check=True,
                    text=True,
                    timeout=60,
                ).stdout.splitlines()
                for host in (first, second)
            ]
            process.stdin.close()
            process.wait(60)
    no_token = "this client has a token, and the server has none"
    # The server's own machine, by an address that is no loopback one.
    assert told[0] == ["in"] * 4
    if insecure:
        assert told[1] == ["in", no_token, "in", "in"]
    else:
        assert told[1] == [
            "it has no token, and then serves only its own machine",
            no_token,
            "it needs the job's token, and this client has none",
            "in",
        ]


ANSWER = """
from contextlib import closing
for _ in sys.stdin:
    for port, token in zip(ports, ("", "right")):
        with closing(s.TCPStore("127.0.0.1", port, token=token)) as store:
            print(repr(store.refused_client()), flush=True)
"""
KNOCK = """
import socket, sys
host, *ports = sys.argv[1:]
for port in ports:
    for sent in (b"\\0", b"\\0GET / HTTP", b"UNISONO", b"GET / HTTP"):
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1)
"""


@pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not()))
@pytest.mark.parametrize("token", ["", "right"])
@pytest.mark.usefixtures("server_kind")
def test_refused_client_of_another_machine_is_told_but_no_port_scan(token):
    with netns.Network(2) as network:
        first, second = network.hosts
        with subprocess.Popen(
            first.inside(sys.executable, "-c", SERVE.replace("sys.stdin.read()\n", ANSWER)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            ports = process.stdout.readline().split()
            told = []
            for script in (KNOCK, VISIT.replace('("", "right")', f"({token!r},)")):
                command = [sys.executable, "-c", script, first.v4, *ports]
                subprocess.run(
                    second.inside(*command), check=True, stdout=subprocess.DEVNULL, timeout=60
                )
                process.stdin.write("\n")
                process.stdin.flush()
                told.append([process.stdout.readline().strip() for _ in ports])
            process.stdin.close()
            process.wait(60)
    nobody, (refused, no_refused) = told
    assert [*nobody, no_refused] == ["''"] * 3
    assert refused.startswith("'10.77.0.2:")


@pytest.mark.parametrize("ends", ["the window", "the server"])
@pytest.mark.usefixtures("server_kind")
def test_strangers_by_the_thousand_are_summed_up(caplog, ends):
    options = ServerOptions(token=TOKEN.encode(), log_window_s=0.5 if ends == "the window" else 600)
    knocks = 300

    def messages():
        return [record.getMessage() for record in caplog.records]

    with contextlib.closing(start_server(listen("127.0.0.1", 0), options)) as server:
        for _ in range(knocks):
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n")
                assert received(sock) == b""
        with TCPStore("127.0.0.1", server.port, token=TOKEN, timeout=20) as store:
            store.set("k", "v")
        if ends == "the window":
            # Nobody knocks any more, so the server must wake by itself.
            assert wait_until(lambda: _told(messages()) == knocks)
    lines = messages()
    assert _told(lines) == knocks
    first, *_, last = lines
    assert "it is no client of a store" in first
    assert re.search(r"\d+ more lines like these, the last: .*it is no client of a store", last)
    if ends == "the server":
        assert len(lines) == 6


def _told(lines: list[str]) -> int:
    """The number of closed connections that log lines tell."""
    sums = [re.search(r"(\d+) more lines like these", line) for line in lines]
    return sum(int(found[1]) if found else 1 for found in sums)
