"""Every row of docs/reference/launcher-events.md, with real agents and workers.

Each agent is on a host of its own, a network namespace, where these can be made.
"""

import itertools
import json
import os
import re
import signal

import pytest

from tests.support.launches import gone
from tests.support.nodes import CONF, LOSING, PATIENT, REDUCING, TELLING, WORKER, Job, by_rank

pytestmark = pytest.mark.linux("agents watch pidfds")


@pytest.fixture
def job(job_of):
    return job_of()


def places(*workers):
    ups = by_rank(itertools.chain(*workers))
    return [(up.rank, up.world_size, up.restart, up.total) for up in ups]


def full(size, restart):
    """Return the places of a world in which all ranks came up."""
    return [(rank, size, restart, size) for rank in range(size)]


def ended(*agents):
    return tuple(agent.ended() for agent in agents)


# --- a worker dies


@pytest.mark.parametrize("restarts", [3, pytest.param(20, marks=pytest.mark.whole("slow"))])
def test_worker_dies_on_one_node(job, restarts):
    agent = job.start("--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}")
    for restart in range(restarts):
        ups = agent.next_ups(2)
        assert places(ups) == full(2, restart)
        os.kill(ups[restart % 2].pid, signal.SIGKILL)
        agent.told(f"restart {restart + 1} of {restarts}")
    assert places(agent.next_ups(2)) == full(2, restarts)
    job.stop()
    assert agent.ended() == 0


def test_all_nodes_restart_together_and_restarts_are_counted_over_them(job):
    first, second, ups, others = job.pair("--max-restarts=2", nproc=2)
    assert places(ups, others) == full(4, 0)
    ranks = [up.rank for up in ups]
    for restart in (1, 2):
        os.kill((others, ups)[restart - 1][0].pid, signal.SIGKILL)
        before = ups + others
        ups, others = first.next_ups(2), second.next_ups(2)
        assert places(ups, others) == full(4, restart)
        assert gone([up.pid for up in before])
        assert [up.rank for up in ups] == ranks, "ranks stay on their nodes"
    os.kill(ups[0].pid, signal.SIGKILL)
    for agent in (first, second):
        assert agent.ended() == 128 + signal.SIGKILL
        # The same verdict on both nodes, wherever the worker ran.
        assert f"first failure: rank {ups[0].rank} (pid {ups[0].pid}, " in agent.err
        assert "was killed by SIGKILL" in agent.err.splitlines()[-1]
    assert second.err.count("restart 1 of 2") == 1


STEPPING = """
import os, time
import numpy as np
import unisono as dist
from unisono.errors import StepAborted
dist.init_process_group(timeout=120)
env, fresh = os.environ, True
stop = np.zeros(2)
while not stop[0]:
    try:
        with dist.step() as s:
            stop[:] = os.path.exists(os.path.join(os.path.dirname(__file__), "stop")), 1
            dist.all_reduce(stop)
            s.commit()
        if fresh:
            print("up", dist.get_rank(), dist.get_world_size(), env["GROUP_RANK"],
                  env["TORCHELASTIC_RESTART_COUNT"], os.getpid(), int(stop[1]), flush=True)
        fresh = s.changed
        time.sleep(0.03)
    except StepAborted:
        fresh = True
    if fresh:
        dist.reconfigure(min_size=int(env["WORLD_SIZE"]))
"""


def test_worker_is_replaced_and_the_workers_of_all_nodes_go_on(job_of):
    job = job_of(STEPPING)
    first, second, ups, others = job.pair("--max-restarts=2", "--restart=worker", nproc=2)
    killed = others[0]
    os.kill(killed.pid, signal.SIGKILL)
    second.told("replacement 1 of 2")
    after = first.next_ups(2) + second.next_ups(2)
    before = [up.pid for up in (*ups, *others) if up is not killed]
    # The survivors keep their processes and their order, and the replacement comes last.
    assert [up.pid for up in sorted(after, key=lambda up: up.rank)][:3] == sorted(
        before, key=[up.pid for up in by_rank([*ups, *others])].index
    )
    assert {(up.world_size, up.restart, up.total) for up in after} == {(4, 0, 4)}
    assert max(after, key=lambda up: up.rank).node == killed.node
    job.stop()
    assert ended(first, second) == (0, 0)


