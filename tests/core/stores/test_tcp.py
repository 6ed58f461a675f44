"""TCPStore: what only a store with a server can do, and suffer."""

import array
import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import termios
import threading
import time
from types import SimpleNamespace

import pytest

from tests.support.calls import wait_until
from tests.support.programs import python, start_python
from tests.support.silent import unacceptable
from unisono.core.base.deadline import Deadline
from unisono.core.base.net import sockets
from unisono.core.base.net.sockets import is_loopback, listen, listening_host
from unisono.core.platform.processes import resident_bytes
from unisono.core.stores import TCPStore, start_server
from unisono.core.stores.tcp import client as tcp_client
from unisono.core.stores.tcp import connection as tcp_connection
from unisono.core.stores.tcp import server, wire
from unisono.core.stores.tcp.link import open_link
from unisono.core.stores.tcp.server import ServerOptions
from unisono.core.stores.tcp.wire import STOP_WAITING, RequestOp, encode_reply, encode_request
from unisono.errors import (
    HandshakeError,
    InvalidArgumentError,
    StoreConnectionError,
    StoreTimeoutError,
)

pytestmark = pytest.mark.usefixtures("server_kind")

SERVER_PROCESS = """
import sys
from unisono.core.stores import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def master():
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=20) as store:
        yield store


@pytest.fixture
def server_process():
    with start_python("-c", SERVER_PROCESS) as process:
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def in_thread(call):
    """Start a call; returns the thread and the list that will hold its result or exception."""
    outcome = []

    def body():
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    return thread, outcome


def raw_client(port: int, *requests: bytes) -> socket.socket:
    """Return a socket whose requests the server has read, if there are any."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=20)
    sock.sendall(encode_request(RequestOp.VALIDATE, wire.MAGIC))
    if requests:
        sock.sendall(b"".join(requests) + encode_request(RequestOp.PING, 7))
        assert sock.recv(4, socket.MSG_WAITALL) == encode_reply(RequestOp.PING, 7)
    return sock


@pytest.fixture
def known_hosts(monkeypatch):
    """Return a function: name -> the names whose addresses it has from then on."""
    real, known = socket.getaddrinfo, {}

    def look_up(name, *args, **options):
        names = known.get(name, [name])
        return [info for each in names for info in real(each, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known.update


def readable_bytes(sock: socket.socket) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(sock, termios.FIONREAD, count)
    return count[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "::"])
def test_hosts(host):
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with TCPStore(host, 0, is_master=True) as master, TCPStore(host, master.port) as client:
        client.set("k", "v")
        assert master.get("k") == b"v"
        assert str(master.port) in repr(client)


@pytest.mark.parametrize("server_host", ["::", "[::]", "0::0"])
@pytest.mark.usefixtures("server_kind")
def test_any_address_of_ipv6_serves_both_families(server_host):
    with TCPStore(server_host, 0, is_master=True) as master:
        for host in ("127.0.0.1", "::1", "localhost", "::", "0.0.0.0"):
            if ":" in host and not socket.has_ipv6:
                continue
            with TCPStore(host, master.port, timeout=20) as client:
                client.set(f"by {host}", "v")
        assert master.num_keys() >= 4


def test_host_without_ipv6_serves_at_any_address(monkeypatch):
    real = socket.socket

    def make(family=socket.AF_INET, *args, **options):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "no such family")
        return real(family, *args, **options)

    listeners = []
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", make)
        listeners += listen("::", 0)
        port = listeners[0].getsockname()[1]
        client = sockets.connect("::", port, Deadline(20), retry=False)
    assert [sock.getsockname()[0] for sock in listeners] == ["0.0.0.0"]
    for sock in (client, *listeners):
        sock.close()


def test_loopback_addresses():
    assert not is_loopback("node1")
    assert not is_loopback("10.0.0.1")
    assert is_loopback("127.0.1.1")


