"""Every row of docs/reference/launcher-events.md, with real agents and workers.

Each agent is on a host of its own, a network namespace, where these can be made.
"""

import json
import os
import re
import signal
import sys

import pytest

from tests.support import netns
from tests.support.nodes import CONF, LOSING, PATIENT, WORKER, Job, gone, kill

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="agents watch pidfds")


@pytest.fixture(scope="module")
def hosts():
    """As many hosts as a test has agents; none where there can be only this one."""
    if netns.why_not() is not None:
        yield []
        return
    with netns.Network(3) as network:
        yield network.hosts


@pytest.fixture
def job(tmp_path, hosts):
    """A job whose workers reduce until the file `stop` appears."""
    job = Job(tmp_path, hosts=hosts)
    yield job
    job.close()


@pytest.fixture
def job_of(tmp_path, hosts):
    """A job with a worker script of its own."""
    jobs = []

    def make(script, **if_on_hosts):
        variables = if_on_hosts if hosts else {}
        jobs.append(Job(tmp_path, script, hosts=hosts, variables=variables))
        return jobs[-1]

    yield make
    for each in jobs:
        each.close()


def pair(job, *flags, nnodes="2", nproc=1, loses=False):
    """Two agents, the first of which has the store, and their first world."""
    host = f"{PATIENT},{LOSING}" if loses else PATIENT
    confs = f"{host},is_host=1", f"{PATIENT},is_host=0"
    first, second = (job.node(*flags, nnodes=nnodes, nproc=nproc, conf=conf) for conf in confs)
    return first, second, first.next_ups(nproc), second.next_ups(nproc)


def places(ups):
    return [(up.rank, up.world_size, up.restart, up.total) for up in ups]


# --- a worker dies


def test_worker_dies_on_one_node(job):
    agent = job.start("--standalone", "--nproc-per-node=2", "--max-restarts=2")
    for restart in (0, 1, 2):
        ups = agent.next_ups(2)
        assert places(ups) == [(0, 2, restart, 2), (1, 2, restart, 2)]
        if restart < 2:
            kill(ups[1].pid)
            agent.told(f"restart {restart + 1} of 2")
    job.stop()
    assert agent.finish() == 0


def test_twenty_workers_die_in_a_row(job_of):
    job = job_of(
        "import os, signal\n"
        "env = os.environ\n"
        "print('up', env['RANK'], 2, 0, env['TORCHELASTIC_RESTART_COUNT'], os.getpid(), 0,"
        " flush=True)\n"
        "if env['TORCHELASTIC_RESTART_COUNT'] != '20':\n    signal.pause()\n"
    )
    agent = job.start("--standalone", "--nproc-per-node=2", "--max-restarts=20")
    for restart in range(20):
        ups = agent.next_ups(2)
        assert [up.restart for up in ups] == [restart, restart]
        kill(ups[restart % 2].pid)
    assert [up.restart for up in agent.next_ups(2)] == [20, 20]
    assert agent.finish() == 0


def test_worker_dies_and_all_nodes_restart_once(job):
    first, second, ups, others = pair(job, "--max-restarts=1", nproc=2)
    assert places(sorted(ups + others, key=lambda up: up.rank)) == [
        (rank, 4, 0, 4) for rank in range(4)
    ]
    kill(others[0].pid)
    again = sorted(first.next_ups(2) + second.next_ups(2), key=lambda up: up.rank)
    assert places(again) == [(rank, 4, 1, 4) for rank in range(4)]
    assert gone([up.pid for up in ups + others])
    # Ranks stay on their nodes.
    assert [up.rank for up in ups] == [up.rank for up in again if up.node == ups[0].node]
    job.stop()
    assert (first.finish(), second.finish()) == (0, 0)
    assert second.err.count("restart 1 of 1") == 1


def test_restarts_are_counted_over_all_nodes(job):
    first, second, ups, others = pair(job, "--max-restarts=2")
    kill(ups[0].pid)
    ups, others = first.next_ups(1), second.next_ups(1)
    kill(others[0].pid)
    ups, others = first.next_ups(1), second.next_ups(1)
    assert {up.restart for up in ups + others} == {2}
    kill(ups[0].pid)
    for agent in (first, second):
        assert agent.finish() == 128 + signal.SIGKILL
        # The same verdict on both nodes, wherever the worker ran.
        assert f"first failure: rank {ups[0].rank} (pid {ups[0].pid}, " in agent.err
        assert "was killed by SIGKILL" in agent.err.splitlines()[-1]


