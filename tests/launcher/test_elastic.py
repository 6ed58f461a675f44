"""`unisono run --restart worker` on nodes that come and go; each agent is on a host of its own."""

import os
import re
import signal

import pytest

from tests.support import netns, services
from tests.support.launches import gone
from tests.support.nodes import LOSING, Job, by_rank
from tests.support.services import KINDS

pytestmark = pytest.mark.linux("agents watch pidfds")

# Reports each generation with the sum over its ranks of 1, until the file `stop` appears.
SCRIPT = """
import os, time
import numpy as np
import unisono as dist
from unisono.errors import PeerLostError, StepAborted, StoreConnectionError
here = os.path.dirname(__file__)
dist.init_process_group(timeout=120)
env, fresh = os.environ, True
state = {"steps": np.zeros(1)}
stop = np.zeros(2)
while not stop[0]:
    try:
        if fresh:
            dist.sync_state(state)
        with dist.step() as s:
            stop[:] = os.path.exists(os.path.join(here, "stop")), 1
            dist.all_reduce(stop)
            s.commit()
        state["steps"] += 1
        if fresh:
            print("up", dist.get_rank(), dist.get_world_size(), env["GROUP_RANK"],
                  env["TORCHELASTIC_RESTART_COUNT"], os.getpid(), int(stop[1]), flush=True)
        fresh = s.changed
        time.sleep(0.03)
    except (StepAborted, PeerLostError, StoreConnectionError):
        fresh = True
        LOST
    if fresh:
        dist.reconfigure()
print("ended", env["RANK"], int(state["steps"][0]), flush=True)
"""
GOES_ON = SCRIPT.replace("LOST", "")


def flags(serves, conf):
    return ["--restart=worker"], {"nnodes": "1:2", "conf": f"{LOSING},is_host={serves},{conf}"}


def begin(job, *more, nproc=2):
    """Start a job of the agent that serves the store; return it and its workers."""
    words, options = flags(1, "last_call_timeout=0.1")
    first = job.node(*words, *more, nproc=nproc, **options)
    return first, first.next_ups(nproc)


def add(job, *more, nproc=1):
    """Start an agent that joins the running job."""
    words, options = flags(0, "close_timeout=30")
    return job.node(*words, *more, nproc=nproc, **options)


def sizes(ups):
    return sorted((up.rank, up.world_size, up.restart, up.total) for up in ups)


def world_of(size, *nodes):
    """Wait until the workers of (agent, number of workers) are in one world of a size.

    The workers of one node need not be taken in at once.
    """
    found = []
    for agent, count in nodes:
        there = {}
        while len(there) < count:
            [up] = agent.next_ups(1)
            if up.world_size == size:
                there[up.pid] = up
        found += by_rank(there.values())
    assert sizes(found) == full(size)
    return found


def full(size):
    return [(rank, size, 0, size) for rank in range(size)]


def pids(ups):
    return [up.pid for up in ups]


def test_nodes_join_and_leave_while_the_other_workers_go_on(job_of):
    job = job_of(GOES_ON)
    first, ups = begin(job)
    assert sizes(ups) == full(2)
    second = add(job)
    *both, new = world_of(3, (first, 2), (second, 1))
    assert pids(both) == pids(by_rank(ups))
    assert (new.rank, new.node) == (2, 1)
    first.told("node host2 joined" if job.has_hosts else "joined")
    # A third node has no room, until the agent of the second is killed.
    third = add(job)
    third.told("there is no place now")
    os.kill(second.inner(), signal.SIGKILL)
    assert pids(world_of(2, (first, 2))) == pids(both)
    *both, newer = world_of(3, (first, 2), (third, 1))
    assert pids(both) == pids(by_rank(ups))
    assert newer.node == 2, "no group rank is given twice"
    third.send_signal(signal.SIGTERM)
    assert third.ended() == 128 + signal.SIGTERM
    assert gone([new.pid, newer.pid])
    assert pids(world_of(2, (first, 2))) == pids(both)
    first.told("left (SIGTERM)")
    job.stop()
    assert first.ended() == 0
    ended = [line.split()[1:] for line in first.out.splitlines() if line.startswith("ended")]
    assert sorted(rank for rank, _ in ended) == ["0", "1"]
    assert len({steps for _, steps in ended}) == 1


