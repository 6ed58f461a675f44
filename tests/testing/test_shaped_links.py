"""Shaped links: the delay, the rate and the buffer that they promise, and a cut."""

import os
import secrets
import socket
import subprocess
import sys
import threading
import time

import pytest

from unisono.testing.hosts import Network, ShapedLink, why_no_hosts

LINK = ShapedLink(gbps=0.2, delay_s=0.01, buffer_bytes=64 << 10)

pytestmark = pytest.mark.skipif(bool(why_no_hosts(LINK)), reason=str(why_no_hosts(LINK)))


@pytest.fixture
def network():
    with Network(2, LINK) as network:
        yield network


def on(host, make):
    """Return what `make` returns on a thread of this host; a socket stays on its host."""
    made = []

    def enter():
        host.enter()
        made.append(make())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return made[0]


@pytest.fixture
def sockets(network):
    """A datagram socket on each host, connected to the other."""
    first, second = (
        on(host, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for host in network.hosts
    )
    with first, second:
        for own, host in zip((first, second), network.hosts, strict=True):
            own.bind((host.v4, 0))
            own.settimeout(10)
        first.connect(second.getsockname())
        second.connect(first.getsockname())
        yield first, second


def round_trip_s(first, second):
    start_s = time.monotonic()
    first.send(b"ping")
    second.send(second.recv(10))
    first.recv(10)
    return time.monotonic() - start_s


@pytest.mark.alone
def test_a_round_trip_takes_the_delay_twice(sockets):
    times = [round_trip_s(*sockets) for _ in range(6)]
    assert min(times) >= 2 * LINK.delay_s
    # The first one resolves addresses, too.
    assert min(times[1:]) < 3 * LINK.delay_s


@pytest.mark.alone
def test_much_data_takes_the_time_of_the_rate(network):
    nbytes = 2 << 20
    first, second = network.hosts
    listener = on(second, lambda: socket.create_server((second.v4, 0)))
    with listener:
        listener.settimeout(10)
        address = listener.getsockname()
        with on(first, lambda: socket.create_connection(address, 10)) as sender:
            receiver, _ = listener.accept()
            with receiver:
                receiver.settimeout(10)
                start_s = time.monotonic()
                thread = threading.Thread(target=sender.sendall, args=(bytes(nbytes),))
                thread.start()
                left = nbytes
                while left:
                    left -= len(receiver.recv(left))
                took_s = time.monotonic() - start_s
                thread.join()
    least_s = nbytes * 8 / (LINK.gbps * 1e9) + LINK.delay_s
    # TCP begins slowly, and loses packets to the small buffer.
    assert least_s <= took_s < 10 * least_s


def test_a_burst_beyond_the_buffer_is_dropped(sockets):
    first, second = sockets
    round_trip_s(first, second)
    sent, size = 4000, 1400
    for number in range(sent):
        first.send(number.to_bytes(2) + bytes(size - 2))
    numbers = []
    second.settimeout(1)
    try:
        while True:
            numbers.append(int.from_bytes(second.recv(size)[:2]))
    except TimeoutError:
        pass
    fitting = LINK.buffer_bytes // size
    assert numbers[: fitting - 10] == list(range(fitting - 10))  # the first ones fit
    assert numbers == sorted(numbers)
    assert len(numbers) < sent


def test_a_host_that_is_cut_off_is_silent_until_it_is_restored(network, sockets):
    first, second = sockets
    round_trip_s(first, second)
    network.cut(network.hosts[1])
    first.send(b"lost")
    second.settimeout(5 * LINK.delay_s)
    with pytest.raises(TimeoutError):
        second.recv(10)
    network.restore(network.hosts[1])
    second.settimeout(10)
    assert round_trip_s(first, second) >= 2 * LINK.delay_s


def test_ranks_know_the_round_trip_between_their_hosts(network):
    """From their connections to the store, equal on all ranks."""
    script = (
        "import unisono as d; d.init_process_group(); print(d.group.WORLD.backends['cpu'].shape)"
    )
    assert launched(network, script) == [(0, "native-tcp-2-1-16000us\n")] * 2


def launched(network, script):
    """Run a rank on each host; return their exit codes and what they printed."""
    env = os.environ | {
        "UNISONO_TOKEN": secrets.token_hex(), "WORLD_SIZE": str(len(network.hosts)),
        "MASTER_ADDR": "host1", "MASTER_PORT": "29500",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            host.inside(sys.executable, "-c", script),
            env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True,
        )
        for rank, host in enumerate(network.hosts)
    ]  # fmt: skip
    printed = [process.communicate(timeout=60)[0] for process in ranks]
    return list(zip([process.returncode for process in ranks], printed, strict=True))


EARLY = """
import os, sys
import numpy as np
import unisono as dist
dist.init_process_group(timeout=60)
rank, size = dist.get_rank(), dist.get_world_size()
x = np.full(64 << 10, rank + 1.0)  # 512 KiB
for turn in range(3):
    try:
        dist.all_reduce(x, dist.ReduceOp.MAX if rank == turn else dist.ReduceOp.MIN)
        sys.exit("the ranks did not agree, and no error came")
    except dist.errors.CollectiveMismatchError:
        assert (x == rank + 1).all(), x
    # Each sends to all others at once, before the second round of the agreement.
    y = x.copy()
    dist.all_reduce(y, algorithm="one_shot")
    assert (y == size * (size + 1) / 2).all(), y
    out = np.empty((size, len(x)))
    dist.all_gather_into_tensor(out, x)
    assert (out == np.arange(1, size + 1)[:, None]).all(), out
dist.destroy_process_group()
"""


def test_data_that_travel_with_a_refused_agreement_reach_no_array():
    """Hosts far apart send up to 1 MiB before all ranks have agreed."""
    with Network(3, LINK._replace(gbps=1.0, buffer_bytes=4 << 20)) as network:
        assert [code for code, _ in launched(network, EARLY)] == [0, 0, 0]


ROOTED = """
import numpy as np
import unisono as dist
dist.init_process_group(timeout=60)
rank, size = dist.get_rank(), dist.get_world_size()
for root in (0, size - 1):
    for counts in ([100_000] * size, [0, 70_000, 1, 0, 90_000]):
        ranks = [np.full(count, each + 0.5) for each, count in enumerate(counts)]
        at_root = rank == root
        for how in ({}, {"algorithm": "pairwise"}):
            out = [np.zeros_like(each) for each in ranks] if at_root else None
            dist.gather(ranks[rank], out, dst=root, **how)
            assert not at_root or all(map(np.array_equal, out, ranks))
            one = np.zeros_like(ranks[rank])
            dist.scatter(one, ranks if at_root else None, src=root, **how)
            assert np.array_equal(one, ranks[rank])
dist.destroy_process_group()
"""


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_blocks_to_and_from_a_root_in_turn(engine, monkeypatch):
    """5 hosts have 800 KB each for a root, and the switch keeps 256 KiB."""
    monkeypatch.setenv("UNISONO_ENGINE", engine)
    with Network(5, ShapedLink(gbps=1.0, buffer_bytes=256 << 10)) as network:
        assert [code for code, _ in launched(network, ROOTED)] == [0] * 5
