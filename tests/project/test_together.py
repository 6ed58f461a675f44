"""What a test sees if one of several calls at the same time fails: tests/support/together.py."""

from functools import partial

import numpy as np
import pytest

import unisono as dist
from tests.support.together import on_threads
from unisono.core.groups.world import World, use
from unisono.errors import PeerLostError


def test_the_error_of_the_rank_that_failed_is_raised_and_not_its_consequence():
    store = dist.HashStore()

    def body(rank):
        with use(World()):
            dist.init_process_group(store=store, rank=rank, world_size=3, timeout=60)
            try:
                if rank == 2:
                    assert rank == 3, "wrong rank"
                dist.all_reduce(np.zeros(1))
            finally:
                dist.destroy_process_group()

    with pytest.raises(AssertionError, match="wrong rank") as caught:
        on_threads(*(partial(body, rank) for rank in range(3)))
    [note] = caught.value.__notes__
    first, *others = note.split("\n\n")
    assert first.startswith("rank 2 of 3 (thread): AssertionError: wrong rank\n")
    assert 'assert rank == 3, "wrong rank"' in first
    assert "PeerLostError" in note
    assert "rank 2" in others[0]


def test_consequences_alone_are_raised_in_their_order():
    def fail(text):
        raise PeerLostError(text)

    with pytest.raises(PeerLostError, match="one of them"):
        on_threads(partial(fail, "one of them"), list)


def test_results_have_the_order_of_the_calls():
    assert on_threads(partial(divmod, 7, 2), partial(abs, -5)) == [(3, 1), 5]
