"""Ranks that come and go, as processes: killed, stopped and joined ranks, steps and state."""

import contextlib
import itertools
import os
import re
import signal
import sys
import time
from collections import Counter
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest

import unisono as dist
from tests.faults.scripts import SRC, Forked, outcome, ranks_of, started
from tests.support.programs import python
from unisono.beyond import steps
from unisono.beyond.steps import Step
from unisono.core.c10d import lifecycle
from unisono.core.groups.membership import Membership
from unisono.core.groups.membership_store import Document, first_proposal
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import World, current, use
from unisono.core.rendezvous.agents.state import AgentsState as Nodes
from unisono.core.rendezvous.agents.state import Node, Phase
from unisono.core.rendezvous.agents.worker_world import WorkerStore
from unisono.core.rendezvous.joining import open_for_newcomer
from unisono.core.rendezvous.membership import Come, Member, WaitingMember
from unisono.core.stores import FileStore, HashStore
from unisono.core.transports import LinkDown, has_ended
from unisono.core.transports.messages import CLOSED
from unisono.errors import (
    ArgumentTypeError,
    ClosedError,
    CollectiveError,
    CollectiveMismatchError,
    InvalidArgumentError,
    NotInitializedError,
    PeerLostError,
    RendezvousError,
    StepAborted,
    StoreTimeoutError,
    UsageError,
)
from unisono.testing import run

# A job that counts to `steps`. Each committed step adds the sum over ranks to a model.
JOB = """
timeout = float(os.environ.get("TIMEOUT", "60"))
joined = os.environ.get("UNISONO_JOIN") == "1"
dist.init_process_group(timeout=timeout)
shared = store()
me = int(os.environ["NUMBER"]) if joined else rank
state = {"step": 0, "model": np.zeros(50_000), "parts": {"counts": [np.zeros(3, np.int32)]}}
history, error, old = [], "", None

def add():
    n = dist.get_world_size()
    with dist.step() as s:
        x = np.array([dist.get_rank() + 1.0])
        dist.all_reduce(x)
        assert x[0] == n * (n + 1) / 2, (x, n)
        s.commit()
    state["step"] += 1
    state["model"] += x[0]
    state["parts"]["counts"][0] += n
    history.append(n)
    return s.changed

def regroup(**how):
    dist.reconfigure(**how)
    dist.sync_state(state)

def told(**more):
    print(json.dumps({
        "me": me, "rank": dist.get_rank(), "size": dist.get_world_size(), "step": state["step"],
        "model": float(state["model"].sum()), "counts": state["parts"]["counts"][0].tolist(),
        "group": dist.group.WORLD.name, "history": history, "pid": os.getpid(), **more,
    }), flush=True)
"""


def script(body):
    names = (
        "from unisono import errors as dist_errors\nfrom unisono.core.groups.world import current\n"
    )
    return names + JOB + body


@contextlib.contextmanager
def newcomer(body, store, number, **variables):
    """Start a process that joins the job of a store."""
    where = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "UNISONO_JOIN": "1",
        "NUMBER": str(number),
    }
    with started([[]], body, where | variables, Forked) as [process]:
        yield process


COUNT = """
def count(steps):
    while state["step"] < steps:
        add()
"""


def keys(store, prefix, numbers):
    store.wait([f"worker/attempt_0/default_pg/0/{prefix}/{each}" for each in numbers], 60.0)


