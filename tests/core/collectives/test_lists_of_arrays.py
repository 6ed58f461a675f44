"""Lists of arrays: results, layouts, aliasing and errors, in Python and repeated in C++."""

import numpy as np
import pytest

import unisono as dist
from unisono.errors import CollectiveMismatchError, InvalidArgumentError

THREE = pytest.mark.ranks(3, kind="both")


@THREE
def test_layouts(rank):
    p, n = dist.get_world_size(), 6
    for make in (
        lambda: np.zeros(2 * n)[::2],
        lambda: np.zeros(n, ">f8"),
        lambda: np.zeros((2, 3)).T,
        lambda: np.zeros((3, 2)),
        lambda: bytearray(8 * n),
    ):
        for _ in range(3):
            outputs = [np.zeros(n), *(make() for _ in range(p - 1))]
            raw = type(outputs[-1]) is bytearray
            if raw:
                outputs = [bytearray(8 * n) for _ in range(p)]
            mine = np.arange(n) + 10.0 * rank
            dist.all_gather(outputs, mine.view(np.uint8) if raw else mine)
            arrays = [np.frombuffer(o) if raw else np.asarray(o) for o in outputs]
            # An array that is transposed is written in C order of what it shows.
            for source, array in enumerate(arrays):
                assert array.ravel().tolist() == [10.0 * source + i for i in range(n)]


@THREE
def test_every_rank_raises_if_one_has_a_wrong_list(rank):
    """After some repetitions rank 1 has a wrong list; the next call works."""
    p, x = dist.get_world_size(), np.ones(4)
    outputs = [np.zeros(4) for _ in range(p)]
    wrong = {
        "2 entries": outputs[:-1],
        "float32": [*outputs[:-1], np.zeros(4, np.float32)],
        "5 elements": [np.zeros(5) for _ in range(p)],
    }
    for reason, bad in wrong.items():
        for _ in range(3):
            dist.all_gather(outputs, x)
        with pytest.raises((InvalidArgumentError, CollectiveMismatchError)) as caught:
            dist.all_gather(bad if rank == 1 else outputs, x)
        assert reason in str(caught.value).partition("\n")[0]
    x[:] = rank
    dist.all_gather(outputs, x)
    assert [o[3] for o in outputs] == [0, 1, 2]


@pytest.mark.ranks(2, kind="both")
def test_a_list_with_a_shorter_array_is_refused_also_if_the_call_is_known(rank):
    x, base = np.full(3, rank + 1.0), np.zeros(6)
    for _ in range(3):
        dist.all_gather([base[:3], base[3:]], x)
        assert base.tolist() == [1, 1, 1, 2, 2, 2]
    base[:] = 0
    with pytest.raises((CollectiveMismatchError, InvalidArgumentError)):
        dist.all_gather([base[:3], base[3:5]], x)
    assert not base.any()


@THREE
def test_sizes_that_change(rank):
    """A repeated gather and scatter, in which some ranks have another size now and then."""
    p = dist.get_world_size()
    for k in range(6):
        sizes = [3] * p if k % 3 else [3 + (r == p - 1) for r in range(p)]
        parts = [np.full(n, -1.0) for n in sizes]
        mine = np.full(sizes[rank], rank + k / 10)
        dist.gather(mine, parts if rank == 0 else None, dst=0)
        if rank == 0:
            assert [p.tolist() for p in parts] == [[r + k / 10] * n for r, n in enumerate(sizes)]
        dist.scatter(mine, parts if rank == 0 else None, src=0)
        assert mine.tolist() == [rank + k / 10] * sizes[rank]