def test_worker_dies_and_no_restart_is_left(job_of):
    job = job_of("import os, signal\nassert os.environ['RANK'] != '1'\nsignal.pause()\n")
    agents = [job.node(f"--error-json=e{i}.json") for i in range(2)]
    for number, agent in enumerate(agents):
        assert agent.ended() == 1
        assert agent.err.splitlines()[-1].endswith("AssertionError")
        assert re.search(
            r"first failure: rank 1 \(pid \d+, host \S+\) exited with code 1", agent.err
        )
        report = json.loads((job.folder / f"e{number}.json").read_text())
        failure = report["failures"][0]
        assert (report["exit_code"], failure["rank"], failure["exit_code"]) == (1, 1, 1)
        assert failure["traceback"].startswith("Traceback (most recent call last):")
        assert failure["exception"] == "AssertionError"


def test_crash_in_native_code_shows_the_python_stack(job_of):
    job = job_of("import ctypes\ndef crash():\n    ctypes.string_at(0)\ncrash()\n")
    agent = job.start("--standalone", "--error-json=e.json")
    assert agent.ended() == 128 + signal.SIGSEGV
    assert "was killed by SIGSEGV" in agent.err
    assert 'worker.py", line 4 in <module>\n' in agent.err
    last = "its traceback is above: Fatal Python error: Segmentation fault"
    assert agent.err.splitlines()[-1].endswith(last)
    report = json.loads((job.folder / "e.json").read_text())
    [failure] = report["failures"]
    assert (report["exit_code"], failure["signal"]) == (139, "SIGSEGV")
    assert failure["exception"] == "Fatal Python error: Segmentation fault"


def test_worker_that_only_reports_a_lost_peer_counts_in_the_end(job_of):
    lost = (
        "class PeerLostError(Exception): pass\n"
        "if key == '0' and env['RANK'] == '1':\n"
        "    raise PeerLostError('somebody')\n"
    )
    job = job_of(WORKER.replace("while not", f"{lost}while not"))
    first, second, _, _ = job.pair("--max-restarts=1")
    assert places(first.next_ups(1), second.next_ups(1)) == full(2, 1)
    job.stop()
    assert ended(first, second) == (0, 0)


def test_worker_that_cannot_be_started(job):
    conf = f"{CONF},last_call_timeout=1"
    first = job.node(nnodes="1:2", conf=f"{conf},is_host=1")
    # The worker's file is no program.
    second = job.node("--no-python", nnodes="1:2", conf=f"{conf},is_host=0")
    assert second.ended() == 1
    assert re.search(r"cannot start rank [01] \(.*worker.py\): .*Permission denied", second.err)
    # The other one goes on without that node.
    first.until(lambda: "up 0 1 0 0 " in first.out, "world of one")
    job.stop()
    assert first.ended() == 0


# --- an agent dies


def test_agent_dies(job_of):
    """Four jobs at a time, because a lost node is noticed after some seconds."""
    job = job_of(REDUCING, "goes on")
    first, second, _, others = job.pair(nnodes="1:2", conf=LOSING)
    second.send_signal(signal.SIGKILL)
    few = job_of(name="too few").pair(conf=LOSING)
    few[1].send_signal(signal.SIGKILL)
    again = job_of(name="replaced")
    stays, leaves, _, _ = again.pair("--max-restarts=1", conf=LOSING)
    leaves.send_signal(signal.SIGKILL)
    # A store in a file has no host that could die.
    shared = job_of(name="file")
    options = {"conf": f"{LOSING},store_type=file", "endpoint": shared.folder / "meeting"}
    dying, alone = (shared.node(nnodes="1:2", **options) for _ in range(2))
    dying.next_ups(1), alone.next_ups(1)
    dying.send_signal(signal.SIGKILL)

    comes = again.node("--max-restarts=1", conf=f"{CONF},is_host=0")
    assert places(stays.next_ups(1), comes.next_ups(1)) == full(2, 0)
    # A lost node costs no restart: --max-restarts is 0 here.
    assert gone([others[0].pid])
    assert places(first.next_ups(1)) == places(alone.next_ups(1)) == full(1, 0)
    for each in (job, again, shared):
        each.stop()
    assert ended(first, stays, comes, alone) == (0, 0, 0, 0)
    assert few[0].ended() == 1
    assert "was lost" in few[0].err
    assert "1 of at least 2 nodes left, and --max-restarts is 0" in few[0].err