# On one host `auto` is plain.
@pytest.mark.parametrize("tls", ["auto", "on"], ids=["plain", "encrypted"])
def test_survivors_of_a_killed_rank_keep_their_state_and_take_a_replacement_in(tls, monkeypatch):
    monkeypatch.setenv("UNISONO_TLS", tls)
    monkeypatch.setenv("UNISONO_TOKEN", "of the job")
    body = script(
        COUNT
        + """
if not joined:
    count(10)
    if me == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    pid = os.getpid()
    try:
        count(20)
    except dist_errors.StepAborted as aborted:
        error, old = aborted.what, dist.group.WORLD
    regroup()
    assert (state["step"], os.getpid()) == (10, pid)
    shared.set(f"formed/{me}", "yes")
    count(20)
    regroup(min_size=4, max_size=4)
else:
    dist.sync_state(state)
    assert state["step"] == 20
count(30)
after = ""
if old is not None:
    try:
        old.all_reduce(np.zeros(1))
    except dist_errors.ClosedError as problem:
        after = problem.what
told(error=error, after=after, most=current().membership.max_size)
dist.barrier()
"""
    )
    with ranks_of(body, 4, Forked) as (processes, store):
        keys(store, "formed", (0, 2, 3))
        with newcomer(body, store, 9) as late:
            found = [outcome(each) for each in (*processes, late)]
    assert [code for _, code, _ in found] == [0, -signal.SIGKILL, 0, 0, 0], found
    told = [each for each, _, _ in found if each]
    assert [each["me"] for each in sorted(told, key=lambda each: each["rank"])] == [0, 2, 3, 9]
    # 10 steps of 4 ranks, 10 of 3, 10 of 4.
    model = 50_000.0 * (10 * 10 + 10 * 6 + 10 * 10)
    assert [(each["step"], each["model"]) for each in told] == [(30, model)] * 4
    assert all(each["counts"] == [110] * 3 for each in told)
    assert {(each["group"], each["most"]) for each in told} == {("default:generation-3", 4)}
    for each in told[:3]:
        assert re.match(
            r"the step does not count: .* in group 'default' failed on rank \d of 4: rank 1 was "
            "lost",
            each["error"],
        )
        assert each["after"] == (
            "all_reduce on group 'default (generation 1, which generation 2 succeeded)', which "
            "was destroyed"
        )


def test_a_stopped_rank_that_goes_on_gets_an_error_that_names_its_successor():
    body = script(
        COUNT
        + """
count(5)
shared.set(f"ready/{me}", "yes")
if me == 2:
    shared.wait(["gone"], 60)
else:
    shared.wait(["stopped"], 60)
try:
    add()
    error = "none"
except dist_errors.StepAborted as aborted:
    error = aborted.what
try:
    regroup()
    successor = ""
except dist_errors.RendezvousError as late:
    told(error=error, successor=late.what)
    raise SystemExit(7)
shared.set(f"formed/{me}", "yes")
shared.wait(["gone"], 60)
count(15)
told(error=error, successor="")
dist.barrier()
"""
    )
    with ranks_of(body, 3, Forked, TIMEOUT="4") as (processes, store):
        keys(store, "ready", range(3))
        os.kill(processes[2].pid, signal.SIGSTOP)
        store.set("worker/attempt_0/default_pg/0/stopped", "yes")
        keys(store, "formed", (0, 1))
        os.kill(processes[2].pid, signal.SIGCONT)
        store.set("worker/attempt_0/default_pg/0/gone", "yes")
        found = [outcome(each) for each in processes]
    assert [code for _, code, _ in found] == [0, 0, 7], found
    first, second, late = (each for each, _, _ in found)
    assert first["model"] == second["model"] == 50_000.0 * (5 * 6 + 10 * 3)
    assert "timed out after 4.0 s" in first["error"]
    assert re.match(
        r"rank 2 of generation 1 came too late: generation 2 succeeded it with 2 ranks \(rank 0 is "
        rf"process {processes[0].pid} on host \S+\), and this process is none of them",
        late["successor"],
    )
    assert late["step"] == 5


def test_ranks_whose_links_all_break_go_on_together():
    body = script(
        COUNT
        + """
import socket
import unisono.core.rendezvous.membership
unisono.core.rendezvous.membership.SILENT_S = 60.0

def break_links():
    kept = int(os.environ["MASTER_PORT"])
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = socket.socket(fileno=os.dup(int(fd)))
            if link.family == socket.AF_INET and link.getpeername()[1] != kept:
                link.shutdown(socket.SHUT_RDWR)
            link.close()
        except OSError:
            pass

count(3)
shared.barrier("counted", 4, 60.0)
break_links()
if me == 3:
    # A slow rank.
    document = current().membership.document
    while len(document.read().came) < 3:
        document.wait(1, 2)
for _ in range(9):
    try:
        count(6)
        break
    except dist_errors.StepAborted as aborted:
        error = aborted.what
        regroup()
told(error=error)
dist.barrier()
"""
    )
    # Each rank is a host of its own, so that it cannot know whether the others have ended.
    with ranks_of(body, 4, Forked, UNISONO_RANKS_PER_HOST="1") as (processes, _):
        found = [outcome(each) for each in processes]
    assert [code for _, code, _ in found] == [0] * 4, found
    for told, _, _ in found:
        assert "was lost" in told["error"], told
        assert (told["rank"], told["size"], told["step"]) == (told["me"], 4, 6)
        assert told["group"] == "default:generation-2"


