"""Hosts that vanish: no connection is closed, and nothing answers any more."""

import signal
import subprocess
import sys
import time

import pytest

from tests.faults.fault_calls import BUSY_S, NOTICE_S
from tests.faults.scripts import started
from tests.faults.test_hosts import PORT, ask, tell
from tests.support import netns
from unisono.adapters.mpi import library as mpi_library
from unisono.core.engines import is_native_built
from unisono.core.rendezvous.membership import AWAY_S, VANISHED_S

pytestmark = pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not()))

# Less than the default, so that the tests are short.
LIMIT_S = 2.0

# The engine that a test needs in the default suite comes first.
OTHER = pytest.mark.whole("10 s of waiting")
NATIVE = "native" if is_native_built() else "reference"
NATIVE_FIRST = [NATIVE, pytest.param("reference", marks=OTHER)]
NO_MPI = pytest.mark.skipif(bool(mpi_library.why_absent()), reason="there is no MPI library")
REFERENCE_FIRST = ["reference", pytest.param(NATIVE, marks=OTHER)]

MEETS = """
dist.init_process_group(timeout=300)
x = np.full(COUNT, 1.0)
def step():
    x[:] = 1.0
    dist.all_reduce(x)
    assert (x == world_size).all(), x
for _ in range(3):
    step()
print("ready", flush=True)
sys.stdin.readline()
"""

LEAVES = """
sys.stdin.readline()
os._exit(0)
"""

# Until the end of the world.
STEPS = (
    MEETS
    + """
def work():
    while True:
        step()
        time.sleep(0.02)
tell(attempt(work))
"""
    + LEAVES
)

# All connections are idle, and only rank 0 waits for a rank of another host.
RECEIVES = (
    MEETS
    + """
source = {0: world_size - 1, world_size - 1: 0}.get(rank)
tell(attempt(dist.recv, x, source) if source is not None else attempt(time.sleep, 0.0))
"""
    + LEAVES
)

# More than the buffers of a connection.
SENDS = (
    MEETS
    + """
def work():
    if rank == 0:
        dist.send(np.arange(4_000_000.0), 1)
    else:
        big = np.zeros(4_000_000)
        dist.recv(big, 0)
        assert (big == np.arange(4_000_000.0)).all()
    step()
tell(attempt(work))
"""
    + LEAVES
)

# For a given time.
ENDS = (
    MEETS
    + """
def work():
    more = np.zeros(1)
    end_s = time.monotonic() + SPAN
    while not more[0]:
        step()
        more[0] = rank == 0 and time.monotonic() > end_s
        dist.broadcast(more, 0)
tell(attempt(work))
"""
    + LEAVES
)


def start(places, script, count=10_000, **variables):
    """Start a rank at each of these hosts; the first one serves the store."""
    where = {"MASTER_ADDR": places[0].v4, "MASTER_PORT": str(PORT)}
    where |= {"UNISONO_HOST_TIMEOUT": str(LIMIT_S), "TORCHELASTIC_USE_AGENT_STORE": ""}
    script = script.replace("COUNT", str(count)).replace("SPAN", str(4 * LIMIT_S))
    return started([host.inside() for host in places], script, where | variables)


def begin(processes):
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
    tell(processes, "go")


def assert_lost(caught, ranks, since_s, limit_s=LIMIT_S):
    assert caught["kind"] == "PeerLostError", caught
    assert caught["peers"] == ranks, caught
    # Up to 2 looks more, and what a busy machine may add.
    assert limit_s / 2 < caught["ended_s"] - since_s < limit_s + 2 + NOTICE_S + BUSY_S


@pytest.mark.parametrize("engine", [*NATIVE_FIRST, pytest.param("mpi", marks=[OTHER, NO_MPI])])
def test_ranks_of_a_vanished_host_are_named_at_once_by_all_ranks(engine):
    with netns.Network(3) as network:
        first, second, third = network.hosts
        places = [first, second, third, third]
        with start(places, STEPS, UNISONO_ENGINE=engine) as processes:
            begin(processes)
            network.cut(third)
            cut_s = time.monotonic()
            told = ask(processes)
    for caught in told[:2]:
        assert_lost(caught, [2, 3], cut_s)
        assert "ranks 2 and 3 were lost: host 10.77.0.3 has acknowledged" in caught["text"]
        assert "hint: see whether that host runs" in caught["text"]
    for caught in told[2:]:
        assert caught["kind"] == "PeerLostError", caught
        assert set(caught["peers"]) <= {0, 1}, caught


@pytest.mark.parametrize("engine", NATIVE_FIRST)
def test_vanished_host_ends_a_receive_over_an_idle_connection(engine):
    with netns.Network(2) as network:
        first, second = network.hosts
        with start([first, second], RECEIVES, UNISONO_ENGINE=engine) as processes:
            begin(processes)
            network.cut(second)
            cut_s = time.monotonic()
            told = ask(processes)
    assert_lost(told[0], [1], cut_s)
    assert_lost(told[1], [0], cut_s)


@pytest.mark.parametrize("engine", REFERENCE_FIRST)
def test_stopped_rank_is_not_lost(engine):
    with (
        netns.Network(2) as network,
        start(network.hosts, SENDS, UNISONO_ENGINE=engine) as processes,
    ):
        for process in processes:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
        processes[1].send_signal(signal.SIGSTOP)
        tell(processes, "go")
        # The kernel of its host answers although the receive buffer is full.
        time.sleep(3 * LIMIT_S)
        processes[1].send_signal(signal.SIGCONT)
        told = ask(processes)
    for caught in told:
        assert (caught["kind"], caught["text"]) == ("", ""), caught