# --- a node joins


def test_node_joins_a_full_job_and_waits_as_a_spare(job):
    first, second, _, _ = job.pair("--max-restarts=1")
    spare = job.node("--max-restarts=1", conf=f"{CONF},is_host=0")
    other = job.node("--max-restarts=1", nnodes="2:3", conf=f"{CONF},is_host=0")
    assert other.ended() == 1
    assert "was started with --nnodes 2:3 --max-restarts 1, but the job runs with" in other.err
    second.send_signal(signal.SIGTERM)
    assert second.ended() == 128 + signal.SIGTERM
    assert places(first.next_ups(1), spare.next_ups(1)) == full(2, 0)
    job.stop()
    assert ended(first, spare) == (0, 0)


# --- a node leaves


@pytest.mark.parametrize("leaver", [0, 1], ids=["host of the store", "other"])
def test_node_leaves_and_comes_back(job, leaver):
    first, second, _, _ = job.pair(nnodes="1:2")
    leaving, staying = (first, second) if leaver == 0 else (second, first)
    leaving.send_signal(signal.SIGTERM)
    assert places(staying.next_ups(1)) == full(1, 0)
    if leaver == 0:
        # The others still need its store.
        leaving.told("serving the rendezvous for")
    else:
        assert leaving.ended() == 128 + signal.SIGTERM
    again = job.node(nnodes="1:2", conf=f"{PATIENT},is_host=0")
    assert places(staying.next_ups(1), again.next_ups(1)) == full(2, 0)
    assert "workers were stopped: node" in staying.err
    job.stop()
    assert ended(staying, again, leaving) == (0, 0, 128 + signal.SIGTERM)


UP = "print('up', os.environ['RANK'], 2, 0, 0, os.getpid(), 0, flush=True)\n"


def test_nodes_that_are_done_wait_for_the_others(job_of):
    # Rank 1 goes on alone for a while; the node of rank 0, which has the store, must stay.
    job = job_of(f"import os\n{UP}if os.environ['RANK'] == '1': open('fifo').read()\n")
    os.mkfifo(job.folder / "fifo")
    first, second, ups, others = job.pair()
    fast, slow = (first, second) if ups[0].rank == 0 else (second, first)
    assert gone([(ups + others)[0 if fast is first else 1].pid])
    assert fast.is_running()
    (job.folder / "fifo").write_text("go")
    assert ended(slow, fast) == (0, 0)


# --- signals

DEAF = "for name in ('SIGINT', 'SIGTERM'): signal.signal(getattr(signal, name), signal.SIG_IGN)\n"