# Of a rank that cannot go on: call until ranks are lost, then show why there is no new group.
REGROUP_IN_VAIN = """
try:
    while True:
        add()
except dist_errors.StepAborted:
    pass
try:
    regroup()
except dist_errors.RendezvousError as problem:
    told(error=problem.what)
"""


def test_half_of_the_ranks_without_the_lowest_one_do_not_go_on():
    body = script(
        """
import unisono.core.rendezvous.membership
# The reference engine does not know which ranks are on this host.
unisono.core.rendezvous.membership.AWAY_S = 3.0
add()
if me < 2:
    os.kill(os.getpid(), signal.SIGKILL)
"""
        + REGROUP_IN_VAIN
    )
    with ranks_of(body, 4, Forked) as (processes, _):
        found = [outcome(each) for each in processes]
    for told, code, err in found[2:]:
        assert code == 0, err
        assert re.match(
            r"rank [23] cannot go on after generation 1 of 4 ranks: ranks? .* lost, and that needs "
            "more than half of its agreed ranks, or half with the lowest one",
            told["error"],
        )
        assert told["group"] == "default"


def test_a_rank_does_not_wait_for_ranks_whose_nodes_the_launcher_gave_up():
    body = script(
        """
import unisono.core.rendezvous.membership
unisono.core.rendezvous.membership.AWAY_S = 600.0
add()
if me:
    os.kill(os.getpid(), signal.SIGKILL)
"""
        + REGROUP_IN_VAIN
    )
    nodes = tuple(Node(id=n, host=n, address="", nprocs=1 + (n == "b")) for n in ("a", "b"))
    state = Nodes(phase=Phase.RUNNING, order=nodes, members=nodes[:1])
    # Each rank is a host of its own, so that it cannot know whether the others have ended.
    with ranks_of(body, 3, Forked, UNISONO_RANKS_PER_HOST="1") as (processes, store):
        serving = WorkerStore()
        serving.served = store
        serving.report_gone(store, state)
        told, code, err = outcome(processes[0])
    assert code == 0, err
    assert "rank 0 cannot go on after generation 1 of 3 ranks: ranks 1, 2 are lost" in told["error"]


def test_a_job_goes_on_when_a_newcomer_ends_before_it_is_connected():
    """The document has a member that will never publish its address."""
    body = script(
        COUNT
        + """
import unisono.core.groups.membership
from unisono.core.groups.world import current
from unisono.core.rendezvous.membership import JoinRequest, Member, WaitingMember
# A shorter patience than in production.
unisono.core.groups.membership._CONNECT_S = 1.0
count(3)
if me == 0:
    document = current().membership.document
    # The fields of its process name are those of a process of another machine.
    user = "far~machine~1~1~1" if os.environ["FAR"] == "1" else gone_user
    document.change(JoinRequest(WaitingMember(member=Member(id="ghost", user=user, current=False))))
dist.barrier()
regroup()
count(6)
told()
dist.barrier()
"""
    )
    name = "from unisono.core.base.process_identity import new_user; print(new_user())"
    env = dict(os.environ) | {"PYTHONPATH": SRC}
    gone = python("-c", name, check=True, env=env).stdout.strip()
    for far, group in (("1", "default:generation-3"), ("0", "default:generation-2")):
        with ranks_of(f"gone_user = {gone!r}\n" + body, 2, Forked, FAR=far) as (processes, _):
            found = [outcome(each) for each in processes]
        assert [code for _, code, _ in found] == [0, 0], found
        assert [(e["size"], e["step"], e["group"]) for e, _, _ in found] == [(2, 6, group)] * 2


