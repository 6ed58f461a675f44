import contextlib
import os
import random
import socket
import stat
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.calls import wait_until
from tests.support.silent import dripping, tls_greeting, unacceptable
from tests.support.together import on_threads
from tests.support.transport_worlds import KEY, SOON, tcp_world, works
from unisono.core.base.deadline import Deadline
from unisono.core.base.net.silence import silence_on, silent_s
from unisono.core.base.net.tls import SecuredSocket, TlsPolicy, TlsRule, why_no_tls
from unisono.core.stores import TCPStore
from unisono.core.transports import Key, LinkDown, TCPTransport
from unisono.core.transports.messages import Purpose
from unisono.core.transports.tcp import handshake, io_loop
from unisono.core.transports.tcp import transport as tcp_transport
from unisono.core.transports.tcp.address import TCPAddress
from unisono.core.transports.tcp.dials import Dials
from unisono.core.transports.tcp.status import _Reply
from unisono.core.transports.tcp.viewer import NO_KEY, question, secret_by
from unisono.core.transports.tcp.wire import ACCEPT, FRAME, HELLO, RECORDS, REFUSE, Frame, Hello

needs_tls = pytest.mark.skipif(bool(why_no_tls()), reason=str(why_no_tls()))


def dial(transport):
    return socket.create_connection(
        ("127.0.0.1", TCPAddress.unpack(transport.address).port), timeout=SOON
    )


def test_calls_that_cross_end_in_one_link():
    for _ in range(30):
        with tcp_world(2) as (a, b):
            barrier = threading.Barrier(2)
            intos = [bytearray(4), bytearray(4)]

            def meet(me, other, into, barrier=barrier):
                barrier.wait()
                me.send(other.rank, KEY, memoryview(bytes([me.rank] * 4)))
                received = me.recv(other.rank, KEY, memoryview(into))
                assert received.wait_until(Deadline(SOON))

            on_threads(partial(meet, a, b, intos[0]), partial(meet, b, a, intos[1]))
            assert intos == [b"\1" * 4, b"\0" * 4]


def hello_of(world, rank, peer):
    token = TCPAddress.unpack(world[peer].address).token
    return Hello(len(world), rank, peer, 0, token).pack()


def test_a_parked_call_is_taken_when_the_own_one_fails():
    """Rank 0 cannot reach rank 1, which calls at the same time."""
    mute = socket.create_server(("127.0.0.1", 0))

    def edit(addresses):
        own = TCPAddress.unpack(addresses[1])
        addresses[1] = own._replace(port=mute.getsockname()[1]).pack()

    with tcp_world(2, edit) as (a, b), mute:
        # Its call is under way, but this server does not answer.
        sent = a.send(1, KEY, memoryview(b"over the peer's own call"))
        mute.settimeout(SOON)
        caller, _ = mute.accept()
        caller.settimeout(SOON)
        assert len(caller.recv(HELLO.size)) == HELLO.size
        into = bytearray(24)
        received = b.recv(0, KEY, memoryview(into))  # calls rank 0
        patience = Deadline(SOON)
        while a._dials.find(1, 0)._spare is None:
            assert not patience.expired()
        assert not received.done()
        caller.close()
        assert received.wait_until(Deadline(SOON))
        assert sent.wait_until(Deadline(SOON))
        assert into == b"over the peer's own call"


@pytest.mark.linux("the kernel describes a connection")
def test_addresses_are_called_while_another_does_not_answer(monkeypatch):
    """The first says nothing, the second answers and hangs up, the third is the peer's."""
    monkeypatch.setattr(handshake, "CONNECT_S", 1e6)
    with contextlib.ExitStack() as stack:

        def edit(addresses):
            own = TCPAddress.unpack(addresses[1])
            for sock in unacceptable("127.0.0.3", own.port):
                stack.enter_context(sock)
            stranger = stack.enter_context(socket.create_server(("127.0.0.2", own.port)))
            thread = threading.Thread(target=lambda: stranger.accept()[0].close())
            thread.start()
            stack.callback(thread.join, SOON)
            addresses[1] = own._replace(hosts=("127.0.0.3", "127.0.0.2", "127.0.0.1")).pack()

        with tcp_world(2, edit) as (a, b):
            # Before rank 1 does anything: it would call rank 0 itself.
            sent = a.send(1, KEY, memoryview(b"third"))
            assert sent.wait_until(Deadline(SOON))
            assert sent.error is None
            into = bytearray(5)
            assert b.recv(0, KEY, memoryview(into)).wait_until(Deadline(SOON))
            assert into == b"third"


