"""A call that a rank has finished before it raises is no failure on the other ranks."""

import random

import numpy as np
import pytest

import unisono as dist
from tests.faults.fault_calls import attempt, store
from tests.support.operations import COLLECTIVES, Operations
from unisono.errors import PeerError, UnisonoError
from unisono.testing import run

SIZES = (1, 5, 700, 9_000, 70_000, 400_000)


UNEVEN = "all_to_all_single (uneven)"
NAMES = [*COLLECTIVES, UNEVEN]


def make(name, group, rank, size, count, number):
    """Make one call of a group, and check its result."""
    calls = Operations(rank, size, count, number % size, shift=number, how={"group": group})
    if name == UNEVEN:
        calls.uneven = [count + i for i in range(size)]
    getattr(calls, name.partition(" ")[0])()
    calls.check(name, count, number)


def rounds(rank, size, seed, count):
    """Make random calls in new groups; return by round what a rank raised, and after which call."""
    return [_round(rank, size, f"{seed}/{at}") for at in range(count)]


def _round(rank, size, name):
    dice = random.Random(name)
    call, elements, last = dice.choice(NAMES), dice.choice(SIZES), dice.randrange(1, 9)
    failing, leaves, varies = dice.randrange(size), dice.random() < 0.5, dice.random() < 0.5
    group = dist.new_group(timeout=60)
    done = 0
    error = None
    try:
        while done < last or rank != failing:
            if varies:
                call, elements = dice.choice(NAMES), dice.choice(SIZES)
            make(call, group, rank, size, elements, done + 1)
            done += 1
    except UnisonoError as raised:
        error = raised
    if rank == failing and error is None:
        group.report_failure("after a call")
        if leaves:
            dist.destroy_process_group(group)
    store().set(f"over/{name}/{rank}", "")
    store().wait([f"over/{name}/{each}" for each in range(size)], 60)
    if not (rank == failing and leaves):
        dist.destroy_process_group(group)
    text = "" if error is None else f"{type(error).__name__}: {error}"
    blamed = None if not isinstance(error, PeerError) else list(error.context.peers)
    return name, call, elements, failing, last, done, blamed, text


def sends(rank, size, seed, count):
    """Send random messages, then raise; return by round how many each receiver got afterwards."""
    # Without all connections, the report of the failure would come before the messages.
    x = np.ones(SIZES[-1])
    for dst in range(1, size) if rank == 0 else ():
        dist.send(x, dst)
    if rank:
        dist.recv(x, 0)
    return [_sends(rank, size, f"{seed}/{at}") for at in range(count)]


def _sends(rank, size, name):
    dice = random.Random(name)
    group = dist.new_group(timeout=60)
    sizes = [dice.choice(SIZES) for _ in range(dice.randrange(1, 6))]
    leaves, got = dice.random() < 0.5, 0
    if rank == 0:
        for number, elements in enumerate(sizes):
            for dst in range(1, size):
                dist.send(np.full(elements, float(number)), dst, group=group)
        group.report_failure("after its sends")
        if leaves:
            dist.destroy_process_group(group)
    else:
        # Afterwards this rank knows of the failure.
        with pytest.raises(PeerError):
            dist.barrier(group=group)
        for number, elements in enumerate([*sizes, 1]):
            x = np.empty(elements)
            if attempt(dist.recv, x, 0, group=group).kind:
                break
            assert (x == number).all()
            got += 1
    store().set(f"over/{name}/{rank}", "")
    store().wait([f"over/{name}/{each}" for each in range(size)], 60)
    if rank or not leaves:
        dist.destroy_process_group(group)
    return name, len(sizes), got


@pytest.fixture(params=["shared memory", "wires", "hosts", "reference", "inproc"])
def ways(request, monkeypatch):
    """The settings of a world for `run`."""
    if request.param == "inproc":
        return {"ranks": "threads", "engine": "reference"}
    if request.param == "wires":
        monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    if request.param == "hosts":
        monkeypatch.setenv("UNISONO_RANKS_PER_HOST", "2")
    engine = "reference" if request.param == "reference" else None
    return {"ranks": "processes", "engine": engine}


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("size", "seed"), [(2, "two"), (4, "four")])
def test_a_call_that_the_failing_rank_has_finished_ends_well_on_all(ways, size, seed):
    for per_rank in zip(*run(rounds, size, args=(size, seed, 10), **ways), strict=True):
        for rank, (*_, failing, last, done, blamed, text) in enumerate(per_rank):
            if rank == failing:
                assert not text, per_rank[rank]
            else:
                assert (done, blamed) == (last, [failing]), per_rank[rank]


@pytest.mark.sweep(3)
def test_messages_that_were_sent_before_a_failure_are_received(ways):
    for per_rank in zip(*run(sends, 3, args=(3, "sends", 6), **ways), strict=True):
        assert [got for _, _, got in per_rank] == [0, *[per_rank[0][1]] * 2], per_rank