def test_without_its_store_a_job_reports_that_it_cannot_go_on(port):
    body = script(
        """
add()
if me == 0:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        add()
except dist_errors.StepAborted as aborted:
    error = aborted.what
try:
    dist.reconfigure()
except dist_errors.StoreConnectionError as problem:
    told(error=error, store=problem.what, changed=dist.membership_changed())
"""
    )
    # Rank 0 serves the store.
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with started([[]] * 3, body, place, Forked) as processes:
        found = [outcome(each) for each in processes]
    assert [code for _, code, _ in found] == [-signal.SIGKILL, 0, 0], found
    for each, _, _ in found[1:]:
        assert "rank 0 was lost" in each["error"]
        assert "lost the connection to the store" in each["store"]
        assert each["changed"]
        assert each["step"] == 1


# ---- reconfigure with threads as ranks ----------------------------------------------------------


def shrink_and_go_on(rank):
    """Rank 1 leaves; the others go on, with a group of their own made anew."""
    x = np.array([rank + 1.0])
    dist.all_reduce(x)
    if rank == 1:
        dist.destroy_process_group()
        return None
    old = dist.group.WORLD
    with pytest.raises((PeerLostError, CollectiveError)):
        dist.all_reduce(np.zeros(1))
    new = dist.reconfigure(timeout=20)
    assert new is dist.group.WORLD
    part = dist.new_group([0, dist.get_world_size() - 1])
    y = np.array([10.0 + rank])
    if isinstance(part, ProcessGroup):
        part.all_reduce(y)
    with pytest.raises(ClosedError, match="which generation 2 succeeded"):
        old.barrier()
    return dist.get_rank(), dist.get_world_size(), y[0], current().membership.generation


def test_ranks_go_on_without_a_rank_that_left():
    found = run(shrink_and_go_on, 4)
    assert found == [(0, 3, 23.0, 2), None, (1, 3, 12.0, 2), (2, 3, 23.0, 2)]


def reconfigure_twice(rank):
    names = []
    assert not dist.membership_changed()
    dist.group.WORLD.store.barrier("looked", 3, 20.0)
    for _ in range(3):
        dist.reconfigure(timeout=20)
        x = np.array([dist.get_rank()])
        dist.all_reduce(x)
        names.append((dist.group.WORLD.name, dist.get_rank() == rank, int(x[0])))
    return names


def shrink_by_hand(rank):
    if rank < 2:
        dist.shrink_group([2])
        with pytest.raises(NotInitializedError, match="not made by init_process_group or reconf"):
            dist.reconfigure()
        dist.barrier()


def test_a_group_of_shrink_group_is_no_generation():
    run(shrink_by_hand, 3)


def test_a_call_without_a_loss_makes_a_new_generation_of_the_same_ranks():
    want = [(f"default:generation-{number}", True, 3) for number in (2, 3, 4)]
    assert run(reconfigure_twice, 3) == [want] * 3


def meet_elsewhere(rank, path):
    """Keep the document in another store than that of the first world."""
    with FileStore(path) as other:
        current().membership.document = Document(other)
        for _ in range(2):
            dist.reconfigure(timeout=30)
        x = np.array([1.0])
        dist.all_reduce(x)
        return dist.group.WORLD.name, float(x[0]), other.list_keys()[0].partition("/")[0]


def test_ranks_meet_in_a_file(tmp_path):
    want = ("default:generation-3", 3.0, "unisono")
    assert run(meet_elsewhere, 3, args=(str(tmp_path / "file"),)) == [want] * 3


def wait_in_vain(rank):
    """Rank 1 never comes, and is not lost; rank 0 has exactly half and the lowest rank."""
    if rank == 1:
        dist.group.WORLD.store.wait(["done"], 30.0)
        with pytest.raises(RendezvousError, match="rank 1 of generation 1 came too late"):
            dist.reconfigure(timeout=20)
        return None
    with pytest.raises(RendezvousError, match=r"rank 0 waited 0.3 s for generation 2: .*not come"):
        dist.reconfigure(timeout=0.3, min_size=2)
    store = dist.group.WORLD.store
    dist.reconfigure(timeout=0.3)
    store.set("done", b"")
    return dist.get_world_size()