def test_unreachable_peer_is_named_with_every_address():
    def edit(addresses):
        own = TCPAddress.unpack(addresses[1])
        addresses[1] = own._replace(port=1).pack()

    with tcp_world(2, edit) as (a, _):
        received = a.recv(1, KEY, memoryview(bytearray(1)))
        assert received.wait_until(Deadline(SOON))
        assert isinstance(received.error, LinkDown)
        assert "127.0.0.1:1: Connection refused" in received.error.reason


@pytest.mark.parametrize("address", ["inproc:abc", "tcp|nonsense", "tcp|1|zz|h"])
def test_address_of_another_kind(address):
    def edit(addresses):
        addresses[1] = address

    with tcp_world(2, edit) as (a, _):
        for transfer in (
            a.send(1, KEY, memoryview(b"x")),
            a.recv(1, KEY, memoryview(bytearray(1))),
        ):
            assert transfer.wait_until(Deadline(SOON))
            assert isinstance(transfer.error, LinkDown)
            assert "its address is of no use" in transfer.error.reason


@pytest.mark.parametrize(
    "change",
    [{"world_size": 3}, {"rank": 0}, {"rank": 7}, {"peer": 1}, {"token": bytes(16)}],
    ids=lambda change: next(iter(change)),
)
def test_wrong_hello_is_refused(change, caplog):
    with tcp_world(2) as world:
        right = Hello(2, 1, 0, 0, TCPAddress.unpack(world[0].address).token)
        with dial(world[0]) as sock:
            sock.sendall(right._replace(**change).pack())
            assert sock.recv(10) == REFUSE
            assert sock.recv(10) == b""
        works(*world)
    assert "rank 0 refused a connection" in caplog.text


@needs_tls
def test_a_viewer_key_opens_no_link(monkeypatch, caplog):
    """Who reads the store knows what a rank publishes, but not the job's token."""
    monkeypatch.setenv("UNISONO_TLS", "on")
    monkeypatch.setenv("UNISONO_TOKEN", "of the job")
    with tcp_world(2) as world:
        mine = TCPAddress.unpack(world[0].address)
        plain = dial(world[0])
        with SecuredSocket(plain, [secret_by(mine.token)]) as sock:
            sock.sendall(Hello(2, 1, 0, 0, mine.token).pack())
            assert sock.recv(10) == REFUSE
        works(*world)
    assert "rank 0 refused a connection" in caplog.text


@needs_tls
def test_a_plain_viewer_learns_nothing_if_all_must_encrypt(monkeypatch):
    monkeypatch.setenv("UNISONO_TLS", "on")
    monkeypatch.setenv("UNISONO_TOKEN", "of the job")
    with tcp_world(2) as world:
        for key in (NO_KEY, TCPAddress.unpack(world[0].address).token):
            with dial(world[0]) as sock:
                sock.sendall(question(RECORDS, key).pack())
                assert sock.recv(10) in (REFUSE, b"")


@needs_tls
def test_a_token_of_the_store_alone_is_warned_of(monkeypatch, caplog):
    monkeypatch.setenv("UNISONO_TLS", "auto")
    monkeypatch.delenv("UNISONO_TOKEN", raising=False)
    with (
        TCPStore("127.0.0.1", 0, is_master=True, token="of the store") as store,
        tcp_world(1) as (rank,),
    ):
        rank.hosts, rank.trips_us = ("here",), (0,)
        rank._show(store, [rank.address])
        assert not caplog.text  # nothing goes to another host
        rank.hosts = ("",)
        rank.trips_us = (100,)
        rank._show(store, [rank.address])
    assert "the store has a token, but UNISONO_TOKEN is not set" in caplog.text


@needs_tls
def test_an_answer_to_a_viewer_is_not_cut():
    """The bytes that TLS has taken wait for a slow reader."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    theirs.settimeout(SOON)
    ours.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    secrets, text, loop = [secret_by(b"key")], bytes(400_000), io_loop.IOLoop()
    got = []

    def read():
        with SecuredSocket(theirs, secrets) as client:
            client.sendall(b"?")
            while part := client.recv(4096):
                got.append(part)

    thread = threading.Thread(target=read)
    with SecuredSocket(ours, secrets, is_server=True) as server:
        thread.start()
        asked = b""
        while not asked:
            with contextlib.suppress(BlockingIOError):
                asked = server.recv(1)
        _Reply(loop, server, text)
        while server.fileno() >= 0:
            loop.turn()
    thread.join()
    loop.close()
    assert sum(map(len, got)) == len(text)


def test_rank_that_published_loopback_only_is_told_so():
    """Rank 1 is on another host than rank 0, as its addresses show."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))

        def edit(addresses):
            near, far = map(TCPAddress.unpack, addresses.values())
            addresses[0] = near._replace(port=unused.getsockname()[1]).pack()
            addresses[1] = far._replace(hosts=("192.0.2.1", *far.hosts)).pack()

        with tcp_world(2, edit) as (_, b):
            sent = b.send(0, KEY, memoryview(b"x"))
            assert sent.wait_until(Deadline(SOON))
    assert "published loopback only, because its store is at localhost" in sent.error.reason
    assert "set UNISONO_TOKEN on all ranks, or UNISONO_HOST there" in sent.error.reason


