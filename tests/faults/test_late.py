"""Ranks that never arrive: the others say who."""

import re
import time

import numpy as np
import pytest

import unisono as dist
from tests.faults.fault_calls import (
    BUSY_S,
    COLLECTIVES,
    attempt,
    attempt_async,
    attempt_at_once,
    calls_in,
    calls_take_s,
    groups_for,
    store,
)
from tests.support.lateness import best_s
from unisono.core.base.deadline import Deadline
from unisono.core.engines import native_engine as native
from unisono.core.stores import PrefixStore
from unisono.core.transports import Transport
from unisono.testing import run


def leave_out(rank, missing, timeout_s, mode, members=None):
    """Make every collective on a group of its own without the ranks in `missing`."""
    timeout_s = max(timeout_s, 10 * calls_take_s())
    groups = groups_for(COLLECTIVES, members, timeout_s)
    dist.barrier()
    results, later, shown = {}, {}, ""
    if rank not in missing and (members is None or rank in members):
        calls = calls_in(groups)
        run = attempt_async if mode == "async" else attempt_at_once
        results = run(calls)
        later = {n: attempt(calls[n]) for n in COLLECTIVES}
        shown = repr(groups["all_reduce"])
    # The late ones wait here, in user code as far as the groups can tell.
    store().barrier("end", dist.get_world_size(), 60.0)
    return timeout_s, results, later, shown


def new_world_afterwards(rank, missing, timeout_s):
    """Break the default group, make the world anew, and compute something in it."""
    first = None
    if rank not in missing:
        first = attempt(dist.barrier, timeout=timeout_s)
    store().barrier("again", dist.get_world_size(), 60.0)
    options = dist.GroupMember.WORLD.backends["cpu"].info()["transport"]
    world_size, kept = dist.get_world_size(), store()
    dist.destroy_process_group()
    if options == "inproc":
        dist.init_process_group(store=PrefixStore("second", kept), rank=rank, world_size=world_size)
    else:
        dist.init_process_group(timeout=30)
    x = np.full(5, rank + 1.0)
    dist.all_reduce(x)
    return first, x.tolist()


def count_questions(rank, timeout_s):
    """Return how often this rank asks the others in calls that wait a little."""
    dist.group.WORLD.set_timeout(timeout_s)
    asked, ask = [], native._ask_others
    native._ask_others = lambda engine: (asked.append(1), ask(engine))
    try:
        for _ in range(20):
            time.sleep(0.002 * rank)
            dist.all_reduce(np.ones(1))
    finally:
        native._ask_others = ask
    return len(asked)


def silent_after_a_first_answer(rank):
    """Time out on rank 0 while rank 2 is elsewhere; only the first question is answered."""
    pg = dist.group.WORLD
    pg.barrier()
    caught = None
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(Transport, "inquire", _until_rank_1_is_in_it(Transport.inquire))
            patch.setattr(Transport, "ask", lambda *asked, **how: {})
        if rank < 2:
            caught = attempt(pg.barrier, timeout=0.5 if rank == 0 else 60.0)
        store().barrier("end", 3, 60.0)
    return caught


def _until_rank_1_is_in_it(inquire):
    def patched(self, context, seq, peers, **how):
        while True:
            question = inquire(self, context, seq, peers, **how)
            assert question.wait_until(Deadline(60.0))
            if question.answers[1].seq == 2:
                return question
            self.close_question(question)

    return patched


# At least; so long that a rank which came is not late as well, only because the machine is busy.
TIMEOUT_S = 1.5

WORLDS = [
    (2, (1,)),
    (3, (0,)),
    (5, (1, 3, 4)),
]


# On a busy machine a rank may be late to say, or to repeat, that it did not come.
BLAMED = (
    r"ranks? ([\d, and]+) "
    r"(?:never entered it|had not entered it [\d.]+ s ago and did not answer again|did not answer)"
)


def blamed(first_line):
    """Return the ranks that a time-out says did not come; it may say nothing else of any rank."""
    told = re.sub(r" \(found by rank \d+\)$", "", first_line.split(": ", 1)[1])
    assert re.fullmatch(f"{BLAMED}(?:, {BLAMED})*", told), first_line
    found = [re.findall(r"\d+", ranks) for ranks in re.findall(BLAMED, told)]
    return sorted(int(rank) for ranks in found for rank in ranks)


def check_late(results, present, missing):
    for rank in present:
        timeout_s, found, later, shown = results[rank]
        assert set(found) == set(COLLECTIVES)
        for op, caught in found.items():
            assert (caught.kind, caught.peers) == ("CollectiveTimeoutError", missing), caught.text
            first = caught.text.splitlines()[0]
            assert first.startswith(f"{op} #1 in group '{op}' timed out after {timeout_s:.1f} s")
            assert f"on rank {rank} of " in first
            assert blamed(first) == list(missing)
            assert caught.usable is False
            assert caught.took_s < timeout_s + BUSY_S
        for op, caught in later.items():
            assert (caught.kind, caught.peers) == ("CollectiveTimeoutError", missing), (op, caught)
            assert "the group is broken" in caught.text
        # They do not wait once more; some may be late for another reason.
        assert sorted(caught.took_s for caught in later.values())[len(later) // 2] < timeout_s
        assert "broken: timed out after" in shown


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("world_size", "missing"), WORLDS)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_every_operation_names_the_ranks_that_did_not_come(ranks, mode, world_size, missing):
    results = run(leave_out, world_size, ranks=ranks, args=(missing, TIMEOUT_S, mode))
    present = set(range(world_size)) - set(missing)
    check_late(results, present, missing)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_sub_group_is_told_in_global_ranks(ranks):
    members, missing = (1, 2, 4), (4,)
    results = run(leave_out, 5, ranks=ranks, args=(missing, TIMEOUT_S, "sync", members))
    check_late(results, {1, 2}, missing)


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_new_world_after_a_time_out(ranks):
    results = run(new_world_afterwards, 3, ranks=ranks, args=((1,), 0.5))
    assert [first and first.kind for first, _ in results] == [
        "CollectiveTimeoutError",
        None,
        "CollectiveTimeoutError",
    ]
    assert [x for _, x in results] == [[6.0] * 5] * 3


@pytest.mark.alone
def test_a_short_time_out_asks_nobody_at_once(monkeypatch):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")

    def most_questions():
        return max(run(count_questions, 2, ranks="processes", args=(1.9,)))

    # On a busy machine a call may be late indeed.
    assert best_s(most_questions, 1) == 0


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_an_old_answer_is_told_as_such(ranks):
    first, second, _ = run(silent_after_a_first_answer, 3, ranks=ranks)
    for caught in (first, second):
        assert (caught.kind, caught.peers) == ("CollectiveTimeoutError", (2,)), caught.text
        told = r": rank 2 had not entered it \d+\.\d s ago and did not answer again"
        assert re.search(told, caught.text), caught.text