def test_the_deadline_ends_the_wait_for_a_rank_that_does_not_come():
    assert run(wait_in_vain, 2) == [1, None]


def test_arguments_of_reconfigure():
    def wrong(rank):
        for least, most in ((0, None), (3, 2)):
            with pytest.raises(InvalidArgumentError, match="reconfigure needs 1 <= min_size"):
                dist.reconfigure(min_size=least, max_size=most)
        dist.barrier()

    run(wrong, 2)
    with use(World()), pytest.raises(NotInitializedError):
        dist.membership_changed()
    with use(World()) as world:
        world.default = ProcessGroup(HashStore(), 0, 1)
        with pytest.raises(
            NotInitializedError, match="the default group was not made by init_process_group"
        ):
            dist.reconfigure()
        world.default.close()


def test_a_world_reports_its_end_once(monkeypatch):
    """It has 2 ranks, then 1, then 2."""
    installed = []
    with use(World()) as world:
        monkeypatch.setattr(lifecycle, "process_world", world)
        monkeypatch.setattr(
            lifecycle, "at_exit", lambda report, close: installed.append(close) or (lambda: None)
        )
        for size in (2, 1, 2):
            world.replace_default(ProcessGroup(HashStore(), 0, 1))
            monkeypatch.setattr(world.default, "size", lambda size=size: size)
            lifecycle.install_hooks(world)
        assert len(installed) == 1
        world.close()
        assert not world.has_hooks


@pytest.mark.parametrize(
    ("down", "ended"),
    [
        ([None, None, None], []),
        # Rank 1 is on the host of rank 0, and rank 2 on another.
        ([None, LinkDown(1, "reset"), LinkDown(2, "reset")], [1]),
        ([None, None, LinkDown(2, "no route", left=True)], []),
        ([None, None, LinkDown(2, CLOSED, left=True)], [2]),
    ],
)
def test_a_broken_link_inside_a_host_and_a_good_bye_show_the_end_of_a_rank(down, ended):
    for hosts, certain in ((("a", "a", "b"), ended), (("", "", ""), [r for r in ended if r == 2])):
        transport = SimpleNamespace(down=down.__getitem__, hosts=hosts, rank=0)
        assert [rank for rank in range(3) if has_ended(transport, rank)] == certain


def look_at_a_mute_store(rank):
    """Each read of the document takes 0.5 s and fails."""
    reads = []

    class Mute:
        def read(self, timeout):
            Event().wait(0.5)
            reads.append(timeout)
            raise StoreTimeoutError("the store server did not answer")

    membership = current().membership
    document, membership.document = membership.document, Mute()
    for _ in range(5):
        with dist.step() as s:
            s.commit()
        assert not s.changed
        # Longer than the pause between two looks at a store that answers.
        Event().wait(0.06)
    membership.document = document
    dist.reconfigure(timeout=20)
    return reads, membership._looked_s <= time.monotonic()


def test_a_store_that_does_not_answer_delays_one_step_only():
    # And by its time to answer, not by the time-out of the store.
    assert run(look_at_a_mute_store, 2) == [([1.0], True)] * 2


def count_keys(rank):
    counts = []
    for _ in range(6):
        dist.reconfigure(timeout=20)
        # Rank 0 deletes the old keys before it returns.
        dist.barrier()
        counts.append(dist.group.WORLD.store.num_keys())
        dist.barrier()
    return counts[1:]


def test_the_keys_of_old_generations_are_deleted():
    for counts in run(count_keys, 3):
        assert len(set(counts)) == 1, counts


# ---- newcomers ----------------------------------------------------------------------------------


def test_a_newcomer_gives_up_at_its_deadline(monkeypatch):
    monkeypatch.setenv("UNISONO_JOIN", "1")
    store = HashStore()
    with (
        use(World()) as world,
        pytest.raises(RendezvousError, match="to join, but the ranks of the job have not called"),
    ):
        dist.init_process_group(store=store, timeout=0.2)
    assert world.default is None
    # It left no trace for which the ranks of the job would wait.
    assert store.get("unisono/membership/document").count(b'"waiting":[]') == 1