def test_the_node_that_serves_the_store_leaves_and_the_others_go_on(job_of):
    job = job_of(GOES_ON)
    first, _ = begin(job, nproc=1)
    second = add(job, nproc=2)
    ups = world_of(3, (first, 1), (second, 2))
    first.send_signal(signal.SIGTERM)
    assert pids(world_of(2, (second, 2))) == pids(ups[1:])
    assert first.is_running(), "its agent serves the store"
    job.stop()
    assert (second.ended(), first.ended()) == (0, 128 + signal.SIGTERM)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("last_act", ["", "break"])
def test_without_the_stores_host_workers_finish_what_needs_no_store(job_of, last_act):
    job = job_of(SCRIPT.replace("LOST", f"print('saved', flush=True)\n        {last_act}"))
    first, _ = begin(job, nproc=1)
    second = add(job, nproc=2)
    world_of(3, (first, 1), (second, 2))
    os.kill(first.inner(), signal.SIGKILL)
    assert second.ended() == 1
    assert second.out.count("saved") == 2
    assert "the rendezvous store is gone" in second.err
    assert "; the workers go on until they need it" in second.err
    assert ("StoreConnectionError" in second.err.split("until they need it")[1]) is not bool(
        last_act
    )
    assert second.out.count("ended") == (2 if last_act else 0)
    first.ended()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", KINDS)
def test_with_a_service_ranks_go_on_without_the_first_node(tmp_path, kind):
    with (
        services.server_of(kind, tmp_path) as server,
        Job(tmp_path / "job", GOES_ON) as job,
    ):
        options = {"nnodes": "1:2", "conf": f"{LOSING},last_call_timeout=0.1"}
        words = ["--restart=worker", f"--rdzv-backend={kind}", "--rdzv-id=a b/c"]
        words += [f"--rdzv-endpoint=127.0.0.1:{server.port}"]
        first = job.node(*words, nproc=1, **options)
        first.next_ups(1)
        second = job.node(*words, nproc=2, **options)
        ups = world_of(3, (first, 1), (second, 2))
        os.kill(first.inner(), signal.SIGKILL)
        first.ended()
        assert pids(world_of(2, (second, 2))) == pids(ups[1:])
        third = job.node(*words, nproc=1, **options)
        assert pids(world_of(3, (second, 2), (third, 1))[:2]) == pids(ups[1:])
        job.stop()
        assert (second.ended(), third.ended()) == (0, 0)


def test_a_job_that_ends_does_not_need_the_nodes_that_wait(job_of):
    # No rank calls `reconfigure`.
    job = job_of(GOES_ON.replace("if fresh:\n        dist.", "if False:\n        dist."))
    first, _ = begin(job)
    second = add(job)
    first.told("joined")
    job.stop()
    assert (first.ended(), second.ended()) == (0, 0)
    assert "up" not in second.out


def test_nodes_that_wait_begin_anew_if_all_others_leave(job_of):
    job = job_of(GOES_ON.replace("if fresh:\n        dist.", "if False:\n        dist."))
    first, _ = begin(job)
    second = add(job)
    first.told("joined")
    first.send_signal(signal.SIGTERM)
    world_of(1, (second, 1))
    job.stop()
    assert (second.ended(), first.ended()) == (0, 128 + signal.SIGTERM)


def test_the_others_begin_anew_if_a_node_is_lost_before_the_ranks_met(job_of):
    stays_away = """
if os.environ["GROUP_RANK"] == "1":
    print("is away", flush=True)
    time.sleep(300)
dist.init"""
    job = job_of(GOES_ON.replace("dist.init", stays_away.lstrip("\n"), 1))
    words, options = flags(1, "last_call_timeout=60")
    first = job.node(*words, nproc=2, **options)
    second = add(job)
    second.lines(1, "is away")
    os.kill(second.inner(), signal.SIGKILL)
    assert sizes(by_rank(first.next_ups(2))) == full(2)
    first.told("before the ranks met")
    job.stop()
    assert first.ended() == 0