def test_idle_hosts_are_not_lost():
    with (
        netns.Network(2) as network,
        start(network.hosts, ENDS.replace("SPAN", "0"), UNISONO_ENGINE=NATIVE) as processes,
    ):
        for process in processes:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
        time.sleep(3 * LIMIT_S)
        tell(processes, "go")
        told = ask(processes)
    for caught in told:
        assert (caught["kind"], caught["text"]) == ("", ""), caught


@pytest.mark.whole("20 s of waiting")
@pytest.mark.parametrize("engine", ["reference", NATIVE])
def test_short_cut_is_a_delay(engine):
    with (
        netns.Network(2) as network,
        start(network.hosts, ENDS, UNISONO_ENGINE=engine) as processes,
    ):
        begin(processes)
        network.cut(network.hosts[1])
        time.sleep(LIMIT_S / 2)
        network.restore(network.hosts[1])
        told = ask(processes)
    for caught in told:
        assert (caught["kind"], caught["text"]) == ("", ""), caught


# Goes on with the ranks that are left.
REGROUPS = STEPS.replace(
    "tell(attempt(work))",
    """
def regroup():
    try:
        work()
    except dist.errors.PeerLostError:
        dist.reconfigure(timeout=300)
tell(attempt(regroup))
""",
)


@pytest.mark.whole("12 s of waiting")
def test_host_that_is_cut_from_the_quorum_does_not_wait_for_the_others():
    with netns.Network(3) as network, start(network.hosts, REGROUPS) as processes:
        begin(processes)
        network.cut(network.hosts[0])
        cut_s = time.monotonic()
        told = ask(processes)
    assert told[0]["kind"] == "RendezvousError", told
    assert "rank 0 cannot go on after generation 1 of 3 ranks" in told[0]["text"]
    assert told[0]["ended_s"] - cut_s < LIMIT_S + 2 + VANISHED_S + NOTICE_S + BUSY_S < AWAY_S
    # The store is on the first host.
    assert [each["kind"] for each in told[1:]] == ["StoreConnectionError"] * 2, told


WAITS_FOR_A_KEY = """
from unisono.core.stores import TCPStore
own = TCPStore(os.environ["MASTER_ADDR"], PORT, is_master=rank == 0, wait_for_workers=False)
own.add("here", 1)
print("ready", flush=True)
sys.stdin.readline()
tell(attempt(own.wait, ["never"], 40) if rank else attempt(time.sleep, 0.0))
"""


@pytest.mark.parametrize("engine", NATIVE_FIRST)
def test_wait_on_the_store_of_a_vanished_host_ends(engine):
    with netns.Network(2) as network:
        script = WAITS_FOR_A_KEY.replace("PORT", str(PORT)) + LEAVES
        with start(network.hosts, script, UNISONO_ENGINE=engine) as processes:
            begin(processes)
            network.cut(network.hosts[0])
            cut_s = time.monotonic()
            told = ask(processes)
    assert told[1]["kind"] == "StoreConnectionError", told
    assert "Host is down" in told[1]["text"]
    assert told[1]["ended_s"] - cut_s < LIMIT_S + 2 + BUSY_S


TRAINS = """
import sys, time
import numpy as np
import unisono as dist
from unisono.parallel import ElasticJob
dist.init_process_group()
job = ElasticJob({"w": np.zeros(4)})
while True:
    with job.step() as s:
        ones = np.ones(4)
        dist.all_reduce(ones)
        assert (ones == dist.get_world_size()).all(), ones
        s.commit()
    if dist.get_rank() == 0:
        print(time.monotonic(), dist.get_world_size(), flush=True)
    time.sleep(0.05)
"""

# From the cut to the next step, with the default limit.
NEXT_STEP_S = 15.0


@pytest.mark.whole("40 s of waiting")
@pytest.mark.parametrize("restart", ["all", "worker"])
@pytest.mark.parametrize(("lost", "left"), [(2, "2"), (0, "1")], ids=["one", "the others"])
def test_elastic_job_goes_on_soon_after_a_host_has_vanished(restart, lost, left, tmp_path):
    script = tmp_path / "trains.py"
    script.write_text(TRAINS)
    options = "--nnodes 1:3 --rdzv-backend c10d --rdzv-endpoint host1:29400 --max-restarts 8"
    words = ["run", *options.split(), "--rdzv-conf", "last_call_timeout=2", "-n", "1"]
    command = [sys.executable, "-m", "unisono", *words, "--restart", restart, str(script)]
    with netns.Network(3) as network:
        agents = [
            subprocess.Popen(
                host.inside(*command),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for host in network.hosts
        ]
        try:
            steps = (line.split() for line in agents[0].stdout)
            assert next(size for _, size in steps if size == "3")
            cut_s = time.monotonic()
            network.cut(network.hosts[lost])
            next_s = next(float(when_s) for when_s, size in steps if size == left)
        finally:
            for agent in agents:
                agent.terminate()
            for agent in agents:
                agent.wait(60.0)
                agent.stdout.close()
    assert next_s - cut_s < NEXT_STEP_S + BUSY_S
