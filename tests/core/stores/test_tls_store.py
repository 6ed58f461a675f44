"""Stores behind TLS: who is refused and why, and what somebody on the way sees and can do."""

import contextlib
import socket
import threading

import pytest

from tests.support.calls import wait_until
from tests.support.relay import Relay
from tests.support.silent import dripping, tls_greeting
from unisono.core.base.net import tls
from unisono.core.base.net.sockets import listen
from unisono.core.stores import TCPStore, start_server
from unisono.core.stores.tcp.link import open_link
from unisono.core.stores.tcp.server import ServerOptions
from unisono.core.stores.tcp.token import HELLO, NONCE_BYTES
from unisono.core.stores.tcp.wire import RequestOp
from unisono.errors import HandshakeError, InvalidArgumentError, StoreConnectionError

pytestmark = pytest.mark.skipif(bool(tls.why_no_tls()), reason=str(tls.why_no_tls()))

TOKEN = "the job's secret"


@contextlib.contextmanager
def serving(monkeypatch, mode, token=TOKEN, **options):
    """A server with this UNISONO_TLS."""
    monkeypatch.setenv("UNISONO_TLS", mode)
    options = ServerOptions(token=token.encode(), **options)
    with contextlib.closing(start_server(listen("127.0.0.1", 0), options)) as server:
        yield server


def test_keys_and_values_are_not_seen(server_kind, monkeypatch):
    with serving(monkeypatch, "on") as server, contextlib.closing(Relay(server.port)) as relay:
        with TCPStore("127.0.0.1", relay.port, token=TOKEN) as store:
            store.set("name of a key", b"value of it" * 100_000)
            assert store.get("name of a key") == b"value of it" * 100_000
            assert store.add("n", 2) == 2
        assert len(relay.seen) > 2_000_000
        for text in (b"name of a key", b"value of it", TOKEN.encode(), b"UNISONO"):
            assert text not in relay.seen
    with serving(monkeypatch, "off") as server, contextlib.closing(Relay(server.port)) as relay:
        with TCPStore("127.0.0.1", relay.port, token=TOKEN) as store:
            store.set("name of a key", b"value of it")
        assert b"name of a key" in relay.seen


def test_a_client_behind_a_forwarder_calls_again_and_encrypts(server_kind, monkeypatch):
    """It takes the server for one of its own host; the server knows that it is not."""
    with serving(monkeypatch, "on") as server, contextlib.closing(Relay(server.port)) as relay:
        monkeypatch.setenv("UNISONO_TLS", "auto")
        with TCPStore("127.0.0.1", relay.port, token=TOKEN, timeout=20) as store:
            assert b"UNISONO" in relay.seen  # the first call, which was plain
            store.set("name of a key", b"value of it")
            assert store.get("name of a key") == b"value of it"
            # One more connection encrypts at once.
            before = len(relay.seen)
            waiter = threading.Thread(target=store.wait, args=(["later"], 20))
            waiter.start()
            assert store.add("n", 2) == 2
            store.set("later", b"")
            waiter.join()
            assert b"UNISONO" not in relay.seen[before:]
        for text in (b"name of a key", b"value of it", TOKEN.encode()):
            assert text not in relay.seen


@pytest.mark.parametrize("to_server", [True, False])
def test_changed_bytes_end_the_connection(server_kind, monkeypatch, to_server):
    armed = threading.Event()

    def change(data, is_to_server):
        if armed.is_set() and is_to_server == to_server:
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    with (
        serving(monkeypatch, "on") as server,
        contextlib.closing(Relay(server.port, change)) as relay,
        TCPStore("127.0.0.1", relay.port, token=TOKEN) as store,
    ):
        store.set("k", b"v")
        armed.set()
        with pytest.raises(StoreConnectionError, match=r"TLS record|closed|reset"):
            store.get("k")
        armed.clear()
        assert store.get("k") == b"v"


@pytest.mark.parametrize(
    ("here", "there", "client", "reason"),
    [
        ("on", "on", "another", "it has another token than this client"),
        ("off", "on", TOKEN, "it encrypts its connections, and this client does not"),
        ("on", "off", TOKEN, "this client encrypts its connections, and the server does not"),
    ],
)
def test_ends_that_differ_refuse_each_other(
    server_kind, monkeypatch, here, there, client, reason, caplog
):
    with serving(monkeypatch, there) as server:
        monkeypatch.setenv("UNISONO_TLS", here)
        with pytest.raises(HandshakeError, match=reason) as caught:
            TCPStore("127.0.0.1", server.port, token=client, timeout=20)
        assert TOKEN not in str(caught.value)
    assert TOKEN not in caplog.text


def test_a_server_without_a_token_is_named(server_kind, monkeypatch):
    with serving(monkeypatch, "off", token="") as server:
        monkeypatch.setenv("UNISONO_TLS", "on")
        with pytest.raises(
            HandshakeError, match="this client has a token, and the server has none"
        ):
            TCPStore("127.0.0.1", server.port, token=TOKEN, timeout=20)


