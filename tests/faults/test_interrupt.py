"""Ctrl-C inside every call that blocks: it comes through at once, and the others hear of it."""

from __future__ import annotations

import re

import numpy as np
import pytest

import unisono as dist
from tests.faults import leaving_bodies
from tests.faults.fault_calls import BUSY_S, LEFT, store
from unisono.engines import is_native_built
from unisono.testing import run

# What the others get. A collective cannot end without this rank; a receive, or a wait in the
# store, concerns nobody else until the rank goes down with it.
HEARD = {
    "all_reduce": ("CollectiveAbortedError", "KeyboardInterrupt on rank 1"),
    "barrier": ("CollectiveAbortedError", "KeyboardInterrupt on rank 1"),
    "wait": ("PeerFailedError", "rank 1 raised KeyboardInterrupt"),
    "recv": ("PeerFailedError", "rank 1 raised KeyboardInterrupt"),
    "recv any": ("PeerFailedError", "rank 1 raised KeyboardInterrupt"),
    "new world": ("PeerLostError", LEFT),
    "store": ("PeerFailedError", "rank 1 raised KeyboardInterrupt"),
}


@pytest.mark.parametrize("name", list(leaving_bodies.BLOCKING))
def test_interrupt_in_a_blocking_call(name):
    results = run(leaving_bodies.interrupt, 3, ranks="processes", args=(name,), timeout=60.0)
    assert results[1].kind == "KeyboardInterrupt", results[1]
    assert results[1].took_s < BUSY_S
    kind, text = HEARD[name]
    for caught in (results[0], results[2]):
        assert (caught.kind, caught.peers) == (kind, (1,)), caught
        assert re.search(text, caught.text.splitlines()[0]), caught
        if name != "new world":
            assert caught.ended_s - results[1].began_s < BUSY_S


def test_interrupted_recv_leaves_its_memory_alone():
    _, (caught, box, fresh) = run(leaving_bodies.interrupt_recv, 2, ranks="processes")
    assert caught.kind == "KeyboardInterrupt"
    assert box == [0.0] * 3
    assert fresh == [5.0] * 3


@pytest.mark.skipif(not is_native_built(), reason="the C++ engine is not built")
def test_interrupt_in_a_callback_is_not_lost():
    caught = run(leaving_bodies.interrupt_callback, 2, ranks="processes")[1]
    assert caught.kind == "KeyboardInterrupt", caught


@pytest.mark.skipif(not is_native_built(), reason="the C++ engine is not built")
def test_interrupt_at_the_start_of_a_message_frees_nothing():
    assert run(leaving_bodies.interrupt_start, 2, ranks="processes")[1] == [True] * 4


def interrupt_work(rank):
    """Press Ctrl-C on rank 1 while it waits for a call that rank 0 has not made."""
    x, caught = np.full(2, rank + 1.0), None
    dist.barrier()
    if rank == 0:
        store().wait(["interrupted"], 60.0)
    work = dist.all_reduce(x, async_op=True)
    if rank == 1:
        caught = leaving_bodies.interrupted(work.wait)
        store().set("interrupted", "yes")
    work.wait()
    return caught, x.tolist()


def test_interrupt_ends_the_wait_for_a_call_but_not_the_call():
    (_, other), (caught, x) = run(interrupt_work, 2, ranks="processes", timeout=60.0)
    assert caught.kind == "KeyboardInterrupt", caught
    assert caught.took_s < BUSY_S
    assert x == other == [3.0, 3.0]
