"""A few rounds of tests/faults/window_chaos.py, and the words of its errors."""

import os
import signal

import numpy as np
import pytest

import unisono as dist
from tests.faults import window_chaos
from unisono.errors import CollectiveTimeoutError, PeerLostError, UnisonoError
from unisono.testing import run


@pytest.mark.sweep(4)
@pytest.mark.parametrize("medium", list(window_chaos.MEDIA))
@pytest.mark.parametrize("way", list(window_chaos.WAYS))
@pytest.mark.parametrize("seed", [3, 10])
def test_a_rank_ends_at_a_random_moment(tmp_path, monkeypatch, seed, way, medium):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "1")
    monkeypatch.setenv("WINDOW_CHAOS_OTHERS", "1")
    window_chaos.one_round(tmp_path, seed, way, medium)


def waits_for_the_dead(rank):
    window = dist.new_window(np.zeros(2))
    window.fence()
    if rank == 1:
        window.signal(0)
        window.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    window.wait_signal(1)  # it came before the end
    found = []
    for call in (
        lambda: window.wait_signal(1, timeout=30),
        lambda: window.signal(1),
        lambda: (window.put(np.zeros(1), 1), window.flush(1)),
        lambda: window.get(np.zeros(1), 1),
        lambda: window.accumulate(np.zeros(1), 1) or window.flush(1),
    ):
        try:
            call()
        except UnisonoError as error:
            found.append((type(error), error.context.peers, error.what))
    assert window.local.tolist() == [0, 0]
    return found


@pytest.mark.parametrize("medium", list(window_chaos.MEDIA))
def test_calls_on_a_killed_rank_name_it(monkeypatch, medium):
    engine, shares = window_chaos.MEDIA[medium]
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", shares)
    found, _ = run(waits_for_the_dead, 2, ranks="processes", engine=engine, dead={1})
    assert len(found) == 5, found
    for kind, peers, text in found:
        assert kind is PeerLostError, text
        assert peers == (1,), text
        assert "in group 'default' failed on rank 0 of 2: rank 1 was lost" in text


def waits_for_the_late(rank):
    window = dist.new_window(np.zeros(2))
    dist.barrier()
    if rank == 1:
        dist.barrier()
        return
    with pytest.raises(CollectiveTimeoutError) as caught:
        window.wait_signal(1, timeout=0.3)
    first, *places = caught.value.what.splitlines()
    assert first.startswith(
        "wait_signal(src=1) in group 'default' timed out after 0.3 s on rank 0 "
    )
    assert first.endswith("rank 1 did not signal")
    # And where the late rank is; on a busy machine it may not answer in time.
    assert "rank 1 is" in places[0] or "rank 1 (process" in places[0], places
    dist.barrier()


@pytest.mark.parametrize("medium", list(window_chaos.MEDIA))
def test_a_wait_for_a_late_rank_says_where_it_is(monkeypatch, medium):
    engine, shares = window_chaos.MEDIA[medium]
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", shares)
    run(waits_for_the_late, 2, ranks="processes", engine=engine)


def closes_and_another_rank_dies(rank):
    window = dist.new_window(np.zeros(4))
    window.fence()
    if rank == 1:
        window.close()
    dist.barrier()
    if rank == 0:
        with pytest.raises(PeerLostError, match="rank 1 was lost: it closed the window"):
            window.put(np.ones(1), 1)
    dist.barrier()
    if rank == 2:
        os._exit(3)
    with pytest.raises(PeerLostError) as caught:
        dist.barrier()
    assert caught.value.context.peers == (2,), caught.value.what


@pytest.mark.parametrize("medium", list(window_chaos.MEDIA))
def test_a_rank_that_closed_its_window_is_not_blamed_later(monkeypatch, medium):
    engine, shares = window_chaos.MEDIA[medium]
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", shares)
    run(closes_and_another_rank_dies, 3, ranks="processes", engine=engine, dead={2})