def test_worker_dies_and_no_restart_is_left(job_of):
    script = WORKER.replace(
        "stop = np", "assert env['RANK'] != '1' or env['LOCAL_RANK'] != '0'\nstop = np"
    )
    job = job_of(script)
    reports = []
    agents = [job.node(f"--error-json={job.folder}/e{i}.json") for i in range(2)]
    for number, agent in enumerate(agents):
        assert agent.finish() == 1
        assert agent.err.splitlines()[-1] == "AssertionError"
        assert re.search(
            r"first failure: rank 1 \(pid \d+, host \S+\) exited with code 1", agent.err
        )
        reports.append(json.loads((job.folder / f"e{number}.json").read_text()))
    for report in reports:
        failure = report["failures"][0]
        assert (report["exit_code"], failure["rank"], failure["exit_code"]) == (1, 1, 1)
        assert failure["traceback"].startswith("Traceback (most recent call last):")
        assert failure["exception"] == "AssertionError"


def test_crash_in_native_code_shows_the_python_stack(job_of):
    job = job_of("import ctypes\ndef crash():\n    ctypes.string_at(0)\ncrash()\n")
    agent = job.start("--standalone", f"--error-json={job.folder}/e.json")
    assert agent.finish() == 128 + signal.SIGSEGV
    assert "was killed by SIGSEGV" in agent.err
    assert agent.err.splitlines()[-1].endswith('worker.py", line 4 in <module>')
    report = json.loads((job.folder / "e.json").read_text())
    [failure] = report["failures"]
    assert (report["exit_code"], failure["signal"]) == (139, "SIGSEGV")
    assert failure["exception"] == "Fatal Python error: Segmentation fault"


def test_worker_that_only_reports_a_lost_peer_counts_in_the_end(job_of):
    job = job_of(
        WORKER.replace(
            "stop = np",
            "class PeerLostError(Exception): pass\n"
            "if env['TORCHELASTIC_RESTART_COUNT'] == '0' and env['RANK'] == '1':\n"
            "    raise PeerLostError('somebody')\n"
            "stop = np",
        )
    )
    first, second, _, _ = pair(job, "--max-restarts=1")
    ups = sorted(first.next_ups(1) + second.next_ups(1), key=lambda up: up.rank)
    assert places(ups) == [(0, 2, 1, 2), (1, 2, 1, 2)]
    job.stop()
    assert (first.finish(), second.finish()) == (0, 0)


def test_worker_that_cannot_be_started(job):
    conf = f"{CONF},last_call_timeout=1"
    first = job.node(nnodes="1:2", conf=f"{conf},is_host=1")
    # The worker's file is no program.
    second = job.node("--no-python", nnodes="1:2", conf=f"{conf},is_host=0")
    assert second.finish() == 1
    assert re.search(r"cannot start rank [01] \(.*worker.py\): .*Permission denied", second.err)
    # The other one goes on without that node.
    first.until(lambda: "up 0 1 0 0 " in first.out, "world of one")
    job.stop()
    assert first.finish() == 0


# --- an agent dies


def test_agent_dies_and_the_others_go_on_without_it(job):
    first, second, _, others = pair(job, nnodes="1:2", loses=True)
    second.popen.kill()
    assert gone([others[0].pid], limit_s=30.0)
    [up] = first.next_ups(1)
    # A lost node costs no restart: --max-restarts is 0 here.
    assert places([up]) == [(0, 1, 0, 1)]
    job.stop()
    assert first.finish() == 0


def test_agent_dies_and_too_few_are_left(job):
    first, second, _, _ = pair(job, loses=True)
    second.popen.kill()
    assert first.finish() == 1
    assert "was lost" in first.err
    assert "1 of at least 2 nodes left, and --max-restarts is 0" in first.err


def test_agent_dies_and_a_new_one_takes_its_place(job):
    first, second, _, _ = pair(job, "--max-restarts=1", loses=True)
    second.popen.kill()
    third = job.node("--max-restarts=1", conf=f"{CONF},is_host=0")
    ups = sorted(first.next_ups(1) + third.next_ups(1), key=lambda up: up.rank)
    assert places(ups) == [(0, 2, 0, 2), (1, 2, 0, 2)]
    job.stop()
    assert (first.finish(), third.finish()) == (0, 0)


# --- a node joins