@pytest.mark.parametrize("deaf", ["", DEAF], ids=["", "grace ends"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_on_every_node(job_of, signum, deaf):
    job = job_of(f"import os, signal\n{deaf}{UP}while True: signal.pause()\n")
    first, second, ups, others = job.pair(f"--grace={0.2 if deaf else 60}")
    for agent in (first, second):
        agent.send_signal(signum)
    assert ended(first, second) == (128 + signum, 128 + signum)
    assert gone([up.pid for up in ups + others])


def test_second_ctrl_c_ends_even_the_host_of_the_store(job):
    first, second, _, _ = job.pair(nnodes="1:2")
    first.send_signal(signal.SIGINT)
    first.told("a second signal ends that")
    # Of another kind: two equal ones in a row may be one that went to all processes.
    first.send_signal(signal.SIGTERM)
    assert first.ended() == 130
    assert second.ended() == 1
    assert "the rendezvous store is gone" in second.err


def test_ctrl_c_while_waiting_for_others(job):
    agent = job.node(patches=TELLING)
    agent.told("waiting for other nodes: 1 of at least 2 came (")
    agent.send_signal(signal.SIGINT)
    assert agent.ended() == 130


STOPPING = """
import os, sys
import numpy as np
import unisono as dist
from unisono.beyond.preemption import should_stop
dist.init_process_group(timeout=120)
assert not should_stop()
env = os.environ
print("up", env["RANK"], env["WORLD_SIZE"], env["GROUP_RANK"], 0, os.getpid(), 0, flush=True)
step = 0
while not should_stop():
    step += 1
print("stopped", step, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_on_one_node_stops_all_ranks_at_the_same_step(job_of, signum):
    first, second, _, _ = job_of(STOPPING).pair("--grace=30", nproc=2, conf=PATIENT)
    second.send_signal(signum)
    assert ended(first, second) == (0, 0), first.err + second.err
    if signum == signal.SIGTERM:
        assert "stopped by SIGTERM" in second.err
    steps = re.findall(r"stopped (\d+)", first.out + second.out)
    assert len(steps) == 4
    assert len(set(steps)) == 1


# --- the host of the store dies


def test_host_of_the_store_dies(job):
    first, second, ups, others = job.pair(nnodes="1:2")
    first.send_signal(signal.SIGKILL)
    assert second.ended() == 1
    assert "the rendezvous store is gone" in second.err
    assert job.endpoint in second.err
    assert gone([up.pid for up in ups + others])


# --- nobody comes


def test_nobody_comes(job):
    # The time runs from the moment at which the node joins.
    agent = job.node(conf=f"{CONF},join_timeout=0.2")
    assert agent.ended() == 1
    assert "timed out after 0.2 s: 1 of at least 2 nodes came" in agent.err


def test_no_rendezvous_at_the_endpoint(job):
    agent = job.node(conf=f"{CONF},join_timeout=0.5,is_host=0")
    assert agent.ended() == 1
    assert f"no rendezvous at {job.endpoint} within 0.5 s" in agent.err


def test_a_node_with_another_token_is_told_what_to_set(tmp_path):
    one, two = (Job(tmp_path, UNISONO_TOKEN=token) for token in ("one", "two"))
    with one, two:
        one.node(conf=f"{PATIENT},is_host=1")
        agent = two.node(conf=f"{PATIENT},is_host=0", endpoint=one.endpoint)
        assert agent.ended() == 1
    assert "it has another token than this client (UNISONO_TOKEN has to be the same" in agent.err


def test_client_that_the_store_refuses_is_told(job_of, hosts):
    if not hosts:
        pytest.skip("on one host everybody is let in")
    # Torch's clients know no token.
    job = job_of(WORKER.replace("env = os.environ", "env = os.environ\ndel env['UNISONO_TOKEN']"))
    # The node that comes first has rank 0 and serves the workers' store.
    first = job.node(conf=f"{PATIENT},is_host=1", patches=TELLING)
    first.told("1 of at least 2 came")
    job.node(conf=f"{PATIENT},is_host=0")
    first.told("it is on another machine and has no token; give it the job's token, UNISONO_TOKEN;")
    first.told("or UNISONO_INSECURE=1 here accepts any client")


# --- static rendezvous


def test_static_nodes_restart_on_the_same_port(job):
    host, port = job.endpoint.split(":")
    where = (f"--master-addr={host}", f"--master-port={port}")
    flags = ["--nnodes=2", *where, f"--rdzv-conf={CONF}", "--max-restarts=1"]
    first = job.start(*flags, "--node-rank=0")
    second = job.start(*flags, "--node-rank=1")
    [up], [other] = first.next_ups(1), second.next_ups(1)
    assert (up.rank, other.rank) == (0, 1)
    third = job.start(*flags, "--node-rank=1")
    assert third.ended() == 1
    assert "is taken by host" in third.err
    os.kill(up.pid, signal.SIGKILL)
    assert places(first.next_ups(1), second.next_ups(1)) == full(2, 1)
    job.stop()
    assert ended(first, second) == (0, 0)


TORCH = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
env = os.environ
print("up", env["RANK"], env["WORLD_SIZE"], env["GROUP_RANK"], env["TORCHELASTIC_RESTART_COUNT"],
      os.getpid(), int(x[0]), flush=True)
dist.barrier()
if env["TORCHELASTIC_RESTART_COUNT"] == "0" and env["RANK"] == "1":
    os._exit(3)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.whole("loads torch four times")
def test_torch_script_restarts_on_several_nodes(job_of):
    pytest.importorskip("torch")
    # Torch's clients know no token, so the store has to be open to those on other hosts.
    job = job_of(TORCH, GLOO_SOCKET_IFNAME="eth0", UNISONO_INSECURE="1")
    first, second, _, _ = job.pair("--max-restarts=1")
    assert places(first.next_ups(1), second.next_ups(1)) == full(2, 1)
    assert ended(first, second) == (0, 0)