@pytest.mark.native
def test_a_newcomer_of_another_engine_is_refused_by_all():
    body = script(
        """
try:
    if not joined:
        regroup(min_size=3)
except dist_errors.UnsupportedError as refused:
    error = refused.what
print(json.dumps(error))
"""
    ).replace(
        "dist.init_process_group(timeout=timeout)",
        """
try:
    dist.init_process_group(timeout=timeout)
except dist_errors.UnsupportedError as refused:
    print(json.dumps(refused.what))
    sys.exit()
""",
    )
    with (
        ranks_of(body, 2, Forked) as (processes, store),
        newcomer(body, store, 9, UNISONO_ENGINE="reference") as late,
    ):
        found = [outcome(each) for each in (*processes, late)]
    assert [code for _, code, _ in found] == [0, 0, 0], found
    (line,) = {each for each, _, _ in found}
    assert line.startswith("the ranks of a world must have one engine, but they have C++ (version ")
    assert line.endswith("on ranks 0 and 1, Python on rank 2")


def test_a_newcomer_that_fails_leaves_no_trace(monkeypatch):
    """It fails while it waits, or after a generation was formed with it."""
    monkeypatch.setenv("UNISONO_JOIN", "1")
    for fails, name in ((Document, "wait"), (Membership, "_connect")):
        store, seen = HashStore(), []
        document = Document(store)

        def fail(*_, document=document, seen=seen):
            state = document.read()
            seen.append((state.ids, len(state.waiting)))
            raise KeyboardInterrupt

        come = Come(WaitingMember(member=Member(id="1.0"), min_size=2), 1, 1, 1)
        if fails is Membership:
            document.change(come)
        with monkeypatch.context() as patch, use(World()) as world:
            patch.setattr(fails, name, fail)
            with pytest.raises(KeyboardInterrupt):
                dist.init_process_group(store=store, timeout=60)
        assert world.default is None
        state = document.read()
        assert not state.waiting
        if fails is Document:
            assert seen == [((), 1)]
        else:
            [(ids, _)] = seen
            assert ids[0] == "1.0"
            assert state.lost == ids[1:]


def test_the_store_of_a_newcomer(tmp_path):
    with FileStore(str(tmp_path / "file"), 2) as store:
        store.set("k", "v")
        with open_for_newcomer(f"file://{tmp_path}/file", 5.0) as other:
            assert other.get("k") == b"v"
    with dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as server:
        server.set("k", "v")
        with open_for_newcomer(f"tcp://127.0.0.1:{server.port}", 5.0) as other:
            assert other.get("k") == b"v"
    with pytest.raises(RendezvousError, match="cannot join at 'ftp://x': it joins by env://"):
        open_for_newcomer("ftp://x", 5.0)


# ---- state --------------------------------------------------------------------------------------


def pretend_newcomers(sources):
    """Make the membership of this rank one in which only `sources` hold the state."""
    membership = current().membership
    membership.members = tuple(
        SimpleNamespace(current=rank in sources) for rank in range(dist.get_world_size())
    )


def fill(rank, sources, count):
    pretend_newcomers(sources)
    state = {
        "flat": np.arange(count, dtype=np.float32) * (rank in sources),
        "strided": np.zeros((6, 8), np.int16)[:, ::2],
        "deep": {"list": [np.zeros(0), {"x": np.zeros(2)}], 7: "old"},
        "empty": {},
    }
    if rank in sources:
        state["strided"][:] = 5
        state["deep"]["list"][1]["x"][:] = 3
        state["deep"][7] = ("new", 1)
        state["empty"] = {"made": np.full(3, 2, np.uint8)}
    flat, strided, deep = state["flat"], state["strided"], state["deep"]
    dist.sync_state(state)
    # In place.
    assert state["flat"] is flat
    assert state["strided"] is strided
    assert state["deep"] is deep
    np.testing.assert_array_equal(flat, np.arange(count, dtype=np.float32))
    assert (strided == 5).all()
    assert (deep["list"][1]["x"] == 3).all()
    np.testing.assert_array_equal(state["empty"]["made"], np.full(3, 2, np.uint8))
    return deep[7]


