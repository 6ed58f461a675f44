"""Groups come and go: no descriptor, thread or memory stays (the leak guard sees the first two)."""

import gc
import itertools
import sys
import tracemalloc
import weakref
from unittest import mock

import numpy as np
import pytest

import unisono as dist
from unisono.core.groups.world import at_exit
from unisono.core.transports import control
from unisono.testing import run

# Bytes that may stay per cycle: far below any object that a group consists of. What stays for
# good (caches, interned names) was filled before the measurement.
PER_CYCLE = 64
# Fewer rounds in a window, and the constant noise of a window (some 3 KiB) counts as a leak.
WINDOWS = 3
ROUNDS = 360
clear_caches = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache


def grown(step, warm, rounds):
    """Return by how many bytes Python's memory grows over `rounds` calls of `step`.

    The least of WINDOWS equal parts counts: what leaks grows in each of them, while a table that
    doubles or a block that another thread has yet to give back shows in one or two.
    """
    for _ in range(warm):
        step()
    gc.collect()
    tracemalloc.start(1)
    try:
        sizes = [traced_after(step, warm)]
        for _ in range(WINDOWS):
            sizes.append(traced_after(step, rounds // WINDOWS))
        return WINDOWS * min(after - before for before, after in itertools.pairwise(sizes))
    finally:
        tracemalloc.stop()


def traced_after(step, rounds):
    for _ in range(rounds):
        step()
    gc.collect()
    # CPython's cache of attribute lookups keeps names that C code has made, up to 4,096 of them.
    clear_caches()
    return tracemalloc.get_traced_memory()[0]


def alone():
    dist.init_process_group()
    x = np.ones(2)
    dist.all_reduce(x)
    dist.destroy_process_group()


def test_worlds_of_one_leave_no_memory():
    left = grown(alone, 20, ROUNDS)
    assert left < ROUNDS * PER_CYCLE, f"{left} bytes stay"


def one_call(rank):
    x = np.ones(2)
    dist.all_reduce(x, async_op=True).wait()
    return float(x[0])


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
def test_worlds_of_two_leave_no_memory(transport):
    def cycle():
        assert run(one_call, 2, transport=transport) == [2.0, 2.0]

    cycle()
    left = grown(cycle, 10, ROUNDS // 4)
    assert left < ROUNDS * PER_CYCLE, f"{left} bytes stay"


def test_threads_as_ranks_leave_the_hook_for_uncaught_exceptions_alone():
    before = sys.excepthook
    assert run(lambda rank: sys.excepthook, 3) == [before] * 3
    assert sys.excepthook is before


def test_a_hook_that_another_one_has_kept_keeps_no_group(monkeypatch):
    # torch puts a hook of its own before ours, and leaves it there.
    heard = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: heard.append(error[1]))

    class Group:
        def tell(self, text):
            heard.append(text)

        def leave(self):
            pass

    group = Group()
    alive = weakref.ref(group)
    take_back = at_exit(group.tell, group.leave)
    ours, error = sys.excepthook, KeyError("x")
    monkeypatch.setattr(sys, "excepthook", lambda *error: ours(*error))
    sys.excepthook(KeyError, error, None)
    take_back()
    del group, take_back
    assert alive() is None
    sys.excepthook(KeyError, error, None)
    assert heard == [error, "KeyError: 'x'", error]


def one_group():
    group = dist.new_group()
    x = np.ones(3)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group, async_op=True).wait()
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_sub_groups_leave_no_memory(rank):
    if rank == 1:  # tracemalloc sees all threads, so that rank 0 measures for both
        for _ in range(40 + ROUNDS):
            one_group()
        return
    with mock.patch.object(control, "_MOST_CLOSED", 8):  # the ends of closed groups, for questions
        left = grown(one_group, 20, ROUNDS)
    assert left < ROUNDS * PER_CYCLE, f"{left} bytes stay"


def test_a_failed_init_leaves_nothing():
    for _ in range(20):
        with pytest.raises(ValueError, match="unknown backend 'no'"):
            dist.init_process_group("no")
        with pytest.raises(TypeError, match=r"pg_options must be unisono.lowlevel.CPUOptions"):
            dist.init_process_group(pg_options=5)
        assert not dist.is_initialized()
