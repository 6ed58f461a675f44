"""The rank that failed first is named, although other ranks ended after it.

The orders of events that named a follower, and what prevents each:

| order on the rank that reports | mended by |
|---|---|
| a follower ends before the failure that it passed on arrives | a rank sends first, then raises |
| a member of a group ends, and a rank outside the group waits for it | linked ranks get it, too |
| a good-bye before the abort of a second thread | abort sends before it wakes waits |
| 2 ended links in one turn, the follower's first | the end is kept back until linked ranks answer |
| an answer before the failure that lies in the next socket | a rank answers after another turn |
| a failed dial to a follower that was never linked | as an ended link |
| a failed receive from a rank that left, then the follower's good-bye | `Transport.explain` |
| an uncaught exception, in a sub-group's call | the exception is reported in all groups |
| a failure soon after one that was survived | a rank keeps all fresh failures |
| a failure overtakes data that its detector sent before | it breaks when it comes from there |
| an exception after the end of its rank's connection | the exception replaces the end |
| a rank ends soon after a failure in another group | only a rank with an error is a follower |
| the end of a rank that left a broken group, in shared memory | the rank aborts, then leaves |
| a rank ends in another group than the rank from which it has the report | it reports back, too |
"""

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import unisono as dist
from tests.faults import first_cause
from tests.faults.fault_calls import attempt, store, wait_for_count
from tests.support import selection
from tests.support.transport_worlds import connected, works
from unisono.core.engines.errors import broken_group_error
from unisono.core.transports import control
from unisono.core.transports.control import FirstCause
from unisono.core.transports.messages import Failure, Purpose
from unisono.errors import PeerLostError
from unisono.testing import run

LOST, LOST_2 = Failure("lost", "gone", [3], 0), Failure("lost", "gone", [2], 1)
RAISED = Failure("failed", "rank 2 raised", [2], 2)


@pytest.mark.parametrize(
    ("events", "first"),
    [
        ([(LOST, 0.0)], LOST),
        ([(LOST, 0.0), (LOST_2, 0.5)], LOST_2),
        ([(LOST_2, 0.5), (LOST, 0.0)], LOST_2),
        ([(LOST_2, 0.0), (LOST, 0.0)], LOST_2),
        ([(LOST_2, 0.5), (RAISED, 0.0)], RAISED),
        ([(RAISED, 0.0), (LOST_2, 0.5)], RAISED),
        ([(LOST_2, 60.0), (LOST, 0.0)], LOST),
        ([(LOST, 0.0), (LOST_2, 60.0)], LOST),
    ],
)
def test_earliest_fresh_failure_is_the_first_cause(events, first):
    causes = FirstCause()
    for failure, age_s in events:
        causes.add(failure, age_s)
    assert causes.find(0.0, 1, range(4)) is first
    assert causes.find(float("inf"), 1, range(4)) is None
    other = FirstCause()
    other.learn(causes.words)
    assert other.find(0.0, 1, range(4)).args == first.args


def test_failure_after_a_survived_one_is_a_first_cause_too():
    causes, other = FirstCause(), FirstCause()
    causes.add(Failure("lost", "rank 3 was lost", [3], 0), 6.0)
    made_s = time.monotonic() - 5.0  # a group of the ranks that are left
    causes.add(LOST_2, 0.5)
    causes.add(LOST, 0.0)
    other.learn(causes.words)
    assert causes.find(made_s, 1, range(4)) is LOST_2
    assert other.find(made_s, 1, range(4)).args == LOST_2.args


def test_failure_in_another_group_is_the_cause_only_of_a_follower():
    causes = FirstCause()
    causes.add(LOST, 1.0)
    assert causes.find(0.0, 1, (0, 1)) is None
    assert causes.find(0.0, 2, (0, 2)) is None
    causes.add_follower(2)
    assert causes.find(0.0, 1, (0, 1)) is None
    assert causes.find(0.0, 2, (0, 2)) is LOST


@pytest.mark.ranks(3, kind="both", engine="both")
def test_reported_failure_is_no_bug_of_the_library(rank):
    """Also if the group of this rank takes the failure over from the group of another rank."""
    whole, pair = dist.new_group(), dist.new_group([0, 1])
    if rank == 1:
        whole.report_failure("KeyError: 'x'")
    caught = attempt(dist.all_reduce, np.ones(2), group=whole)
    assert caught.kind == ("CollectiveAbortedError" if rank == 1 else "PeerFailedError"), caught
    assert (caught.peers, "rank 1 raised KeyError: 'x'" in caught.text) == ((1,), True)
    if rank == 0:
        pair.backends["cpu"].adopt_failure(whole.backends["cpu"])
    if rank < 2:
        caught = attempt(dist.all_reduce, np.ones(2), group=pair)
        assert caught.kind == ("CollectiveAbortedError" if rank == 1 else "PeerFailedError")
        assert caught.peers == (1,)


