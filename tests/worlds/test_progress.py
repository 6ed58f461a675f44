"""Asynchronous calls: order, errors and memory, whether C++ or Python runs them."""

import time

import numpy as np
import pytest

import unisono as dist
from tests.worlds import progress_bodies as bodies
from unisono.engines import is_native_built
from unisono.testing import run


@pytest.mark.parametrize("seed", [1, 2])
def test_any_order(world, seed):
    assert world(bodies.any_order, 3, args=(seed,)) == [True] * 3


@pytest.mark.skipif(not is_native_built(), reason="the reference engine is Python")
def test_calls_end_while_python_is_busy(monkeypatch):
    monkeypatch.delenv("UNISONO_ENGINE", raising=False)
    assert run(bodies.while_python_is_busy, 2, ranks="processes") == [[True] * 4] * 2


def test_a_mismatch_in_the_queue(world):
    assert world(bodies.mismatch_in_the_queue, 2) == [True] * 2


def test_uneven_sizes_in_the_queue(world):
    assert world(bodies.uneven_in_the_queue, 3) == [True] * 3


def test_the_memory_of_a_dropped_work(world):
    assert world(bodies.memory_of_a_dropped_work, 2) == [True] * 2


def test_the_memory_of_a_last_call(world):
    assert world(bodies.memory_of_a_last_call, 2) == [True] * 2


@pytest.mark.skipif(not is_native_built(), reason="the reference engine is Python")
def test_a_callback_runs_outside_the_lock(monkeypatch):
    monkeypatch.delenv("UNISONO_ENGINE", raising=False)
    results = run(bodies.callback_in_the_middle_of_a_call, 2, ranks="processes")
    assert results == [([True] * 3, [2.0] * 6)] * 2


@pytest.mark.skipif(not is_native_built(), reason="the reference engine is Python")
def test_ctrl_c_while_a_call_is_queued(monkeypatch):
    monkeypatch.delenv("UNISONO_ENGINE", raising=False)
    assert run(bodies.interrupt_while_queueing, 2, ranks="processes") == [True] * 2


@pytest.mark.skipif(not is_native_built(), reason="the reference engine is Python")
def test_signal_handlers_make_calls(monkeypatch):
    monkeypatch.delenv("UNISONO_ENGINE", raising=False)
    assert run(bodies.calls_between_all_lines, 2, ranks="processes") == [True] * 2


@pytest.mark.skipif(not is_native_built(), reason="the reference engine is Python")
def test_a_message_behind_that_of_a_call(monkeypatch):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    assert run(bodies.message_behind_a_call, 2, ranks="processes") == [True] * 2


def test_a_wait_in_a_forked_child():
    assert run(bodies.wait_in_a_forked_child, 2, ranks="processes") == [True] * 2


def test_a_fork_beside_a_call_of_another_thread():
    assert run(bodies.fork_beside_a_call, 2, ranks="processes") == [[True] * 2] * 2


def test_repeated_calls_with_lists(world):
    assert world(bodies.repeated_with_lists, 3) == ["<Work all_gather done>"] * 3


def test_one_rank_makes_the_call_in_other_words(world):
    assert world(bodies.in_other_words_among_repeated, 3) == [True] * 3


def test_an_abort_ends_repeated_calls(world):
    assert world(bodies.aborted, 2) == [None, ["CollectiveAbortedError"] * 3]


def poll_a_message_that_has_arrived(rank):
    if rank == 1:
        dist.send(np.full(3, 5.0), 0, tag=1)
        dist.send(np.full(3, 6.0), 0, tag=2)
        return None
    first, second = np.zeros(3), np.zeros(3)
    work = dist.irecv(first, 1, tag=1)
    dist.recv(second, 1, tag=2)  # the first message has come before it
    give_up = time.monotonic() + 10.0
    while not work.is_completed() and time.monotonic() < give_up:
        time.sleep(0.001)
    return work.is_completed(), first.tolist(), second.tolist()


def test_a_message_that_has_arrived_is_found_by_polling(world):
    assert world(poll_a_message_that_has_arrived, 2)[0] == (True, [5.0] * 3, [6.0] * 3)