@pytest.mark.parametrize(
    ("host", "known_as", "listening"),
    [
        ("0.0.0.0", {}, {"0.0.0.0"}),
        ("127.0.0.2", {}, {"127.0.0.2"}),
        ("[::1]", {}, {"::1"}),
        ("::", {}, {"::", "0.0.0.0"}),
        # A name is listened for in its families, but what it means here it may not mean elsewhere.
        ("node1", {"node1": ["127.0.1.1"]}, {"0.0.0.0"}),
        ("node1", {"node1": ["127.0.1.1", "::1"]}, {"0.0.0.0", "::"}),
        ("localhost", {"localhost": ["127.0.0.1", "::1"]}, {"127.0.0.1", "::1"}),
        ("localhost", {"localhost": ["127.0.0.1", "::ffff:127.0.0.1"]}, {"127.0.0.1"}),
        ("localhost", {"localhost": ["::ffff:127.0.0.1"]}, {"127.0.0.1"}),
        # Of another machine, as it seems: a router may lead from there to here.
        ("192.0.2.1", {}, {"0.0.0.0"}),
    ],
)
def test_listens_on_what_is_asked_for_and_on_nothing_else(host, known_as, listening, known_hosts):
    if any(":" in name for name in listening) and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    known_hosts(known_as)
    listeners = listen(host, 0)
    try:
        assert {sock.getsockname()[0] for sock in listeners} == listening
        assert len({sock.getsockname()[1] for sock in listeners}) == 1
    finally:
        for sock in listeners:
            sock.close()


def test_port_that_is_free_in_one_family_only_is_not_taken(monkeypatch):
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    infos = [info for name in ("127.0.0.1", "::1") for info in socket.getaddrinfo(name, 0)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: infos)
    real, refused = sockets._bind, []

    def bind(family, name, port, scope):
        if family == socket.AF_INET6 and len(refused) < 3:
            refused.append(port)
            raise OSError(errno.EADDRINUSE, "in use")
        return real(family, name, port, scope)

    monkeypatch.setattr(sockets, "_bind", bind)
    listeners = listen("localhost", 0)
    families = {sock.family for sock in listeners}
    for sock in listeners:
        sock.close()
    assert families == {socket.AF_INET, socket.AF_INET6}
    assert len(refused) == 3


@pytest.fixture
def node1(known_hosts):
    """A host with two sockets, the first of them silent; returns a socket bound to the second."""
    known_hosts(node1=["127.0.0.3", "127.0.0.1"])
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        silent, caller = unacceptable("127.0.0.3", there.getsockname()[1])
        with silent, caller:
            yield there


@pytest.mark.linux("the kernel describes a connection")
def test_a_silent_address_does_not_hold_the_others_up(node1):
    node1.listen()
    deadline = Deadline(120.0)
    with sockets.connect("node1", node1.getsockname()[1], deadline, retry=False) as sock:
        assert sock.getpeername() == node1.getsockname()
    assert deadline.remaining() > 60.0


@pytest.mark.linux("the kernel describes a connection")
def test_an_address_where_nobody_listens_yet_is_called_again(node1, monkeypatch):
    monkeypatch.setattr(sockets, "CONNECT_S", 0.1)
    # In the pause before the next round.
    monkeypatch.setattr(sockets, "time", SimpleNamespace(sleep=lambda _: node1.listen()))
    deadline = Deadline(120.0)
    with sockets.connect("node1", node1.getsockname()[1], deadline, retry=True) as sock:
        assert sock.getpeername() == node1.getsockname()
    assert deadline.remaining() > 60.0


@pytest.mark.linux("the kernel describes a connection")
def test_silent_addresses_are_told(node1):
    port = node1.getsockname()[1]
    with pytest.raises(StoreConnectionError) as caught:
        sockets.connect("node1", port, Deadline(0.3), retry=False)
    table = [line.strip().partition(" -> ")[2] for line in str(caught.value).splitlines()[2:4]]
    assert table == [f"127.0.0.1:{port}: connection refused", f"127.0.0.3:{port}: timed out"]