@pytest.mark.parametrize(
    ("size", "sources", "count"), [(2, (0,), 5), (4, (0, 2), 100_000), (5, (1, 3, 4), 65_537)]
)
def test_newcomers_get_the_state_in_place_from_all_survivors(size, sources, count):
    assert run(fill, size, args=(sources, count)) == [("new", 1)] * size


def fill_tensors(rank):
    torch = pytest.importorskip("torch")
    torch.manual_seed(rank)
    pretend_newcomers((0,))
    model = torch.nn.Linear(3, 2)
    weight = model.weight.data_ptr()
    dist.sync_state({"model": model.state_dict(), "random": torch.get_rng_state()})
    assert model.weight.data_ptr() == weight
    return model.weight.detach().numpy().copy()


def test_newcomers_get_tensors_in_place():
    first, second = run(fill_tensors, 2)
    np.testing.assert_array_equal(first, second)


def differ(rank):
    pretend_newcomers((0,))
    ours = {"w": np.zeros(4), "n": 1}
    theirs = [
        ({"w": np.zeros(3), "n": 1}, r"rank 1: state\['w'\] is numpy <f8\[3\], expected numpy <f8"),
        ({"w": np.zeros(4), "more": 1}, "rank 1: state has 'more' besides"),
        ({"w": "text"}, r"rank 1: state\['w'\] is str, expected"),
    ]
    for other, text in theirs:
        state = ours if rank == 0 else other
        with pytest.raises(
            InvalidArgumentError, match=f"sync_state: the state differs from that of rank 0: {text}"
        ):
            dist.sync_state(state)
    with pytest.raises(ArgumentTypeError, match="sync_state: state must be a dict, got list"):
        dist.sync_state([1])
    ours["self"] = [ours]
    with pytest.raises(
        InvalidArgumentError,
        match=r"sync_state: rank 0: state\['self'\]\[0\] contains itself, or is more than 100 deep",
    ):
        dist.sync_state(ours if rank == 0 else {"w": np.ones(4)})
    deep = []
    for _ in range(5_000):
        deep = [deep]
    with pytest.raises(InvalidArgumentError, match=r"rank 0: state\['d'\]\[0\]"):
        dist.sync_state({"d": deep})
    pretend_newcomers(())
    with pytest.raises(
        CollectiveError, match="sync_state: no rank of generation 1 holds the state"
    ):
        dist.sync_state(ours)


def test_states_of_different_structure_are_refused_on_all_ranks():
    run(differ, 2)


def test_tensors_for_a_process_without_torch(monkeypatch):
    from unisono.beyond.state_sync import _Slot

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InvalidArgumentError, match="this process has not imported torch"):
        _Slot("torch", "float32", (2,)).allocate()


# ---- steps --------------------------------------------------------------------------------------


class Rounds:
    """A group whose rounds of a commit end as told: the number of rounds that succeed."""

    def __init__(self, store, succeed):
        self.store, self.succeed, self.counts = store, succeed, Counter()
        self.timeout_s = 30.0
        self.backends = {"cpu": SimpleNamespace(broken=lambda: "yes", last_number=lambda: 7)}
        self.place = lambda: (7, 0)

    def all_reduce(self, x, op, **how):
        if self.succeed < 1:
            raise PeerLostError("round 1 failed")

    def barrier(self, **how):
        if self.succeed < 2:
            raise PeerLostError("round 2 failed")


def ends(succeed, order):
    """Return on which ranks a step counts if the ranks ask the store in this order."""
    store, counted = HashStore(), {}
    with use(World()):
        for rank in order:
            step = Step(Rounds(store, succeed[rank]))
            try:
                with step:
                    step.commit()
                counted[rank] = True
            except StepAborted:
                counted[rank] = False
    return counted


def test_a_commit_counts_on_all_survivors_or_on_none():
    """Every end of the two rounds on 3 ranks, in every order of the ranks that ask the store."""
    seen = set()
    for succeed in itertools.product((0, 1, 2), repeat=3):
        # No rank ends round 2 before every rank has ended round 1.
        if 2 in succeed and 0 in succeed:
            continue
        for order in itertools.permutations(range(3)):
            counted = set(ends(succeed, order).values())
            assert len(counted) == 1, (succeed, order)
            seen |= counted
            assert 2 not in succeed or counted == {True}
    assert seen == {True, False}


