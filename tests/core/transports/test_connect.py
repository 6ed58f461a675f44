import contextlib
import errno
import multiprocessing
import re
import threading
from functools import partial
from importlib import import_module

import pytest

from tests.support.together import on_threads
from unisono.core.base.deadline import Deadline
from unisono.core.base.process_identity import new_user
from unisono.core.engines.api import Communicator
from unisono.core.rendezvous import rendezvous
from unisono.core.stores import HashStore, PrefixStore, TCPStore
from unisono.core.stores.tcp.refusals import refused_client
from unisono.core.stores.tcp.token import REFUSED_KEY
from unisono.core.stores.tcp.wire import RequestOp
from unisono.core.transports import InprocTransport, Key, connect
from unisono.core.transports.connect import round_trip_us
from unisono.core.transports.messages import Purpose
from unisono.core.transports.tcp import address
from unisono.core.transports.tcp.address import TCPAddress, listen
from unisono.errors import RendezvousError, TransportError, UnisonoError, UnsupportedError

KEY = Key(1, Purpose.P2P, 0)


def connected(store, size, kind):
    joins = [partial(connect, store, rank, size, Deadline(20), kind) for rank in range(size)]
    return on_threads(*joins)


@pytest.mark.parametrize("kind", ["inproc", "tcp"])
def test_a_store_serves_one_world_after_another(kind):
    """Each finds its own addresses, not those of the one before, even if it starts unevenly."""
    with HashStore() as store:
        for _ in range(3):
            world = connected(store, 3, kind)
            assert [transport.name for transport in world] == [kind] * 3
            into = bytearray(2)
            received = world[0].recv(2, KEY, memoryview(into))
            world[2].send(0, KEY, memoryview(b"hi"))
            assert received.wait_until(Deadline(20))
            assert into == b"hi"
            for transport in reversed(world):
                transport.close()
            assert not any("address" in key for key in store.list_keys())


def test_auto_is_inproc_if_the_store_cannot_leave_the_process(monkeypatch):
    monkeypatch.delenv("UNISONO_TRANSPORT", raising=False)
    with HashStore() as store:
        transport = connect(PrefixStore("a", store), 0, 1, Deadline(5))
        transport.close()
        assert transport.name == "inproc"


def test_ranks_that_never_come_are_named(monkeypatch):
    # By name: `unisono.core.transports.connect` is the function.
    monkeypatch.setattr(import_module("unisono.core.transports.connect"), "_STAY_S", 0.01)
    with HashStore() as store:
        store.set("1/address/2", "4 x")
        with pytest.raises(RendezvousError) as caught:
            connect(store, 0, 4, Deadline(0.05), "tcp")
    assert caught.value.what == ("rank 0 of 4 waited 0.05 s for ranks that never came: 1, 3")
    assert caught.value.context.peers == (1, 3)


def test_refused_client_ends_the_first_meeting_only(monkeypatch):
    """Of a store without a token; as its server, the test notes a client of another machine."""
    module = import_module("unisono.core.transports.connect")
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    monkeypatch.setattr(module, "_LATE_S", 0.01)
    note = (RequestOp.COMPARE_SET, REFUSED_KEY, b"", b"10.0.0.9:4242")
    with TCPStore("127.0.0.1", 0, is_master=True, token="") as store:
        for transport in connected(store, 2, "tcp"):
            transport.close()
        store._call(*note)

        def late(rank):
            if rank == 1:
                store.wait(["looked"], 20)
            connect(store, rank, 2, Deadline(20), "tcp").close()

        looks = iter(range(20))

        def look(store):
            if next(looks) == 10:
                store.set("looked", "")
            return refused_client(store)

        monkeypatch.setattr(module, "refused_client", look)
        on_threads(partial(late, 0), partial(late, 1))
    with TCPStore("127.0.0.1", 0, is_master=True, token="") as store:
        store._call(*note)
        line = "rank 0 of 2 waits no longer for rank 1: the store refused 10.0.0.9:4242, which is"
        monkeypatch.setattr(module, "refused_client", refused_client)
        with pytest.raises(RendezvousError, match=line) as caught:
            connect(store, 0, 2, Deadline(20), "tcp")
        assert "UNISONO_TOKEN" in caught.value.hint


def test_rank_that_cannot_listen_is_told_to_all(caplog):
    with HashStore() as store:

        def join(rank):
            with pytest.raises(UnisonoError) as caught:
                connect(store, rank, 2, Deadline(20), "tcp" if rank else "no such")
            return caught.value

        mine, other = on_threads(partial(join, 0), partial(join, 1))
    assert mine.what == "unknown transport 'no such' (known: auto, inproc, tcp)"
    assert other.what == f"rank 1 of 2 cannot meet rank 0: {mine.what}"
    assert other.context.peers == (0,)
    # It logs the reason before it waits for the others.
    assert caplog.messages == [f"rank 0 cannot meet the other ranks: {mine.what}"]