@pytest.mark.ranks(3, kind="threads", engine="native")
def test_a_rank_that_leaves_a_broken_group_is_not_blamed(rank):
    """Rank 2 sees in shared memory that rank 0 has left, before it gets rank 1's report."""
    whole = dist.new_group()
    dist.barrier(group=whole)
    comm, held, broken, is_late = whole.backends["cpu"]._comm, [], threading.Event(), []
    arrive = comm.transport.on_control

    def arrive_late(*frame):
        if frame[2] is Purpose.FAIL and not is_late:
            held.append(frame)
        else:
            arrive(*frame)

    def deliver():
        is_late.append(True)
        for frame in held:
            arrive(*frame)

    if rank == 2:
        comm.transport.on_control = arrive_late
    comm.transport.on_failure(comm.context, lambda _: broken.set())
    dist.barrier()
    if rank == 1:
        whole.report_failure("KeyError: 'x'")
        store().wait(["seen"], 60.0)
    if rank == 0:
        assert broken.wait(60.0)
        shared = store()
        dist.destroy_process_group()
        shared.set("left", "")
    if rank == 2:
        store().wait(["left"], 60.0)
        timer = threading.Timer(0.5, deliver)
        timer.start()
        caught = attempt(dist.all_reduce, np.ones(2), group=whole)
        store().set("seen", "")
        timer.join()
        assert (caught.kind, caught.peers) == ("PeerFailedError", (1,)), caught
        assert "rank 1 raised KeyError: 'x'" in caught.text


def hold_reports(group, hold):
    """Let rank 1 call `hold(peer)` before it reports a failure; return the event of the break."""
    comm, broken = group.backends["cpu"]._comm, threading.Event()
    send = comm.transport._control

    def send_late(peer, context, kind, words):
        if kind is Purpose.FAIL:
            hold(peer)
        return send(peer, context, kind, words)

    if comm.transport.rank == 1:
        comm.transport._control = send_late
    comm.transport.on_failure(comm.context, lambda _: broken.set())
    dist.barrier()
    return broken


@pytest.mark.ranks(3, kind="threads", engine="native")
def test_a_rank_that_leaves_before_all_ranks_are_informed_is_not_blamed(rank):
    """Rank 0 has rank 1's report and leaves; rank 2 gets that report after its own call."""
    whole, shared = dist.new_group(), store()

    def hold(peer):
        if peer == 2:
            shared.wait(["seen"], 60.0)

    broken = hold_reports(whole, hold)
    if rank == 1:
        whole.report_failure("KeyError: 'x'")
    if rank == 0:
        assert broken.wait(60.0)
        dist.destroy_process_group()
        shared.set("left", "")
    if rank == 2:
        shared.wait(["left"], 60.0)
        caught = attempt(dist.all_reduce, np.ones(2), group=whole)
        shared.set("seen", "")
        assert (caught.kind, caught.peers) == ("PeerFailedError", (1,)), caught
        assert "rank 1 raised KeyError: 'x'" in caught.text


@pytest.mark.ranks(3, kind="threads", engine="native")
def test_own_failure_prevails_over_later_ones(rank):
    """Rank 2 reports that rank 0 was lost while rank 1 is about to report its own error."""
    whole, shared = dist.new_group(), store()
    comm = whole.backends["cpu"]._comm

    def hold(_):
        shared.set("began", "")
        shared.wait(["reported"], 60.0)

    broken = hold_reports(whole, hold)
    if rank == 1:
        whole.report_failure("KeyError: 'x'")
        caught = attempt(dist.all_reduce, np.ones(2), group=whole)
        assert (caught.kind, caught.peers) == ("CollectiveAbortedError", (1,)), caught
    if rank == 2:
        shared.wait(["began"], 60.0)
        comm.transport.fail(comm.context, Failure("lost", "rank 0 was lost", [0], 2), comm.others)
        shared.set("reported", "")
    assert broken.wait(60.0)
    dist.barrier()


def test_ranks_that_have_not_ended_are_asked_and_linked_ranks_first():
    """Ranks 0 to 7 end, then rank 8 because of rank 9; rank 10 has no report of rank 9."""
    world = connected("inproc", 11)
    caller = world[10]
    for other in world[:10]:
        works(caller, other)
    assert caller._failures.to_ask(range(10), [9]) == [9, *range(7)]
    world[9]._failures.first.add(Failure("failed", "rank 9 raised", [9], 9))
    for other in world[:9]:
        other.close()
    assert caller.explain(caller.down(8), 0.0, range(11)).peers == (9,)