def test_node_joins(job):
    first = job.node(nnodes="1:2")
    assert places(first.next_ups(1)) == [(0, 1, 0, 1)]
    second = job.node(nnodes="1:2")
    ups = sorted(first.next_ups(1) + second.next_ups(1), key=lambda up: up.rank)
    assert places(ups) == [(0, 2, 0, 2), (1, 2, 0, 2)]
    assert "workers were stopped: node" in first.err
    job.stop()
    assert (first.finish(), second.finish()) == (0, 0)


def test_node_joins_a_full_job_and_waits_as_a_spare(job):
    first, second, _, _ = pair(job, "--max-restarts=1")
    third = job.node("--max-restarts=1", conf=f"{CONF},is_host=0")
    second.popen.send_signal(signal.SIGTERM)
    assert second.finish() == 128 + signal.SIGTERM
    ups = sorted(first.next_ups(1) + third.next_ups(1), key=lambda up: up.rank)
    assert places(ups) == [(0, 2, 0, 2), (1, 2, 0, 2)]
    job.stop()
    assert (first.finish(), third.finish()) == (0, 0)


def test_node_with_other_limits_is_refused(job):
    first, second, _, _ = pair(job)
    third = job.node(nnodes="2:3", conf=f"{CONF},is_host=0")
    assert third.finish() == 1
    assert "was started with --nnodes 2:3 --max-restarts 0, but the job runs with" in third.err
    job.stop()
    assert (first.finish(), second.finish()) == (0, 0)


# --- a node leaves


@pytest.mark.parametrize("leaver", [0, 1], ids=["host of the store", "other"])
def test_node_leaves_and_comes_back(job, leaver):
    first, second, _, _ = pair(job, nnodes="1:2")
    leaving, staying = (first, second) if leaver == 0 else (second, first)
    leaving.popen.send_signal(signal.SIGTERM)
    assert places(staying.next_ups(1)) == [(0, 1, 0, 1)]
    if leaver == 0:
        # The others still need its store.
        leaving.told("serving the rendezvous for")
    else:
        assert leaving.finish() == 128 + signal.SIGTERM
    again = job.node(nnodes="1:2", conf=f"{PATIENT},is_host=0")
    ups = sorted(staying.next_ups(1) + again.next_ups(1), key=lambda up: up.rank)
    assert places(ups) == [(0, 2, 0, 2), (1, 2, 0, 2)]
    job.stop()
    assert (staying.finish(), again.finish()) == (0, 0)
    assert leaving.finish() == 128 + signal.SIGTERM


def test_nodes_that_are_done_wait_for_the_others(job_of):
    # Rank 1 goes on alone for a while; the node of rank 0, which has the store, must stay.
    job = job_of(
        "import os, select, sys\n"
        "print('up', os.environ['RANK'], 2, 0, 0, os.getpid(), 0, flush=True)\n"
        "if os.environ['RANK'] == '1':\n"
        "    open(os.path.join(os.path.dirname(__file__), 'fifo')).read()\n"
    )
    fifo = job.folder / "fifo"
    os.mkfifo(fifo)
    first, second, ups, others = pair(job)
    fast, slow = (first, second) if ups[0].rank == 0 else (second, first)
    assert gone([(ups + others)[0 if fast is first else 1].pid])
    assert fast.popen.poll() is None
    fifo.write_text("go")
    assert (slow.finish(), fast.finish()) == (0, 0)


# --- signals


def test_ctrl_c_on_every_node(job):
    first, second, ups, others = pair(job)
    for agent in (first, second):
        agent.popen.send_signal(signal.SIGINT)
    assert (first.finish(), second.finish()) == (130, 130)
    assert gone([up.pid for up in ups + others])


def test_second_ctrl_c_ends_even_the_host_of_the_store(job):
    first, second, _, _ = pair(job, nnodes="1:2")
    first.popen.send_signal(signal.SIGINT)
    first.told("a second signal ends that")
    first.popen.send_signal(signal.SIGINT)
    assert first.finish() == 130
    assert second.finish() == 1
    assert "the rendezvous store is gone" in second.err


def test_ctrl_c_while_waiting_for_others(job):
    agent = job.node()
    agent.popen.send_signal(signal.SIGINT)
    assert agent.finish() in (130, -signal.SIGINT)  # the latter before it was listening