def test_nobody_there_is_a_table_of_who_could_not_reach_whom(monkeypatch, known_hosts):
    known_hosts(node1=["127.0.0.2", "::ffff:127.0.0.3", "127.0.0.2"])
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        monkeypatch.setattr(socket, "gethostname", lambda: "node2")
        with pytest.raises(StoreConnectionError) as caught:
            TCPStore("node1", port, timeout=0)
    first, head, *table, _hint = str(caught.value).splitlines()
    assert first.startswith(f"cannot connect from node2 to the store at node1:{port}")
    assert first.endswith("(connection refused)")
    assert head.strip() == "failed connections:"
    assert [line.strip() for line in table] == [
        f"node2 -> 127.0.0.2:{port}: connection refused",
        f"node2 -> 127.0.0.3:{port}: connection refused",
    ]


def test_replies_come_although_the_client_sends_no_more(master):
    with raw_client(master.port) as sock:
        sock.sendall(encode_request(RequestOp.ADD, "/n", 5) * 3)
        sock.shutdown(socket.SHUT_WR)
        replies = b""
        while chunk := sock.recv(100):
            replies += chunk
    assert replies == b"".join(encode_reply(RequestOp.ADD, total) for total in (5, 10, 15))


def test_unknown_host_is_named():
    with pytest.raises(StoreConnectionError, match=r"no-such-host\.invalid:1234"):
        TCPStore("no-such-host.invalid", 1234, timeout=0)


def test_client_waits_for_a_late_server(port):
    thread, outcome = in_thread(lambda: TCPStore("127.0.0.1", port, timeout=20))
    with TCPStore("127.0.0.1", port, is_master=True):
        thread.join()
        with outcome[0] as client:
            client.set("k", "v")


def test_something_else_listens():
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def answer():
            connection, _ = stranger.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        thread, _ = in_thread(answer)
        with pytest.raises(HandshakeError, match="is not a TCPStore server"):
            TCPStore("127.0.0.1", stranger.getsockname()[1], timeout=20)
        thread.join()


def test_waits_for_workers():
    (listener,) = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    thread, outcome = in_thread(
        lambda: TCPStore("127.0.0.1", port, 2, True, 20, master_listen_fd=listener.detach())
    )
    with TCPStore("127.0.0.1", port, 2, timeout=20) as client:
        thread.join()
        with outcome[0] as master:
            assert client.num_keys() == 1
            assert master.list_keys() == []


def test_multi_tenant_shares_the_server_until_the_last_store_closes():
    first = TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True)
    second = TCPStore("127.0.0.1", first.port, is_master=True, multi_tenant=True)
    first.set("k", "1")
    first.close()
    assert second.get("k") == b"1"
    second.close()
    with pytest.raises(StoreConnectionError):
        TCPStore("127.0.0.1", second.port, timeout=0)


@pytest.mark.parametrize("said", ["True", "1"])
def test_a_second_master_is_a_client_of_the_launchers_server(said, monkeypatch):
    with TCPStore("127.0.0.1", 0, is_master=True, use_libuv=False) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.port))
        with pytest.raises(StoreConnectionError, match="in use"):
            TCPStore("127.0.0.1", server.port, is_master=True)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", said)
        with TCPStore("127.0.0.1", server.port, is_master=True) as second:
            second.set("k", "v")
            assert (server.is_master, second.is_master) == (True, False)
            assert (server.libuvBackend, second.clone().libuvBackend) == (False, True)
        assert server.get("k") == b"v"
        monkeypatch.setenv("MASTER_PORT", "1")
        with pytest.raises(StoreConnectionError, match="in use"):
            TCPStore("127.0.0.1", server.port, is_master=True)


def test_listen_fd_of_another_port():
    (listener,) = listen("127.0.0.1", 0)
    with listener, pytest.raises(InvalidArgumentError, match="is bound to port"):
        TCPStore("127.0.0.1", 1, is_master=True, master_listen_fd=listener.fileno())


