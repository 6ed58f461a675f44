"""Large messages over several connections to a rank: order, sizes, and how many there are."""

import contextlib
import gc
import os
import random
import resource

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import wait_until
from tests.support.transport_worlds import LARGE, SOON, WAYS, tcp_world, use_native, works
from unisono.core.base import config
from unisono.core.base.deadline import Deadline
from unisono.core.engines import is_native_built
from unisono.core.transports import Key
from unisono.core.transports.messages import Purpose
from unisono.core.transports.native_messages import NativeMessages
from unisono.errors import CollectiveTimeoutError, InvalidArgumentError, PeerLostError

pytestmark = [
    pytest.mark.skipif(not is_native_built(), reason="the C++ engine is not built"),
    pytest.mark.skipif(
        config.get("UNISONO_ENGINE") == "reference", reason="UNISONO_ENGINE forbids it"
    ),
]

# Around the size from which messages are cut, and around the ends of their parts.
SIZES = [0, 1, 100, 5000, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE - 1, 4 * LARGE + 5]
NOISE = random.Random(1).randbytes(max(SIZES) + 256)


@contextlib.contextmanager
def wired(channels):
    with tcp_world(len(channels)) as world:
        use_native(world, WAYS["wires"], channels)
        yield world


def wires(transport):
    """The channels that there are, by peer."""
    found = {}
    for peer, channel in list(transport.wires._made):
        found.setdefault(peer, set()).add(channel - 1)
    return found


def message(source, to, tag, k):
    """The k-th one of this kind: its bytes tell it from all others nearby."""
    at = (source * 89 + to * 55 + tag * 34 + k * 21) % 256
    return memoryview(NOISE)[at : at + SIZES[(source * 5 + to * 3 + tag + 2 * k) % len(SIZES)]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("channels", [[1, 1, 1], [2, 2, 2], [4, 4, 4], [4, 1, 3]])
def test_random_messages_arrive_in_order(channels, seed):
    """Everybody posts sends to everybody and receives, of three tags, in orders of its own."""
    rng = random.Random(seed)
    size, tags, count = len(channels), 3, 4
    with wired(channels) as world:
        todo = []
        for a in range(size):
            for b in range(size):
                todo += [(way, a, b, tag) for way in "sr" for tag in range(tags)] * count
        todo = [each for each in todo if each[1] != each[2]]
        rng.shuffle(todo)
        turns, transfers, rooms = {}, [], []
        for each in todo:
            way, source, to, tag = each
            turns[each] = k = turns.get(each, -1) + 1
            data = message(source, to, tag, k)
            key = Key(1, Purpose.P2P, tag)
            if way == "s":
                transfers.append(world[source].send(to, key, data))
            else:
                room = memoryview(bytearray(b"\xee" * len(data)))
                transfers.append(world[to].recv(source, key, room))
                rooms.append((each, k, room, data))
            if rng.random() < 0.2:
                rng.choice(transfers).wait_until(Deadline(0.001))
        rng.shuffle(transfers)
        for transfer in transfers:
            assert transfer.wait_until(Deadline(6 * SOON))
            assert transfer.error is None
        for each, k, room, data in rooms:
            assert room == data, (each, k)


def test_any_source_gets_large_messages_in_order():
    with wired([3, 3, 3]) as world:
        sizes = [3 * LARGE + 1, 7, LARGE]
        sends, sources = [], (1, 2)
        for size in sizes:
            for source in sources:
                data = memoryview(NOISE)[source : source + size]
                sends.append(world[source].send(0, Key(1, Purpose.P2P, size), data))
        for size in sizes:
            found = set()
            for _ in sources:
                room = memoryview(bytearray(size))
                received = world[0].recv(None, Key(1, Purpose.P2P, size), room)
                assert received.wait_until(Deadline(SOON))
                assert room == memoryview(NOISE)[received.peer : received.peer + size]
                found.add(received.peer)
            assert found == {1, 2}
        for sent in sends:
            assert sent.wait_until(Deadline(SOON))


def test_the_first_large_message_makes_the_other_connections():
    with wired([3, 3, 3]) as world:
        works(world[0], world[1], LARGE - 1)
        assert wires(world[0]) == {1: {0}}
        works(world[0], world[1], LARGE)
        assert wait_until(lambda: wires(world[0]) == {1: {0, 1, 2}} == {1: wires(world[1])[0]})
        assert wires(world[2]) == {}


@pytest.mark.parametrize(("mine", "theirs", "used"), [(4, 2, 2), (1, 3, 1), (2, 4, 2)])
def test_the_lower_number_of_two_ranks_counts_and_both_say_so(mine, theirs, used, caplog):
    with wired([mine, theirs]) as (a, b):
        for _ in range(2):
            works(a, b, 3 * LARGE)
            works(b, a, 3 * LARGE)
        assert wait_until(lambda: wires(a) == {1: set(range(used))})
        assert wait_until(lambda: wires(b) == {0: set(range(used))})
    for rank, number, other in [(0, mine, theirs), (1, theirs, mine)]:
        told = f"UNISONO_CHANNELS is {number} on rank {rank}, {other} on rank {1 - rank}"
        assert told in caplog.text


@pytest.mark.parametrize("text", ["0", "17", "-1", "two", "1.5"])
def test_a_number_of_channels_that_makes_no_sense(monkeypatch, text):
    monkeypatch.setenv("UNISONO_CHANNELS", text)
    with tcp_world(2) as world, pytest.raises(InvalidArgumentError) as caught:
        NativeMessages(world[0])
    told = f"environment variable UNISONO_CHANNELS='{text}' is not a number from 1 to 16"
    assert told in str(caught.value)


@pytest.fixture
def four_wires(monkeypatch):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    monkeypatch.setenv("UNISONO_CHANNELS", "4")


@pytest.mark.ranks(2, kind="processes")
def test_no_descriptors_are_left_for_another_channel(rank, four_wires):
    """Rank 0 sends a large message when it can open nothing any more: its peer is lost.

    As with its first connection, the error says what to do.
    """
    small = np.zeros(1)
    # What is imported when it is first needed, also for errors, takes descriptors.
    dist.send(small, 1 - rank)
    dist.recv(small, 1 - rank)
    with contextlib.suppress(CollectiveTimeoutError):
        dist.recv(small, 1 - rank, tag=1, timeout=0.01)
    if rank == 1:
        with contextlib.suppress(PeerLostError):
            dist.recv(small, 0, tag=1, timeout=20.0)
        return
    fillers = list(os.pipe())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(fillers) + 10, hard))
    with contextlib.suppress(OSError):
        while True:
            fillers.append(os.dup(fillers[0]))
    try:
        # It may go over the first connection alone.
        dist.send(np.zeros(8 << 20, np.uint8), 1, timeout=20.0)
        dist.recv(small, 1, tag=1, timeout=20.0)
        first = "no error"
    except PeerLostError as error:
        first = error.what
    for fd in fillers:
        os.close(fd)
    assert "rank 1 was lost: data connection " in first
    assert "Too many open files: this process may have " in first


def test_worlds_that_come_and_go_leave_no_descriptors():
    before = set(os.listdir("/dev/fd"))
    for turn in range(5):
        with wired([4, 4]) as (a, b):
            # The connections may be under way when the world ends.
            works(a, b, LARGE)
            assert wait_until(lambda turn=turn, a=a: turn % 2 or len(wires(a)[1]) == 4)
    del a, b
    gc.collect()  # the bells' pipes go with the object
    assert set(os.listdir("/dev/fd")) <= before