@pytest.mark.parametrize(
    "text",
    [
        "2 - 0 inproc",
        "2 host - - 0 inproc",
        "2 host - - 0 in\tp",
        "2 host - - 0 in\tp q",
        "2 host - - - 0 7 in\tp q",
    ],
)
def test_rank_of_another_version_is_named(text):
    with HashStore() as store:
        store.set("1/address/1", text)

        def join():
            line = "rank 0 of 2 does not understand rank 1, whose version of unisono is another"
            with pytest.raises(UnsupportedError, match=line) as caught:
                connect(store, 0, 2, Deadline(20), "tcp")
            assert caught.value.context.peers == (1,)

        on_threads(join, lambda: store.barrier("1/connected", 2, 20))


def test_rank_that_hosts_the_store_gives_up_first(monkeypatch):
    """Its store stays until the rank that waits a little longer knows who is missing."""
    # On a busy machine the other rank may need seconds.
    monkeypatch.setattr(import_module("unisono.core.transports.connect"), "_STAY_S", 60.0)

    def join(rank, store, timeout_s):
        with store, pytest.raises(RendezvousError) as caught:
            connect(store, rank, 3, Deadline(timeout_s), "tcp")
        return caught.value.what

    host, _, _ = next(rendezvous("tcp://127.0.0.1:0", 0, 3))
    client, _, _ = next(rendezvous(f"tcp://127.0.0.1:{host.port}", 1, 3))
    for rank in (0, 1):  # Both have come, also if one of them is slow.
        host.set(f"1/address/{rank}", "3 x")
    assert on_threads(partial(join, 0, host, 0.2), partial(join, 1, client, 0.5)) == [
        "rank 0 of 3 waited 0.2 s for ranks that never came: 2",
        "rank 1 of 3 waited 0.5 s for ranks that never came: 2",
    ]


def test_address_survives_the_store():
    there = TCPAddress(("10.0.0.1", "fe80::1"), 4567, b"0123456789abcdef")
    assert TCPAddress.unpack(there.pack()) == there
    with pytest.raises(TransportError) as caught:
        TCPAddress.unpack("inproc:abc")
    assert caught.value.what == "a peer published 'inproc', this rank uses tcp"


@pytest.mark.parametrize(
    "hosts", [("127.0.0.1",), ("127.0.0.1", "::1"), ("127.0.0.2", "127.0.0.1"), ("::1",)]
)
def test_listens_on_what_is_published_and_on_nothing_else(hosts):
    sockets, port = listen(hosts)
    there = [sock.getsockname()[:2] for sock in sockets]
    for sock in sockets:
        sock.close()
    assert there == [(host, port) for host in hosts]


def test_address_that_this_host_lost_is_left_out_if_there_is_another():
    sockets, port = listen(("192.0.2.1", "127.0.0.1"))
    there = [sock.getsockname() for sock in sockets]
    for sock in sockets:
        sock.close()
    assert there == [("127.0.0.1", port)]


def test_port_that_is_free_on_one_address_only_is_not_taken(monkeypatch):
    real, refused = address._listen_on, []

    def refuse(host, port):
        if host == "127.0.0.2" and len(refused) < 3:
            refused.append(port)
            raise OSError(errno.EADDRINUSE, "in use")
        return real(host, port)

    monkeypatch.setattr(address, "_listen_on", refuse)
    sockets, port = listen(("127.0.0.1", "127.0.0.2"))
    ports = {sock.getsockname()[1] for sock in sockets}
    for sock in sockets:
        sock.close()
    assert ports == {port}
    assert len(sockets) == 2


def test_world_does_not_find_addresses_of_the_one_before_that_are_not_deleted_yet(monkeypatch):
    """A rank that is slow to clean up; its peer is in the next world already."""
    with HashStore() as store:
        slow = store.clone()
        behind, go_on = threading.Event(), threading.Event()
        real = slow.delete_key

        def delete_key(key):
            if key == "1/address/1":
                behind.set()
                assert go_on.wait(20)
            return real(key)

        monkeypatch.setattr(slow, "delete_key", delete_key)
        worlds = []

        def twice(rank, mine):
            for _ in range(2):
                worlds.append((rank, connect(mine, rank, 2, Deadline(20), "tcp")))

        threads = [
            threading.Thread(target=twice, args=arguments) for arguments in [(0, store), (1, slow)]
        ]
        for thread in threads:
            thread.start()
        assert behind.wait(20)
        # The quick one has to wait for the slow one's new address.
        store.wait(["2/address/0"], 20)
        assert store.check(["1/address/1"])
        assert len(worlds) == 1
        go_on.set()
        for thread in threads:
            thread.join()
        assert sorted(rank for rank, _ in worlds) == [0, 0, 1, 1]
        for _, transport in reversed(worlds):
            transport.close()
        slow.close()