@pytest.mark.parametrize("operation", ["get", "wait", "barrier", "queue_pop"])
def test_killed_server_wakes_every_waiter(server_process, operation):
    process, port = server_process
    with TCPStore("127.0.0.1", port, timeout=60) as client, client.clone() as probe:
        calls = {
            "get": lambda: client.get("never"),
            "wait": lambda: client.wait(["never"]),
            "barrier": lambda: client.barrier("never", 9),
            "queue_pop": lambda: client.queue_pop("never"),
        }
        started = [in_thread(calls[operation]) for _ in range(3)]
        assert wait_until(lambda: len(client._pool._busy) == 3)
        probe.set("k", "v")
        process.kill()
        for thread, outcome in started:
            thread.join(10)
            assert isinstance(outcome[0], StoreConnectionError), outcome
            assert f"127.0.0.1:{port}" in str(outcome[0])
        with pytest.raises(StoreConnectionError):
            client.set("k", "v")


def test_stopped_server_is_a_timeout_not_a_hang(server_process):
    process, port = server_process
    with TCPStore("127.0.0.1", port, timeout=20) as client:
        client.set_timeout(0.1)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        with pytest.raises(StoreTimeoutError, match=f"127.0.0.1:{port} is connected but did not"):
            client.set("k", "v")
        with pytest.raises(StoreTimeoutError):
            client.wait(["k"], 0.05)
        client.set_timeout(60)
        with pytest.raises(StoreTimeoutError, match=r"within (0\.2 s|50 ms)"):
            client.check(["k"], 0.05)
        process.send_signal(signal.SIGCONT)
        client.set_timeout(20)
        assert client.add("n", 1) == 1


def test_a_stopped_server_may_be_silent_for_longer_than_a_host(server_process, monkeypatch):
    process, port = server_process
    monkeypatch.setenv("UNISONO_HOST_TIMEOUT", "1")
    with TCPStore("127.0.0.1", port, timeout=20) as client:
        waiting, awaited = in_thread(lambda: client.get("k"))
        assert wait_until(lambda: client._pool._busy)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        # Another thread needs another connection, which only the server's host accepts now.
        setting, result = in_thread(lambda: client.set("k", "v"))
        setting.join(1.5)
        process.send_signal(signal.SIGCONT)
        setting.join(20)
        waiting.join(20)
        assert (result, awaited) == ([None], [b"v"])


def test_silence_before_a_new_connection_counts(server_process, monkeypatch):
    """Otherwise a rank that waited for a lost host in a collective waits for the store as long."""
    process, port = server_process
    monkeypatch.setenv("UNISONO_HOST_TIMEOUT", "30")
    limits = []

    def connect(*address, **options):
        limits.append(address[2].timeout_s)
        return sockets.connect(*address, **options)

    monkeypatch.setattr(tcp_connection, "connect", connect)
    with TCPStore("127.0.0.1", port, timeout=60) as client:
        limits.clear()
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        with pytest.raises(StoreTimeoutError):
            client.check(["k"], 0.05)
        # As if the rank had waited for something else meanwhile.
        client._pool._silent_at_s -= 20
        process.send_signal(signal.SIGCONT)
        assert client.add("n", 1) == 1
        with client._pool.lease(60):
            assert client.add("n", 1) == 2
    assert len(limits) == 2, limits
    assert 2 < limits[0] <= 10, limits
    assert limits[1] == 30


def test_interrupt_ends_a_wait(master):
    master.set("k", "v")
    ended = threading.Event()

    def interrupt():
        assert wait_until(lambda: master._pool._busy)
        # Python does not end a wait that begins just after a signal came.
        for _ in range(5):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            if ended.wait(10):
                return

    thread, _ = in_thread(interrupt)
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        master.get("never", 200)
    ended.set()
    thread.join()
    assert time.monotonic() - began_s < 100
    assert master.get("k") == b"v"