def test_a_rank_without_which_a_later_generation_was_formed_counts_nothing():
    """The answer that it asks for may be deleted already."""
    with use(World()) as world:
        for later in (True, False):
            world.membership = SimpleNamespace(
                has_changed=lambda _: False, is_succeeded=lambda later=later: later
            )
            step = Step(Rounds(HashStore(), 1))
            with pytest.raises(StepAborted) if later else contextlib.nullcontext(), step:
                step.commit()
            assert step.committed != later


def miss_an_answer(rank, counts, without_answer):
    """Rank 2 leaves in a commit. The store gives rank 0 no answer, and rank 1 gets one."""
    group, state, ended = dist.group.WORLD, {"model": np.zeros(4)}, ""
    if rank == 0:
        without_answer.append(group.store)
    if rank == 2:
        if counts:
            group.all_reduce(np.zeros(1, np.int64), dist.ReduceOp.MAX, _label="commit")
        dist.destroy_process_group()
        return None
    try:
        with dist.step() as s:
            s.commit()
        state["model"] += 1
    except (StepAborted, StoreTimeoutError) as error:
        ended = type(error).__name__
    dist.reconfigure(timeout=20)
    sources = current().membership.sources
    dist.sync_state(state)
    return ended, sources, state["model"].tolist()


def test_a_rank_that_missed_a_step_which_counts_is_filled(monkeypatch):
    def answer(store, *question):
        if store in without_answer:
            raise StoreTimeoutError("the store server did not answer")
        return first_proposal(store, *question)

    monkeypatch.setattr(steps, "first_proposal", answer)
    without_answer = []
    found = run(miss_an_answer, 3, args=(True, without_answer))
    assert found[:2] == [("StoreTimeoutError", (1,), [1.0] * 4), ("", (1,), [1.0] * 4)]
    found = run(miss_an_answer, 3, args=(False, without_answer))
    both = (0, 1), [0.0] * 4
    assert found[:2] == [("StoreTimeoutError", *both), ("StepAborted", *both)]


def commit_or_not(rank):
    with dist.step() as s:
        s.commit()
        with pytest.raises(UsageError, match=r"commit\(\) was called twice in one step"):
            s.commit()
    assert (s.committed, s.changed) == (True, False)
    with dist.step() as s:
        pass
    assert not s.committed
    with pytest.raises(CollectiveMismatchError), dist.step() as s:
        s.commit() if rank == 0 else dist.all_reduce(np.zeros(3))
    with pytest.raises(ValueError, match="mine"), dist.step() as s:
        raise ValueError("mine")
    x = np.ones(1)
    dist.all_reduce(x)
    return int(x[0])


def test_a_step_without_commit_does_not_count_and_other_errors_pass():
    assert run(commit_or_not, 2) == [2, 2]


def test_a_rank_that_ends_between_the_rounds_leaves_one_answer():
    body = script(
        """
add()
if me == 2:
    group = dist.group.WORLD
    group.all_reduce(np.zeros(1, np.int64), dist.ReduceOp.MAX, _label="commit")
    os.kill(os.getpid(), signal.SIGKILL)
with dist.step() as s:
    s.commit()
assert s.changed
state["step"] += 1
regroup()
add()
told()
dist.barrier()
"""
    )
    with ranks_of(body, 3, Forked) as (processes, _):
        found = [outcome(each) for each in processes]
    assert [code for _, code, _ in found] == [0, 0, -signal.SIGKILL], found
    assert [(e["step"], e["size"]) for e, _, _ in found[:2]] == [(3, 2)] * 2


def test_an_abort_of_a_smaller_group_ends_the_step_of_all():
    def body(rank):
        pair = dist.new_group([0, 1])
        aborted = ""
        try:
            with dist.step() as s:
                if rank == 0:
                    pair.abort("on purpose")
                if rank < 2:
                    pair.barrier()
                s.commit()
        except StepAborted as error:
            aborted = error.what
        return aborted.partition(":")[0]

    assert run(body, 3) == ["the step does not count"] * 3