def test_a_server_that_does_not_encrypt_is_named(monkeypatch):
    monkeypatch.setenv("UNISONO_TLS", "on")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"220 mail.example.org\r\n")
                sock.recv(1 << 16)

        thread = threading.Thread(target=answer)
        thread.start()
        match = r"the connection to the store server at .* cannot be encrypted: the other end "
        with pytest.raises(HandshakeError, match=match):
            TCPStore("127.0.0.1", listener.getsockname()[1], token=TOKEN, timeout=20)
        thread.join()


def test_a_client_without_a_token_is_refused_if_all_must_encrypt(server_kind, monkeypatch):
    with serving(monkeypatch, "on") as server:
        monkeypatch.setenv("UNISONO_TLS", "auto")
        with pytest.raises(HandshakeError, match="it encrypts its connections"):
            TCPStore("127.0.0.1", server.port, token="", timeout=20)


def test_a_server_that_cannot_encrypt_leaves_no_socket(server_kind, monkeypatch):
    monkeypatch.setenv("UNISONO_TLS", "on")
    listeners = listen("127.0.0.1", 0)
    with pytest.raises(InvalidArgumentError, match="and there is no token"):
        start_server(listeners)
    assert [listener.fileno() for listener in listeners] == [-1] * len(listeners)


def test_silent_strangers_hold_up_nobody(server_kind, monkeypatch):
    with serving(monkeypatch, "on", max_greetings=300) as server, contextlib.ExitStack() as stack:
        for first in (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01") * 70:
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            sock.sendall(first)
        with TCPStore("127.0.0.1", server.port, token=TOKEN, timeout=20) as store:
            store.set("k", b"v")
            assert store.get("k") == b"v"


@pytest.mark.parametrize("mode", ["on", "off"])
def test_strangers_who_drip_hold_up_nobody(server_kind, monkeypatch, mode):
    """Hundreds send a whole greeting but its last byte, one byte at a time, again and again."""
    greeting = (
        tls_greeting([tls.secret_of(TOKEN.encode(), "store")])
        if mode == "on"
        else HELLO + bytes(NONCE_BYTES)
    )
    with (
        serving(monkeypatch, mode, max_greetings=150) as server,
        dripping(("127.0.0.1", server.port), greeting, 200) as turns,
    ):
        assert wait_until(lambda: server.clients > 100)
        for _ in range(3):
            with TCPStore("127.0.0.1", server.port, token=TOKEN, timeout=40) as store:
                before = len(turns)
                while len(turns) < before + 3:
                    store.set("k", str(len(turns)))
                    assert int(store.get("k")) <= len(turns)
        # Bytes win no time: the oldest make room.
        assert server.clients <= 150 + 1


@pytest.fixture
def client_and_raw():
    """A connected client of TLS, and the other end's socket without its TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    secrets = [tls.secret_of(TOKEN.encode(), "store")]
    with (
        tls.SecuredSocket(ours, secrets) as client,
        tls.SecuredSocket(theirs, secrets, is_server=True) as server,
    ):
        thread = threading.Thread(target=client.sendall, args=(b"?",))
        thread.start()
        assert server.recv(1) == b"?"
        thread.join()
        yield client, server, socket.socket(fileno=server.detach())


def test_a_slow_server_does_not_outlive_the_deadline(client_and_raw):
    client, _, raw = client_and_raw
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)

    def read_slowly():
        left, has_ended = 24 << 20, threading.Event()
        with raw, contextlib.suppress(OSError):
            while left > 0 and (data := raw.recv(100_000)):
                left -= len(data)
                has_ended.wait(0.02)

    thread = threading.Thread(target=read_slowly)
    thread.start()
    link = open_link(client)
    with pytest.raises(TimeoutError, match="timed out"):
        link.exchange(1.2, ((RequestOp.SET, "k", bytes(64 << 20)),))
    client.close()
    thread.join()


def test_a_record_in_small_parts_does_not_outlive_the_deadline(client_and_raw):
    client, _, raw = client_and_raw
    has_ended = threading.Event()

    def trickle():
        with raw, contextlib.suppress(OSError):
            raw.sendall(b"\x17\x03\x03\x20\x00")
            for _ in range(400):
                raw.sendall(b"x")
                if has_ended.wait(0.02):
                    return

    thread = threading.Thread(target=trickle)
    thread.start()
    link = open_link(client)
    with pytest.raises(TimeoutError, match="timed out"):
        link.exchange(1.2, ((RequestOp.GET, "k"),))
    has_ended.set()
    thread.join()


def test_many_clients_and_large_values(server_kind, monkeypatch):
    with serving(monkeypatch, "on") as server:
        value = bytes(range(256)) * 16_384

        def use(number):
            with TCPStore("127.0.0.1", server.port, token=TOKEN) as store:
                store.set(f"k{number}", value)
                got.append(store.multi_get([f"k{number}"] * 3) == [value] * 3)

        got = []
        threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == [True] * 4