def test_many_waiters_need_no_thread_in_the_server(master):
    clients = [TCPStore("127.0.0.1", master.port, timeout=20) for _ in range(20)]
    before = threading.active_count()
    waiters = [in_thread(lambda client=client: client.get("go")) for client in clients]
    assert threading.active_count() <= before + len(waiters)
    master.set("go", "1")
    for thread, outcome in waiters:
        thread.join(10)
        assert outcome == [b"1"]
    for client in clients:
        client.close()


@pytest.mark.parametrize("how", ["dies", "does something else"])
def test_queue_waiter_that_does_not_fetch_passes_its_turn(master, how):
    waiting = encode_request(RequestOp.WAIT, ["/q"])
    with raw_client(master.port, waiting) as first, master.clone() as popper:
        thread, outcome = in_thread(lambda: popper.queue_pop("q"))
        assert wait_until(lambda: popper._pool._busy)
        master.queue_push("q", "job")
        assert first.recv(1) == bytes([wire.STOP_WAITING])
        if how == "dies":
            first.close()
        else:
            first.sendall(encode_request(RequestOp.PING, 1))
        thread.join(10)
        assert outcome == [b"job"]


def test_dead_client_leaves_the_barrier(master):
    raw_client(master.port, encode_request(RequestOp.BARRIER, "/b", 2)).close()
    with pytest.raises(StoreTimeoutError):
        master.barrier("b", 2, 0.1)


VICTIM = """
import sys, threading
from unisono.core.stores import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), timeout=60)
calls = {
    "get": lambda: store.get("never"),
    "barrier": lambda: store.barrier("shared", 3),
    "queue_pop": lambda: store.queue_pop("shared"),
    "set": lambda: store.set("large", bytes(60_000_000)),
    "add": lambda: store.add("victims", 1),
}
def again(call):
    while True: call()
for name in sys.argv[2:]:
    threading.Thread(target=again, args=(calls[name],)).start()
print("ready", flush=True)
"""


def test_refused_client_ends_the_wait_for_clients(monkeypatch):
    monkeypatch.setattr("unisono.core.stores.tcp.client._REFUSAL_GRACE_S", 0.0)
    monkeypatch.setattr(TCPStore, "refused_client", lambda self: "10.0.0.9:4242")
    line = (
        r"waits no longer for clients \(1 of 2 joined\): it refused 10\.0\.0\.9:4242, which is on "
        "another machine, because there is no token"
    )
    with pytest.raises(StoreConnectionError, match=line):
        TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=20, token="")


def test_killed_clients_do_no_harm(master):
    """SIGKILL in the middle of whatever they do; the others neither block nor see half a write."""
    states = [["get"], ["barrier"], ["queue_pop"], ["set"], ["add"], ["set", "add", "barrier"]]
    with contextlib.ExitStack() as stack:
        victims = []
        for state in states:
            victim = stack.enter_context(start_python("-c", VICTIM, master.port, *state))
            stack.callback(victim.kill)
            victims.append(victim)
        for victim in victims:
            assert victim.stdout.readline() == b"ready\n"
        for victim in victims:
            victim.kill()
            victim.wait()
            assert master.add("mine", 1) > 0
    server = master._server._server
    assert wait_until(lambda: server.clients == len(master._pool._idle))
    if master.check(["large"]):
        assert len(master.get("large")) == 60_000_000
    with pytest.raises(StoreTimeoutError):
        master.barrier("shared", 2, 0.05)
    master.queue_push("shared", "job")
    assert master.queue_pop("shared", timeout=10) == b"job"
    assert master.get("mine") == b"6"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        encode_request(RequestOp.VALIDATE, wire.MAGIC) + b"\xff",
        encode_request(RequestOp.VALIDATE, wire.MAGIC) + b"\x01" + b"\xff" * 8,
    ],
)
def test_server_hangs_up_on_nonsense_and_lives(master, sent):
    with socket.create_connection(("127.0.0.1", master.port), timeout=10) as stranger:
        stranger.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert master.add("n", 1) == 1


