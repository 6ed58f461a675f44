"""Groups come and go: no descriptor, thread or memory stays (the leak guard sees the first two)."""

import sys
import weakref

import numpy as np
import pytest

import unisono as dist
from tests.worlds import cycle_bodies
from unisono.groups.world import at_exit
from unisono.testing import run

# Bytes that may stay per cycle: far below any object that a group consists of. What stays for
# good (caches, interned names) was filled before the measurement.
PER_CYCLE = 64


def alone():
    dist.init_process_group()
    x = np.ones(2)
    dist.all_reduce(x)
    dist.destroy_process_group()


def test_a_thousand_worlds_of_one():
    grown = cycle_bodies.grown(alone, 20, 1000)
    assert grown < 1000 * PER_CYCLE, f"{grown} bytes stay after 1,000 cycles"


def one_call(rank):
    x = np.ones(2)
    dist.all_reduce(x, async_op=True).wait()
    return float(x[0])


@pytest.mark.parametrize(("transport", "rounds"), [("inproc", 200), ("tcp", 100)])
def test_worlds_of_two(transport, rounds):
    def cycle():
        assert run(one_call, 2, transport=transport) == [2.0, 2.0]

    cycle()
    grown = cycle_bodies.grown(cycle, 10, rounds)
    assert grown < rounds * PER_CYCLE * 4, f"{grown} bytes stay after {rounds} cycles"


def test_threads_as_ranks_leave_the_hook_for_uncaught_exceptions_alone():
    before = sys.excepthook
    assert run(hook, 3) == [before] * 3
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


def hook(rank):
    dist.barrier()
    return sys.excepthook


def test_a_thousand_sub_groups():
    grown = run(cycle_bodies.sub_groups, 2, args=(1000,))[0]
    assert grown < 1000 * PER_CYCLE, f"{grown} bytes stay after 1,000 sub-groups"


def test_a_failed_init_leaves_nothing():
    for _ in range(20):
        with pytest.raises(ValueError, match="unknown backend 'no'"):
            dist.init_process_group("no")
        with pytest.raises(TypeError, match=r"pg_options must be unisono.lowlevel.CPUOptions"):
            dist.init_process_group(pg_options=5)
        assert not dist.is_initialized()
