"""Messages over wires between processes, and every way in which a wire ends."""

import os
import resource
import signal
import socket
import threading
import time

import numpy as np
import pytest

import unisono as dist
from tests.support.transport_worlds import (
    KEY,
    LARGE,
    SOON,
    WAYS,
    connected,
    tcp_world,
    use_native,
    works,
)
from unisono.core.base import config
from unisono.core.base.deadline import Deadline
from unisono.core.engines import is_native_built
from unisono.core.transports import LinkDown
from unisono.core.transports.native_messages import NativeMessages
from unisono.core.transports.transfers import Transfer
from unisono.errors import PeerLostError
from unisono.testing import run


def mixed(rank, path, settings):
    """Messages between all pairs, and a collective, in a world whose ranks differ."""
    size = dist.get_world_size()
    dist.destroy_process_group()
    os.environ.update(settings[rank])
    store = dist.FileStore(path, size)
    dist.init_process_group(store=store, rank=rank, world_size=size, timeout=30.0)
    works = [dist.isend(np.full(5, rank), peer) for peer in range(size) if peer != rank]
    boxes = {peer: np.zeros(5, int) for peer in range(size) if peer != rank}
    for peer, box in boxes.items():
        dist.recv(box, peer)
    for work in works:
        work.wait()
    x = np.full(100_000, rank + 1.0)
    dist.all_reduce(x)
    return sorted(int(box[0]) for box in boxes.values()), float(x.min()), float(x.max())


pytestmark = [
    pytest.mark.skipif(not is_native_built(), reason="the C++ engine is not built"),
    pytest.mark.skipif(
        config.get("UNISONO_ENGINE") == "reference", reason="UNISONO_ENGINE forbids it"
    ),
]


@pytest.fixture(params=[1, 4], ids="channels={}".format)
def wires(request, monkeypatch):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    monkeypatch.setenv("UNISONO_CHANNELS", str(request.param))


@pytest.mark.ranks(2, kind="processes")
def test_more_than_sockets_take_before_anybody_asks(rank, wires):
    """Rank 0 sends what rank 1 asks for later, and in another order."""
    done, count, nbytes = np.zeros(1), 40, 1 << 20
    if rank == 0:
        for tag in range(count):
            dist.send(np.full(nbytes, tag, np.uint8), 1, tag=tag)
        dist.send(done, 1, tag=count)
        return
    for tag in reversed(range(count)):
        into = np.zeros(nbytes, np.uint8)
        dist.recv(into, 0, tag=tag)
        assert (into == tag).all()
    dist.recv(done, 0, tag=count)


@pytest.mark.ranks(2, kind="processes")
def test_last_words_of_a_rank_that_leaves(rank, wires):
    """Rank 1 sends and leaves at once; rank 0 asks when it has gone."""
    words = np.arange(300_000)
    if rank == 1:
        dist.isend(words, 0, tag=1)
        return
    with pytest.raises(PeerLostError) as caught:
        dist.recv(np.zeros(1), 1, tag=2, timeout=20.0)
    assert caught.value.context.peers == (1,)
    into = np.zeros_like(words)
    dist.recv(into, 1, tag=1)
    assert (into == words).all()


@pytest.mark.ranks(2, kind="processes")
def test_a_blocked_rank_sleeps(rank, wires):
    into = np.zeros(1)
    dist.all_reduce(np.ones(1 << 20))  # over all channels
    dist.barrier()
    if rank == 0:
        time.sleep(1.0)
        dist.send(into, 1)
        return
    before = resource.getrusage(resource.RUSAGE_SELF)
    dist.recv(into, 0)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.ranks(2, kind="processes", dead={1})
def test_killed_in_the_middle_of_a_message(rank, wires, tmp_path):
    """Messages too large for the sockets, which the other rank never takes or sends whole."""
    dist.barrier()
    if rank == 1:
        dist.isend(np.zeros(64 << 20, np.uint8), 0)
        (tmp_path / "died_s").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    for call in (dist.send, dist.recv):
        with pytest.raises(PeerLostError) as caught:
            call(np.zeros(64 << 20, np.uint8), 1)
        assert caught.value.context.peers == (1,)
        assert time.monotonic() - float((tmp_path / "died_s").read_text()) < SOON