def test_client_that_reads_nothing_does_not_fill_the_server(master):
    master.set("large", bytes(4 << 20))
    before = resident_bytes(os.getpid()) or 0
    with raw_client(master.port) as slow:
        slow.sendall(
            encode_request(RequestOp.GET, "/large") * 200
            + encode_request(RequestOp.ADD, "/late", 1)
        )
        assert wait_until(lambda: readable_bytes(slow) > 0)
        assert not master.check(["late"])
        assert master.add("n", 1) == 1
        assert (resident_bytes(os.getpid()) or 0) - before < 64 << 20


def test_large_values_and_many_keys(master, server_kind):
    master.set_timeout(60)
    large = os.urandom(1 << 20) * 64
    master.set("large", large)
    assert master.get("large") == large
    count = 100_000 if server_kind == "native" else 20_000
    names = [f"key{number:06d}" for number in range(count)]
    master.multi_set(names, [b""] * len(names))
    assert master.check(names)
    master.delete_key("large")
    assert master.list_keys() == names


def test_append_makes_no_value_too_long(master, server_kind, monkeypatch, caplog):
    most = wire.MAX_VALUE_BYTES
    if server_kind == "python":
        most = 1000
        for module in (tcp_client, server):
            monkeypatch.setattr(module, "MAX_VALUE_BYTES", most)
    master.set_timeout(60)
    master.set("k", bytes(most - 1))
    master.append("k", b"x")
    with pytest.raises(InvalidArgumentError) as caught:
        master.append("k", b"yz")
    line = f"append of 2 bytes to the {most} bytes of 'k': a value has at most {most} bytes"
    assert caught.value.what == line
    assert master.get("k") == bytes(most - 1) + b"x"
    assert "the value becomes too long" in caplog.text


def test_small_multi_get_cannot_ask_for_more_than_the_bound():
    options = ServerOptions(max_reply_bytes=10_000)
    with (
        contextlib.closing(start_server(listen("127.0.0.1", 0), options)) as server,
        TCPStore("127.0.0.1", server.port) as client,
    ):
        client.set("k", bytes(1000))
        assert len(client.multi_get(["k"] * 10)) == 10
        with pytest.raises(StoreConnectionError):
            client.multi_get(["k"] * 11)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_child_of_a_fork_has_connections_of_its_own(master):
    master.set("from", "parent")
    script = (
        "import os, sys; from unisono.core.stores import TCPStore\n"
        f"store = TCPStore('127.0.0.1', {master.port}, timeout=20)\n"
        "store.set('a', '1')\n"
        "pid = os.fork()\n"
        "for _ in range(200): store.add('n', 1)\n"
        "if pid: sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    python("-c", script, check=True)
    assert master.get("n") == b"400"


def test_child_of_a_fork_does_not_keep_a_dead_server_alive():
    script = (
        "import os, sys, time; from unisono.core.stores import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True)\n"
        "port = store.port\n"
        # The child prints, because only then has it closed what it inherited.
        "if os.fork() == 0: print(port, flush=True); sys.stdin.read(); os._exit(0)\n"
        "time.sleep(60)\n"
    )
    with start_python("-c", script) as parent:
        port = int(parent.stdout.readline())
        with TCPStore("127.0.0.1", port, timeout=30) as client:
            thread, outcome = in_thread(lambda: client.get("never"))
            assert wait_until(lambda: client._pool._busy)
            parent.kill()
            # The kernel may close its connections before it closes its listening socket.
            parent.wait(30)
            thread.join(10)
            assert isinstance(outcome[0], StoreConnectionError), outcome
        # The child is still there, but does not listen.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=10)


def test_grandchild_keeps_its_files(server_kind):
    """The numbers of a server's sockets may belong to other files by then."""
    script = (
        "import os, sys; from unisono.core.stores import TCPStore\n"
        "master = TCPStore('127.0.0.1', 0, is_master=True)\n"
        "clients = [TCPStore('127.0.0.1', master.port, timeout=20) for _ in range(8)]\n"
        "def fork():\n"
        "    if pid := os.fork(): os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "fork()\n"
        "files = [os.open('/dev/null', os.O_RDONLY) for _ in range(60)]\n"
        "fork()\n"
        "for file in files: os.fstat(file)\n"
        "os._exit(0)\n"
    )
    python("-c", script, check=True)


def test_one_value_in_a_queue_wakes_one_waiter(master):
    waiting = encode_request(RequestOp.WAIT, ["/q"])
    with raw_client(master.port, waiting) as first, raw_client(master.port, waiting) as second:
        master.queue_push("q", "x")
        assert master.queue_len("q") == 1
        assert select.select([first, second], [], [], 20)[0] == [first]


def test_all_wait_for_the_keys_of_all(master):
    """Each of n waits for n keys, of which one goes again: nobody wakes before all are there."""
    count = 100
    names = [f"/rank{i}" for i in range(count)]
    waiting = encode_request(RequestOp.WAIT, names)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(raw_client(master.port, waiting)) for _ in range(count)]
        for name in names[:-1]:
            master.set(name[1:], "here")
        master.delete_key(names[50][1:])
        master.set(names[-1][1:], "here")
        assert select.select(clients, [], [], 0)[0] == []
        master.set(names[50][1:], "here")
        for client in clients:
            assert client.recv(1) == encode_reply(RequestOp.WAIT, STOP_WAITING)