def test_a_rank_that_takes_a_failure_is_a_follower_for_the_rank_that_passed_it_on():
    """Rank 1 gets rank 0's report from rank 2 and ends, while rank 2 waits for it in a pair."""
    world = connected("inproc", 4)
    for each in world[:3]:
        each.linked = lambda: range(3)
        each.delivers_at_once = False
    failure = Failure("lost", "rank 3 was lost", [3], 0)
    world[2]._handle(0, 1, Purpose.FAIL, {"failure": failure.words, "members": None})
    assert world[1]._failures.get(1) is None  # rank 0 may still send what came before
    world[1]._handle(0, 1, Purpose.FAIL, {"failure": failure.words, "members": None})
    assert world[1]._failures.get(1).peers == (3,)
    world[1].close()
    assert world[2].explain(world[2].down(1), 0.0, (1, 2)).peers == (3,)


def test_the_others_are_asked_only_once_why_a_rank_has_left(monkeypatch):
    """While a rank does not answer, each call to the rank that left would take 0.5 s."""
    monkeypatch.setattr(control, "_FOLLOWS_S", 0.0)
    caller, left, _ = connected("inproc", 3)
    works(caller, left)
    left.close()
    asked = []
    caller.ask = lambda *_: asked.append(1)
    for _ in range(2):
        assert caller.explain(caller.down(1), 0.0, range(3)).peers == (1,)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("by", "end"), [(0, "it left"), (1, "it left"), (2, "it left (found by rank 2)")]
)
def test_a_rank_that_says_that_it_leaves_has_not_found_it(by, end):
    here = SimpleNamespace(rank=0)
    comm = SimpleNamespace(transport=here, name="g", here="rank 0 of 3", where=lambda **_: None)
    failure = Failure("lost", "rank 1 was lost: it left", [1], by)
    what = broken_group_error(failure, comm, "recv").what
    assert what == f"recv in group 'g' failed on rank 0 of 3: rank 1 was lost: {end}"


def test_an_interrupted_report_breaks_the_group_here():
    """This rank takes no failure of another rank afterwards, so its calls would wait."""
    transport, failure = connected("inproc", 2)[0], Failure("failed", "rank 0 raised", [0], 0)

    def interrupt(*_):
        raise KeyboardInterrupt

    transport._control = interrupt
    with pytest.raises(KeyboardInterrupt):
        transport.fail(1, failure, [1])
    assert transport.failure(1) is failure


def end_for_own_reasons(rank):
    """Rank 3 ends, and then rank 1 of another group, which had no error."""
    group = [dist.new_group(pair) for pair in ([0, 1], [2, 3])][rank // 2]
    dist.barrier()
    if rank == 3:
        os._exit(3)
    if rank == 1:
        store().wait(["seen"], 60.0)
        os._exit(1)
    caught = attempt(dist.all_reduce, np.ones(2), group=group)
    if rank == 2:
        store().set("seen", "yes")
    store().add("heard", 1)
    wait_for_count("heard", 2)
    return caught


def test_independent_failures_are_named_each_in_its_group():
    results = run(end_for_own_reasons, 4, ranks="processes", dead={1, 3})
    assert [results[rank].peers for rank in (0, 2)] == [(1,), (3,)]


@pytest.mark.parametrize("medium", list(first_cause.MEDIA))
def test_random_rounds_name_the_first_rank(medium, pytestconfig):
    command = [sys.executable, "-m", "tests.faults.first_cause", "8", "--medium", medium]
    seed = random.Random(selection.seed(pytestconfig) + medium).getrandbits(32)
    result = subprocess.run(
        [*command, "--seed", str(seed)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"--seed {seed}: {result.stdout}{result.stderr}"


def closes_a_group_and_another_rank_ends(rank, call):
    pg, x = dist.new_group([0, 1, 2]), np.ones(4)
    dist.all_reduce(x, group=pg)
    if rank == 1:
        dist.destroy_process_group(pg)
    dist.barrier()
    if rank == 0:
        with pytest.raises(PeerLostError, match="rank 1 was lost: it left: the group was closed"):
            dist.all_reduce(x, group=pg) if call == "all_reduce" else dist.recv(x, 1, group=pg)
    dist.barrier()
    if rank == 2:
        os._exit(3)
    with pytest.raises(PeerLostError) as caught:
        dist.barrier()
    assert caught.value.context.peers == (2,), caught.value.what


@pytest.mark.parametrize(
    ("engine", "shares", "call"),
    [("native", "1", "recv"), ("native", "0", "all_reduce"), ("reference", "1", "recv")],
)
def test_a_rank_that_closed_a_group_is_no_cause_of_a_later_end(monkeypatch, engine, shares, call):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", shares)
    run(
        closes_a_group_and_another_rank_ends, 3, ranks="processes", engine=engine, args=(call,),
        dead={2},
    )  # fmt: skip