@pytest.mark.parametrize(("channels", "broken"), [(1, 0), (3, 0), (3, 2)])
def test_a_wire_that_breaks_ends_the_rank_it_led_to(channels, broken):
    """Its link lives on, so nothing else would."""
    with tcp_world(2) as world:
        copies = []
        made = threading.Semaphore(0)
        use_native(world, WAYS["wires"], [channels] * 2)
        for transport in world:
            # Before it hands a socket over.
            def dup(peer, channel, sock, take=transport.wires.take):
                if channel == broken:
                    copies.append(socket.socket(fileno=os.dup(sock.fileno())))
                made.release()
                take(peer, channel, sock)

            transport.wires.take = dup
        a, b = world
        works(a, b, LARGE)
        for _ in range(2 * channels):
            assert made.acquire(timeout=SOON)
        waiting = [
            each.recv(1 - each.rank, KEY, memoryview(bytearray(8)), 0, None) for each in world
        ]
        for copy in copies:
            copy.shutdown(socket.SHUT_RDWR)
            copy.close()
        for rank, transfer in enumerate(waiting):
            assert transfer.wait_until(Deadline(SOON))
            assert isinstance(transfer.error, LinkDown)
            assert transfer.error.peer == 1 - rank
            assert not transfer.error.left
        assert any("data connection" in transfer.error.reason for transfer in waiting)


def test_who_claims_to_be_on_this_host_has_to_show_its_memory():
    """As two hosts of one name, where process ids and descriptors mean something else."""
    with tcp_world(2) as world:
        everybody = [NativeMessages(transport) for transport in world]
        words = [messages.endpoint.split(":") for messages in everybody]
        for rank, messages in enumerate(everybody):
            other = words[1 - rank]
            claimed = [messages.endpoint] * 2
            claimed[1 - rank] = ":".join([*other[:2], "0" * len(other[2]), *other[3:]])
            messages.introduce(claimed, [True, True], crowded=True)
            world[rank].messages = messages
        works(*world)
        assert world[0].wires._made == {(1, 1)}


def test_a_message_over_a_link_ends_the_link_where_cpp_moves_messages():
    with tcp_world(2) as world:
        use_native(world, WAYS["wires"], [1, 1])
        works(*world)
        data = memoryview(bytes(8))
        world[0].transmit(1, KEY, Transfer(1, KEY.context, KEY[1:], data))
        waiting = world[1].recv(0, KEY, memoryview(bytearray(8)))
        assert waiting.wait_until(Deadline(SOON))
        assert isinstance(waiting.error, LinkDown)
        assert waiting.error.reason == "it sent data over a connection for control messages"


def test_a_rank_whose_memory_cannot_be_opened_is_named():
    """Without wires there is no other way to it."""
    world = connected("inproc", 2)
    try:
        messages = [NativeMessages(transport) for transport in world]
        own, other = (each.endpoint.split(":") for each in messages)
        strange = ":".join([*other[:2], "0" * len(other[2]), other[3]])
        messages[0].introduce([":".join(own), strange], [True, True], crowded=True)
        world[0].messages = messages[0]
        for send in range(2):
            sent = world[0].send(1, KEY, memoryview(bytes(8)), send)
            assert sent.wait_until(Deadline(SOON))
            assert isinstance(sent.error, LinkDown)
            assert (sent.error.peer, sent.error.reason) == (1, "it cannot be reached")
        messages[1].close()
    finally:
        for transport in world:
            transport.close()


def test_ranks_that_share_memory_or_not_in_one_world(tmp_path):
    apart = [{}, {"UNISONO_SHARED_MEMORY": "0"}, {}, {}]
    results = run(mixed, 4, ranks="processes", args=(str(tmp_path / "store"), apart))
    for rank, (boxes, least, most) in enumerate(results):
        assert boxes == [peer for peer in range(4) if peer != rank]
        assert least == most == 10