@pytest.mark.parametrize("free", range(10))
def test_too_few_descriptors_are_an_error_not_a_hang(free):
    script = (
        "import os, resource; from unisono.core.stores import TCPStore\n"
        f"few = max(map(int, os.listdir('/dev/fd'))) + {free}\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))\n"
        "try: TCPStore('127.0.0.1', 0, is_master=True, timeout=0.2)\n"
        "except OSError: pass\n"
        "os._exit(0)\n"
    )
    python("-c", script, check=True)


def test_open_and_close_leave_nothing():
    """The leak guard counts threads and descriptors, once they have had time to go."""
    for _ in range(200):
        with TCPStore("127.0.0.1", 0, is_master=True) as store, store.clone() as clone:
            clone.set("k", "v")


def test_forgotten_store_closes_itself():
    store = TCPStore("127.0.0.1", 0, is_master=True)
    port = store.port
    store.set("k", "v")
    del store
    with pytest.raises(StoreConnectionError):
        TCPStore("127.0.0.1", port, timeout=0)


def test_server_needs_a_socket():
    with pytest.raises(InvalidArgumentError):
        start_server([])


def test_a_wait_that_ends_while_it_is_cancelled_has_ended():
    """The end of the wait and the answer to its cancellation arrive in one read."""
    client, server = socket.socketpair()
    with client, server:
        link = open_link(client)
        with pytest.raises(TimeoutError):
            link.exchange(0.01, ((RequestOp.WAIT, ["k"]),))
        server.sendall(
            encode_reply(RequestOp.WAIT, STOP_WAITING)
            + encode_reply(RequestOp.CANCEL_WAIT, wire.WAIT_CANCELED)
        )
        assert link.cancel(20) is True
        server.sendall(encode_reply(RequestOp.GET, b"next"))
        assert link.exchange(20, ((RequestOp.GET, "k"),)) == [b"next"]


def test_a_server_is_reached_by_ipv4_where_ipv6_is_off():
    """There "::" can be bound, but "::1" cannot be reached."""

    def listener(family, host, v6_only=1):
        sock = socket.socket(family)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, v6_only)
        sock.bind((host, 0))
        return sock

    with (
        listener(socket.AF_INET, "0.0.0.0") as all_4,
        listener(socket.AF_INET, "127.0.0.1") as loopback,
        listener(socket.AF_INET6, "::") as all_6,
        listener(socket.AF_INET6, "::", 0) as both,
    ):
        assert listening_host([all_6, all_4]) == listening_host([all_6, loopback]) == "127.0.0.1"
        assert listening_host([both]) == "127.0.0.1"
        assert listening_host([all_6]) == "::1"