def test_replacements_on_all_nodes_have_one_budget(job_of):
    job = job_of(GOES_ON)
    first, _ = begin(job, "--max-restarts=2")
    second = add(job, "--max-restarts=2")
    ups = world_of(3, (first, 2), (second, 1))
    # The only worker of its node; the ranks of the other node keep the state.
    os.kill(ups[2].pid, signal.SIGKILL)
    second.told("replacement 1 of 2")
    ups = world_of(3, (first, 2), (second, 1))
    os.kill(ups[1].pid, signal.SIGKILL)
    first.told("replacement 2 of 2")
    *_, last = world_of(3, (first, 2), (second, 1))
    os.kill(last.pid, signal.SIGKILL)
    for agent in (first, second):
        assert agent.ended() == 128 + signal.SIGKILL
        assert f"(pid {last.pid}, " in agent.err.split("first failure: rank 2 ")[1]


@pytest.mark.whole("the rules are those of one node, which tests/launcher/test_replace.py has")
def test_a_script_that_does_not_reconfigure_ends_with_the_cause(job_of):
    raises = GOES_ON.replace("fresh = True\n        \n", "raise\n")
    # Otherwise a worker that is killed in a commit is no error of the others.
    job = job_of(raises.replace("fresh = s.changed", "fresh = False"))
    words, options = flags(1, "last_call_timeout=60")
    first = job.node(*words, "--max-restarts=1", nproc=2, **options)
    words, options = flags(0, "last_call_timeout=60")
    second = job.node(*words, "--max-restarts=1", **options)
    *_, killed = world_of(3, (first, 2), (second, 1))
    os.kill(killed.pid, signal.SIGKILL)
    second.told("replacement 1 of 1")
    for agent in (first, second):
        assert agent.ended() == 128 + signal.SIGKILL
        assert f"rank 2 (pid {killed.pid}, " in agent.err.split("first failure: ")[1]


@pytest.mark.whole("waits for missing heartbeats, twice")
def test_a_node_whose_agent_stood_still_joins_again(job_of):
    job = job_of(GOES_ON)
    first, _ = begin(job)
    second = add(job)
    *both, old = world_of(3, (first, 2), (second, 1))
    agent = second.inner()
    os.kill(agent, signal.SIGSTOP)
    first.told("was lost (no heartbeat")
    os.kill(agent, signal.SIGCONT)
    *after, new = world_of(3, (first, 2), (second, 1))
    assert pids(after) == pids(both)
    assert new.pid != old.pid
    # On a busy host it may be lost and come back more than once.
    assert new.node > old.node
    assert gone([old.pid])
    job.stop()
    assert (first.ended(), second.ended()) == (0, 0)


@pytest.mark.whole("a request over a dead link takes its time-out")
@pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not()))
def test_the_others_go_on_without_a_host_that_is_cut_off(job_of):
    with netns.Network(2) as network:
        # A request to a store behind a dead link takes the whole time-out.
        job = job_of(GOES_ON.replace("timeout=120", "timeout=15"), hosts=network.hosts)
        first, _ = begin(job)
        second = add(job)
        ups = world_of(3, (first, 2), (second, 1))
        network.cut(network.hosts[1])
        assert pids(world_of(2, (first, 2))) == pids(ups[:2])
        first.told("was lost (no heartbeat")
        # The other side cannot make a second world, and reports the store.
        assert second.ended() == 1
        assert "the rendezvous store is gone" in second.err
        report = second.err.split("first failure: rank 2 ")[1]
        assert re.search(r"Store(Connection|Timeout)Error: .* at host1:", report)
        job.stop()
        assert first.ended() == 0