def test_many_wrong_hellos_are_summed_up(caplog):
    with tcp_world(2) as world:
        for _ in range(30):
            with dial(world[0]) as sock:
                sock.sendall(Hello(2, 1, 0, 0, bytes(16)).pack())
                assert sock.recv(10) == REFUSE
                assert sock.recv(10) == b""
        works(*world)
    *lines, last = [record.getMessage() for record in caplog.records]
    refused = "rank 0 refused a connection that claims rank 1"
    assert lines == [refused] * 5
    assert last == f"25 more lines like these, the last: {refused}"


def test_second_connection_of_a_rank_is_refused_quietly(caplog):
    """It happens whenever two ranks call each other at once."""
    with tcp_world(2) as world:
        works(*world)
        with dial(world[0]) as sock:
            sock.sendall(hello_of(world, 1, 0))
            assert sock.recv(10) == REFUSE
        works(*world)
    assert not caplog.text


@settings(max_examples=40)
@given(data=st.one_of(st.binary(max_size=200), st.just(b"GET / HTTP/1.1\r\n\r\n" * 9)))
def test_strangers_do_no_harm(data):
    with tcp_world(2) as world:
        with dial(world[0]) as sock, contextlib.suppress(OSError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(100) in (b"", REFUSE)
        works(*world)


def test_garbage_after_the_handshake_ends_that_link_only():
    source = random.Random(5)
    frames = [
        source.randbytes(500),
        Frame(Key(1, Purpose.ASK, 0), 2, 0).pack() + b"{}",
        Frame(Key(1, Purpose.ASK, 0), 2, 0).pack() + b"[]",
        Frame(Key(1, Purpose.FAIL, 0), 4, 0).pack() + b"null",
        Frame(Key(1, Purpose.ANSWER, 0), 3, 0).pack() + b"\xff{{",
        Frame(Key(1, Purpose.P2P, 0), 2**62, 0).pack(),
    ]
    for garbage in frames:
        with tcp_world(3) as world:
            with dial(world[0]) as sock:
                sock.sendall(hello_of(world, 2, 0) + garbage)
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(100):
                        pass
            lost = world[0].recv(2, KEY, memoryview(bytearray(1)))
            assert lost.wait_until(Deadline(SOON))
            assert isinstance(lost.error, LinkDown)
            works(world[0], world[1])


def test_silent_strangers_are_closed_in_time(monkeypatch):
    monkeypatch.setattr(handshake, "_HELLO_S", 0.05)
    with tcp_world(2) as world, contextlib.ExitStack() as stack:
        socks = [stack.enter_context(dial(world[0])) for _ in range(20)]
        works(*world)
        assert [sock.recv(1) for sock in socks] == [b""] * 20


def test_a_peer_that_dies_at_any_point_is_noticed():
    """A peer that says so many bytes of hello and frame, and ends."""
    whole = 2 * HELLO.size
    for nbytes in range(0, whole, 3):
        with tcp_world(2) as world:
            frame = Frame(KEY, 1000, 0).pack() + bytes(500)
            into = memoryview(bytearray(1000))
            with dial(world[0]) as sock:
                sock.sendall((hello_of(world, 1, 0) + frame)[:nbytes])
                if nbytes < HELLO.size:
                    sock.shutdown(socket.SHUT_WR)
                    assert sock.recv(10) == b""
                else:
                    assert len(sock.recv(1)) == 1
                    received = world[0].recv(1, KEY, into)
            if nbytes < HELLO.size:
                works(*world)  # no rank was lost: it was nobody yet
            else:
                assert received.wait_until(Deadline(SOON))
                assert isinstance(received.error, LinkDown)


def test_last_words_survive_a_close_with_unread_data():
    """A socket closed with unread data resets the connection; that must not eat what was sent."""
    for _ in range(20):
        with tcp_world(2) as (a, b):
            works(a, b)
            flood = [
                b.send(0, Key(1, Purpose.P2P, 1), memoryview(bytes(50_000))) for _ in range(20)
            ]
            sent = a.send(1, KEY, memoryview(bytes(300_000)))
            closer = threading.Thread(target=a.close)
            closer.start()
            into = memoryview(bytearray(b"\xee" * 300_000))
            received = b.recv(0, KEY, into)
            assert received.wait_until(Deadline(SOON))
            closer.join()
            assert (sent.error, received.error) == (None, None)
            assert into == bytes(300_000)
            for transfer in flood:
                assert transfer.wait_until(Deadline(SOON))


def test_callback_runs_on_a_thread_that_must_not_wait():
    with tcp_world(2) as (a, b):
        seen = []
        received = b.recv(0, KEY, memoryview(bytearray(4)))
        received.add_callback(lambda _: seen.append(b.may_wait()))
        received.add_callback(lambda _: 1 / 0)
        a.send(1, KEY, memoryview(b"1234"))
        assert received.wait_until(Deadline(SOON))
        works(a, b)
        assert seen == [False]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_keeps_no_socket():
    others = count_sockets()
    with tcp_world(2) as (a, b):
        works(a, b)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(write, str(count_sockets()).encode())
            a.close()  # must return although its thread does not exist here
            os._exit(0)
        os.close(write)
        inherited = int(os.read(read, 100))
        os.close(read)
        os.waitpid(pid, 0)
        assert inherited == others
        # Two listeners, two pairs to wake the threads, both ends of a link; and perhaps a second
        # connection, which ends because the ranks called each other at the same time.
        assert count_sockets() >= others + 8
        works(a, b)


def count_sockets():
    count = 0
    for fd in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            count += stat.S_ISSOCK(os.fstat(int(fd)).st_mode)
    return count


def test_a_rank_that_leaves_before_its_call_is_answered_says_good_bye(monkeypatch):
    """Whoever has accepted the call has a link, on which an end without it is a crash."""
    monkeypatch.setattr(tcp_transport, "_LINGER_S", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = TCPAddress(("127.0.0.1",), listener.getsockname()[1], bytes(16)).pack()
        transport = TCPTransport(0, 2, lambda rank: peer)
        transport.recv(1, KEY, memoryview(bytearray(8)))
        listener.settimeout(SOON)
        link, _ = listener.accept()
        with link:
            link.settimeout(SOON)
            assert len(link.recv(HELLO.size, socket.MSG_WAITALL)) == HELLO.size
            closer = threading.Thread(target=transport.close)
            closer.start()
            while transport._leave is None:
                time.sleep(0.001)
            link.sendall(ACCEPT)
            frame = Frame.parse(link.recv(FRAME.size, socket.MSG_WAITALL))
            assert frame.key.kind is Purpose.GOODBYE
        closer.join()


def test_ranks_that_leave_at_the_same_time_are_not_reported_as_lost():
    """Rank 1 leaves while rank 0 closes its messages; rank 2 stays."""
    with tcp_world(3) as (a, b, c):
        works(a, b), works(a, c), works(b, c)
        close_messages = a.messages.close

        def close_late():
            b.close()
            close_messages()

        a.messages.close = close_late
        a.close()
        waiting = c.recv(None, KEY, memoryview(bytearray(1)))
        assert waiting.wait_until(Deadline(SOON))
        assert [c.down(rank).left for rank in (0, 1)] == [True, True], waiting.error


def test_ranks_that_answer_a_good_bye_are_not_reported_as_lost(monkeypatch):
    """Rank 0 leaves. Rank 1 closes its link while rank 0 still sends to rank 2."""
    monkeypatch.setattr(tcp_transport, "_LINGER_S", 60.0)
    with tcp_world(3) as (a, b, c):
        works(a, b), works(a, c)
        closer = threading.Thread(target=a.close)
        assert c._loop.hold()
        try:
            a.send(2, KEY, memoryview(bytes(64 << 20)))
            closer.start()
            patience = Deadline(SOON)
            while not a._links[1].closed:
                assert not patience.expired()
            assert a._links[2].pending()
        finally:
            c._loop.release()
        closer.join()
        # Rank 2 has read to the end of its link to rank 0, and has no link to rank 1.
        assert c.down(0).left
        assert c.down(1) is None
        works(b, c)


def test_clients_without_a_hello_are_limited_in_number(monkeypatch):
    monkeypatch.setattr(handshake, "_MOST_GREETINGS", 4)
    monkeypatch.setattr(handshake, "_LEAST_S", 0.2)
    with tcp_world(2) as (a, b), contextlib.ExitStack() as stack:
        address = TCPAddress.unpack(a.address)
        callers = []
        for _ in range(12):
            sock = stack.enter_context(socket.create_connection((address.hosts[0], address.port)))
            sock.settimeout(SOON)
            callers.append(sock)
        # The oldest are ended, and a rank still gets in.
        assert [caller.recv(1) for caller in callers[:8]] == [b""] * 8
        into = bytearray(1)
        received = a.recv(1, KEY, memoryview(into))
        b.send(0, KEY, memoryview(b"x"))
        assert received.wait_until(Deadline(SOON))
        assert into == b"x"
        assert len(a._greetings._open) <= 4


@pytest.mark.parametrize("tls", ["off", pytest.param("on", marks=needs_tls)])
def test_callers_who_drip_hold_up_no_rank(monkeypatch, tls):
    monkeypatch.setenv("UNISONO_TLS", tls)
    monkeypatch.setenv("UNISONO_TOKEN", "of the job")
    with tcp_world(2) as world:
        address = TCPAddress.unpack(world[0].address)
        greeting = hello_of(world, 1, 0)
        if tls == "on":
            greeting = tls_greeting([secret_by(address.token)])
        with dripping(("127.0.0.1", address.port), greeting, 300) as turns:
            assert wait_until(lambda: len(world[0]._greetings._open) > 200)
            for _ in range(3):
                before = len(turns)
                works(*world)
                assert wait_until(lambda: len(turns) > before)  # noqa: B023
            assert len(world[0]._greetings._open) <= handshake._MOST_GREETINGS


def test_loopback_address_of_another_host_is_not_called():
    token = bytes(range(16))
    mine = TCPAddress(("10.0.0.1", "127.0.0.1"), 1, bytes(16))
    theirs = TCPAddress(("10.0.0.2", "::1", "127.0.0.1"), 2, token)
    addresses = [mine.pack(), theirs.pack(), mine.pack(), theirs._replace(hosts=("::1",)).pack()]
    loop = io_loop.IOLoop()
    try:
        dials = Dials(0, 4, addresses.__getitem__, loop, lambda _: TlsPolicy(TlsRule.NONE, []))
        made = [list(dials.make(peer, 0, print)._hosts) for peer in (1, 2, 3)]
    finally:
        loop.close()
    # Ranks with equal addresses share a host. Ranks may share the network of a pod.
    assert made == [["10.0.0.2"], ["10.0.0.1", "127.0.0.1"], ["::1"]]


@pytest.mark.linux("the kernel describes a connection")
@pytest.mark.parametrize(
    ("retransmits", "unacknowledged", "text"),
    [
        (0, 0, "does not answer, but its host h does: the process is stopped or busy"),
        (
            2,
            1,
            "does not answer: its host h has acknowledged nothing for 1.5 s, so the host or the",
        ),
        # The question has just left. Nothing is known of the host.
        (0, 1, ""),
    ],
)
def test_silence_of_a_host(retransmits, unacknowledged, text):
    sock = socket_of(retransmits=retransmits, unacknowledged=unacknowledged, acknowledged=1500)
    assert silence_on(sock)[: len(text) or None] == text


def socket_of(retransmits=0, probes=0, **words):
    """Return a connection of which the kernel reports this; offsets are those of linux/tcp.h."""
    at = {"unacknowledged": 24, "sent": 44, "received": 52, "acknowledged": 56, "unsent": 144}
    info = bytearray(152)
    info[2:4] = retransmits, probes
    for name, value in words.items():
        info[at[name] : at[name] + 4] = value.to_bytes(4, sys.byteorder)
    return SimpleNamespace(getpeername=lambda: ("h", 1), getsockopt=lambda *_: bytes(info))


@pytest.mark.linux("the kernel describes a connection")
@pytest.mark.parametrize(
    ("silent", "words"),
    [
        # Idle: the kernel probes the host all the time, and must have heard of it.
        (12.0, {}),
        (12.0, {"probes": 5}),
        (0.5, {"received": 500}),
        # Data: sent again and again without an answer, or answered without an acknowledgement.
        (12.0, {"unacknowledged": 1, "sent": 3000}),
        (0.0, {"unacknowledged": 1, "sent": 13_000}),
        # A full receive buffer: the last probe was answered 12 s ago, or is not answered.
        (0.0, {"unsent": 100}),
        (12.0, {"unsent": 100, "probes": 1}),
    ],
)
def test_silence_needs_a_packet_without_an_answer(silent, words):
    sock = socket_of(**{"received": 12_000, "acknowledged": 12_000} | words)
    assert silent_s(sock) == silent
