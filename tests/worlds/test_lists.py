"""Lists of arrays: results, layouts, aliasing and errors, in Python and repeated in C++."""

import re

import numpy as np
import pytest

from tests.worlds import list_bodies as bodies
from tests.worlds.quick_bodies import NO_RANK_1
from unisono.base import config
from unisono.engines import is_native_built

NATIVE = is_native_built() and config.get("UNISONO_ENGINE") != "reference"


@pytest.mark.parametrize(
    ("size", "n", "rows"),
    [(1, 3, False), (2, 200_000, True), (3, 5, False), (4, 0, False), (4, 40_000, False)],
)
def test_every_function(world, size, n, rows):
    for wrong, quick in world(bodies.every_function, size, args=(n, np.float64, rows)):
        assert wrong == 0
        # The first call of a group connects it; what the second has run can be repeated.
        assert quick[2:] == [NATIVE and size > 1] * 2


@pytest.mark.parametrize("dtype", [np.int8, np.complex128])
def test_dtypes(world, dtype):
    for wrong, _ in world(bodies.every_function, 3, args=(1000, dtype, False)):
        assert wrong == 0


def test_layouts(world):
    for results in world(bodies.layouts, 3):
        for k, arrays in enumerate(results):
            for rank, values in enumerate(arrays):
                # An array that is transposed is read and written in C order of what it shows.
                assert values == [10.0 * rank + i for i in range(6)], (k, rank)


def test_shared_memory_of_arguments(world):
    for rank, results in enumerate(world(bodies.shared_memory_of_arguments, 3)):
        gathered = [1.0, 2.0, 3.0]
        swapped = [10.0 * source + (2 - rank) for source in range(3)]
        assert results == [gathered, swapped, [7.0, 7.0], True] * 3


def test_a_wrong_list_on_one_rank_is_told_to_all(world):
    results = world(bodies.wrong_on_one_rank, 3)
    for rank, (texts, last) in enumerate(results):
        assert last == [0.0, 1.0, 2.0]
        assert len(texts) == 3
        for text, reason in zip(texts, ("2 entries", "float32", "5 elements"), strict=True):
            assert reason in text, (rank, text)


def test_sizes_that_change(world):
    for rank, rounds in enumerate(world(bodies.sizes_change, 3)):
        for k, parts in enumerate(rounds):
            last = 3 if k % 3 else 4
            expected = [[r + k / 10] * n for r, n in enumerate((3, 3, last))]
            assert parts == (expected if rank == 0 else [])


def test_a_disagreement_names_the_pair(world):
    for rank, (texts, first) in enumerate(world(bodies.disagreement, 3)):
        assert [k for k, _ in texts] == [1, 3]
        for _, text in texts:
            assert "rank 1 sends 4 elements to rank 0, which expects 3" in text
        assert first == ([1.0] * 3 if rank == 0 else [0.0] * 3)


def test_asynchronous_calls_with_lists(world):
    assert world(bodies.asynchronous, 3) == [0, 0, 0]


def test_a_missing_rank_is_named(world):
    results = world(bodies.missing, 3, args=(1.0,))
    assert results[1] is None
    for told in (results[0], results[2]):
        assert re.search(NO_RANK_1, told)
