"""Ranks of which some do not come."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import unisono as dist
from tests.faults.fault_calls import (
    COLLECTIVES,
    attempt,
    attempt_async,
    attempt_at_once,
    groups_for,
    pids,
    store,
)
from tests.faults.killed_bodies import wait_for_count
from unisono.base.deadline import Deadline
from unisono.engines import native_engine as native
from unisono.stores import PrefixStore
from unisono.transports import Transport


def leave_out(rank, missing, timeout_s, mode, members=None):
    """Make every collective on a group of its own without the ranks in `missing`."""
    timeout_s = max(timeout_s, 10 * calls_take_s())
    groups = groups_for(COLLECTIVES, members, timeout_s)
    dist.barrier()
    results, later, shown = {}, {}, ""
    if rank not in missing and (members is None or rank in members):
        calls = {n: (lambda n=n, **how: COLLECTIVES[n](groups[n], **how)) for n in COLLECTIVES}
        run = attempt_async if mode == "async" else attempt_at_once
        results = run(calls)
        later = {n: attempt(calls[n]) for n in COLLECTIVES}
        shown = repr(groups["all_reduce"])
    # The late ones wait here, in user code as far as the groups can tell.
    store().barrier("end", dist.get_world_size(), 60.0)
    return timeout_s, results, later, shown


def stop_before(rank, victim, timeout_s):
    """Make every collective while a rank is stopped; wake it when the others have given up."""
    everybody, world_size = pids(), dist.get_world_size()
    timeout_s = max(timeout_s, 10 * calls_take_s())
    groups = groups_for(COLLECTIVES, timeout=timeout_s)
    dist.barrier()
    results = {}
    if rank == victim:
        # Nobody may need it once it has stopped: all are past the barrier then.
        wait_for_count("past the barrier", world_size - 1)
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        store().add("past the barrier", 1)
        wait_until_stopped(everybody[victim])
        results = attempt_at_once({n: (lambda n=n: COLLECTIVES[n](groups[n])) for n in COLLECTIVES})
        store().add("gave up", 1)
        if rank == min(r for r in range(world_size) if r != victim):
            wait_for_count("gave up", world_size - 1)
            os.kill(everybody[victim], signal.SIGCONT)
    store().barrier("end", world_size, 60.0)
    return timeout_s, results


def wait_until_stopped(pid):
    """Wait until a process is in the state T (stopped)."""
    end_s = time.monotonic() + 60.0
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < end_s
        time.sleep(0.01)


def calls_take_s():
    """Return how long the slowest rank takes for all calls now; the same on all ranks."""
    groups = groups_for(COLLECTIVES)
    began_s = time.monotonic()
    attempt_at_once({n: (lambda n=n: COLLECTIVES[n](groups[n])) for n in COLLECTIVES})
    slowest_s = np.array([time.monotonic() - began_s])
    dist.all_reduce(slowest_s, dist.ReduceOp.MAX)
    return float(slowest_s[0])


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
            patch.setattr(Transport, "ask", lambda *asked: {})
        if rank < 2:
            caught = attempt(pg.barrier, timeout=0.5 if rank == 0 else 60.0)
        store().barrier("end", 3, 60.0)
    return caught


def _until_rank_1_is_in_it(inquire):
    def patched(self, context, seq, peers):
        while True:
            question = inquire(self, context, seq, peers)
            assert question.wait_until(Deadline(60.0))
            if question.answers[1].seq == 2:
                return question
            self.close_question(question)

    return patched