def test_rank_that_another_process_has_is_told_whose_it_is(monkeypatch):
    with HashStore() as store:
        first = []
        thread = threading.Thread(
            target=lambda: first.append(connect(store, 1, 2, Deadline(20), "tcp"))
        )
        thread.start()
        store.wait(["1/address/1"], 20)
        with pytest.raises(RendezvousError) as caught:
            connect(store, 1, 2, Deadline(20), "tcp")
        assert re.fullmatch(
            r"rank 1 of 2 is process (\d+) on host (\S+) already, so it cannot be process \1 on "
            r"host \2",
            caught.value.what,
        )
        assert caught.value.context.peers == (1,)
        # A child that still runs its parent's script.
        monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
        with pytest.raises(RendezvousError, match='if __name__ == "__main__":'):
            connect(store, 1, 2, Deadline(20), "tcp")
        other = connect(store, 0, 2, Deadline(20), "tcp")
        thread.join()
        for transport in (other, *first):
            transport.close()


def test_rank_whose_process_died_while_it_met_is_taken_over():
    with HashStore() as store:
        host, machine, name, _, pid = new_user().split("~")
        dead = f"{host}~{machine}~{name}~0~{pid}"
        store.set("rank/0", f"1 {dead}")
        store.set("1/address/0", "old")
        world = [None, None]

        def join(rank):
            world[rank] = connect(store, rank, 2, Deadline(20), "tcp")

        # The other one must not look while the dead one's address is there.
        first = threading.Thread(target=join, args=(0,))
        first.start()
        while store.get("1/address/0") == b"old":
            first.join(0.001)
        join(1)
        first.join()
        assert store.get("rank/0") == b"1"
        for transport in world:
            transport.close()


def test_failed_meeting_can_be_repeated():
    with HashStore() as store:
        with pytest.raises(RendezvousError):
            connect(store, 0, 2, Deadline(0.01), "tcp")
        for transport in connected(store, 2, "tcp"):
            transport.close()


def test_ranks_that_disagree_about_the_size_of_the_world():
    """Both are told, and who was told more does not wait for ranks that do not exist."""

    def join(rank, store, world_size):
        with pytest.raises(RendezvousError) as caught:
            connect(store, rank, world_size, Deadline(20), "tcp")
        return caught.value.what

    with HashStore() as store:
        told = on_threads(partial(join, 0, store, 2), partial(join, 1, store.clone(), 3))
    assert told == [
        "rank 0 has world_size=2, rank 1 has world_size=3",
        "rank 1 has world_size=3, rank 0 has world_size=2",
    ]


def test_a_thread_is_answered_by_one_that_does_not_know_its_address_yet():
    known = []
    first = InprocTransport(0, 2, lambda rank: known[rank])
    second = InprocTransport(1, 2, [].__getitem__)
    known += [first.address, second.address]
    with contextlib.closing(first), contextlib.closing(second):
        second.enter(7, 3, "all_reduce")
        answers = first.ask(7, 3, [1], Deadline(5))
        assert [(rank, status.seq) for rank, status in answers.items()] == [(1, 3)]


@pytest.mark.parametrize(
    ("hosts", "trips_us", "expected"),
    [
        ("ab", [0, 9000], 16_000),
        ("ab", [0, 90], 250),
        ("aabbc", [0, 0, 900, 950, 4100], 4000),  # of the farthest host
        ("aabb", [0, 0, 90, 4100], 250),  # of the rank that was not busy
        ("aabb", [0, 0, None, 4100], 4000),
        ("aa", [0, 9000], 0),  # one host, by two addresses
        ("ab", [0, 0], 0),  # one host without shared memory
        ("ab", [0, None], 250),  # a store without round trips
        ("ab", [9000, 9100], 250),  # a store on a third host tells nothing of these two
        ("ab", [100, 9100], 16_000),  # or that they are far apart
    ],
)
def test_round_trip_between_hosts(hosts, trips_us, expected):
    assert round_trip_us(hosts, trips_us) == expected


def test_round_trip_of_a_sub_group_is_that_of_its_hosts():
    with contextlib.closing(InprocTransport(0, 4, [].__getitem__)) as transport:
        transport.hosts, transport.trips_us = tuple("aabc"), (0, 0, 200, 9000)
        found = [
            Communicator(transport, ranks, "group").round_trip_us
            for ranks in [(0, 1), (0, 2), (0, 1, 2, 3)]
        ]
    assert found == [0, 250, 16_000]


def test_ranks_that_give_different_nodes_have_one_node(monkeypatch):
    """The map is that of what all have published, so no rank has another one."""
    connecting = import_module("unisono.core.transports.connect")
    with HashStore() as store:

        def join(rank):
            with contextlib.closing(connect(store, rank, 4, Deadline(20), "inproc")) as transport:
                return transport.nodes

        def meet(places):
            monkeypatch.setattr(connecting, "published", places.pop)
            return on_threads(*(partial(join, rank) for rank in range(4)))

        assert meet(["each=2"] * 4) == [(0, 0, 1, 1)] * 4
        assert meet(["each=2", "each=4", "each=2", "each=2"]) == [(0, 0, 0, 0)] * 4