STOPPING = """
import os, sys
import numpy as np
import unisono as dist
from unisono.c10d.preemption import should_stop
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


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_on_one_node_stops_all_ranks_at_the_same_step(job_of, signum):
    job = job_of(STOPPING)
    first, second, _, _ = pair(job, "--grace=30", nproc=2)
    second.popen.send_signal(signum)
    code = 128 + signal.SIGTERM if signum == signal.SIGTERM else 0
    assert (first.finish(), second.finish()) == (0, code), first.err + second.err
    steps = re.findall(r"stopped (\d+)", first.out + second.out)
    assert len(steps) == 4
    assert len(set(steps)) == 1


def test_grace_ends(job_of):
    job = job_of(
        "import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('up', os.environ['RANK'], 2, 0, 0, os.getpid(), 0, flush=True)\n"
        "while True: signal.pause()\n"
    )
    first, second, ups, others = pair(job, "--grace=0.2")
    for agent in (first, second):
        agent.popen.send_signal(signal.SIGTERM)
    assert (first.finish(), second.finish()) == (143, 143)
    assert gone([up.pid for up in ups + others])


# --- the host of the store dies


def test_host_of_the_store_dies(job):
    first, second, ups, others = pair(job, nnodes="1:2")
    first.popen.kill()
    assert second.finish() == 1
    assert "the rendezvous store is gone" in second.err
    assert job.endpoint in second.err
    assert gone([up.pid for up in ups + others])


def test_store_in_a_file_has_no_host_to_die(job):
    conf = f"{PATIENT},{LOSING},store_type=file"
    path = job.folder / "meeting"
    first, second = (job.node(nnodes="1:2", conf=conf, endpoint=path) for _ in range(2))
    first.next_ups(1), second.next_ups(1)
    first.popen.kill()
    [up] = second.next_ups(1)
    assert places([up]) == [(0, 1, 0, 1)]
    job.stop()
    assert second.finish() == 0


# --- nobody comes


def test_nobody_comes(job):
    agent = job.node(conf=f"{CONF},join_timeout=10")
    assert agent.finish() == 1
    assert "waiting for other nodes: 1 of at least 2 came (" in agent.err
    assert "timed out after 10 s: 1 of at least 2 nodes came" in agent.err


def test_no_rendezvous_at_the_endpoint(job):
    agent = job.node(conf=f"{CONF},join_timeout=0.5,is_host=0")
    assert agent.finish() == 1
    assert f"no rendezvous at {job.endpoint} within 0.5 s" in agent.err


def test_a_node_with_another_token_is_told_what_to_set(tmp_path):
    jobs = [Job(tmp_path, variables={"UNISONO_TOKEN": token}) for token in ("one", "two")]
    try:
        jobs[0].node(conf=f"{PATIENT},is_host=1")
        agent = jobs[1].node(conf=f"{PATIENT},is_host=0", endpoint=jobs[0].endpoint)
        assert agent.finish() == 1
    finally:
        for each in jobs:
            each.close()
    assert "it has another token than this client (UNISONO_TOKEN has to be the same" in agent.err


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
    assert third.finish() == 1
    assert "is taken by host" in third.err
    kill(up.pid)
    [up], [other] = first.next_ups(1), second.next_ups(1)
    assert (up.rank, up.restart, other.rank, other.restart) == (0, 1, 1, 1)
    job.stop()
    assert (first.finish(), second.finish()) == (0, 0)


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


def test_client_that_the_store_refuses_is_told(job_of, hosts):
    pytest.importorskip("torch")
    if not hosts:
        pytest.skip("on one host everybody is let in")
    job = job_of(TORCH, GLOO_SOCKET_IFNAME="eth0")
    first, _ = (job.node(conf=f"{PATIENT},is_host={serves}") for serves in (1, 0))
    first.told("it is on another machine and has no token; give it the job's token, UNISONO_TOKEN;")
    first.told("or UNISONO_INSECURE=1 here accepts any client")


def test_torch_script_restarts_on_several_nodes(job_of):
    pytest.importorskip("torch")
    # Torch's clients know no token, so the store has to be open to those on other hosts.
    job = job_of(TORCH, GLOO_SOCKET_IFNAME="eth0", UNISONO_INSECURE="1")
    first, second, _, _ = pair(job, "--max-restarts=1")
    ups = sorted(first.next_ups(1) + second.next_ups(1), key=lambda up: up.rank)
    assert places(ups) == [(0, 2, 1, 2), (1, 2, 1, 2)]
    assert (first.finish(), second.finish()) == (0, 0)
