"""Lists of arrays: results, layouts, aliasing and errors, in Python and repeated in C++."""

import numpy as np
import pytest

import unisono as dist
from tests.support.operations import Operations
from tests.worlds.test_prepared import NO_RANK_1, repeats
from unisono.base import config
from unisono.errors import CollectiveMismatchError, CollectiveTimeoutError, InvalidArgumentError

NATIVE = config.get("UNISONO_ENGINE") != "reference"
THREE = pytest.mark.ranks(3, kind="both")


class Lists(Operations):
    """Lists whose arrays lie one after another, or do not."""

    rows_of_one = False

    def rooms(self, afters):
        if self.rows_of_one:
            arrays = list(np.zeros((self.p, self.count), self.dtype))
        else:
            arrays = [np.zeros(1 + x.size, x.dtype)[1:] for x in afters]
        self.made += zip(arrays, afters, strict=True)
        return arrays

    def reads(self, parts):
        arrays = self.rooms(parts)
        for array, values in zip(arrays, parts, strict=True):
            array[:] = values
        return arrays


def every_function(rank, n, dtype=np.float64, rows=False):
    """Call each function 4 times with new values; return the rounds in which C++ repeated some."""
    p, repeated = dist.get_world_size(), []
    for k in range(4):
        before = repeats()
        calls = Lists(rank, p, n, p - 1, dtype=dtype, shift=k)
        calls.rows_of_one = rows
        for name in ("all_gather", "gather", "scatter", "all_to_all", "reduce_scatter"):
            getattr(calls, name)()
        calls.check(n, k)
        dist.gather(np.zeros(n, dtype), calls.rooms([np.zeros(n, dtype)] * p) if rank == 0 else [])
        repeated.append(repeats() > before)
    return repeated


@pytest.mark.parametrize(
    ("size", "n", "rows"),
    [(1, 3, False), (2, 200_000, True), (3, 5, False), (4, 0, False), (4, 40_000, False)],
)
def test_every_function(world, size, n, rows):
    for repeated in world(every_function, size, args=(n, np.float64, rows)):
        # The first call of a group connects it; what the second has run can be repeated.
        assert repeated[2:] == [NATIVE and size > 1] * 2


@THREE
@pytest.mark.parametrize("dtype", [np.int8, np.complex128])
def test_dtypes(rank, dtype):
    every_function(rank, 1000, dtype)


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
def test_arguments_that_share_memory(rank):
    """Inputs that are a part of the output, and one input that is sent to all."""
    p = dist.get_world_size()
    for _ in range(3):
        outputs = list(np.zeros((p, 2)))
        outputs[rank][:] = rank + 1
        dist.all_gather(outputs, outputs[rank])
        assert [o[0] for o in outputs] == [1, 2, 3]
        both = [np.full(3, 10.0 * rank + r) for r in range(p)]
        dist.all_to_all(both, both[::-1])
        assert [o[0] for o in both] == [10 * source + (2 - rank) for source in range(p)]
        same, x = np.full(2, 7.0), np.zeros(2)
        dist.scatter(x, [same] * p if rank == 0 else None, src=0)
        assert x.tolist() == [7, 7]
        with pytest.raises(InvalidArgumentError, match="share memory"):
            dist.all_gather([x] * p, same)


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


@THREE
def test_a_disagreement_names_the_pair(rank):
    """The root's list fits its own array, but not what rank 1 sends after some good rounds."""
    parts = [np.zeros(3) for _ in range(dist.get_world_size())]
    text = "^.*rank 1 sends 4 elements to rank 0, which expects 3"
    for k in range(5):
        if k % 2:
            with pytest.raises(CollectiveMismatchError, match=text):
                dist.gather(np.ones(4 if rank == 1 else 3), parts if rank == 0 else None)
        else:
            dist.gather(np.ones(3), parts if rank == 0 else None)
    assert [part[0] for part in parts] == [rank == 0] * 3


@THREE
def test_asynchronous_calls_with_lists(rank):
    """Lists in calls that end later, mixed with repeated ones."""
    p = dist.get_world_size()
    for k in range(20):
        mine, outputs = np.full(3, rank + k), [np.zeros(3, np.int64) for _ in range(p)]
        again = [np.zeros(3, np.int64) for _ in range(p)]
        work = dist.all_gather(outputs, mine, async_op=True)
        dist.all_gather(again, mine)
        work.wait()
        for r in range(p):
            assert (outputs[r] == r + k).all()
            assert (again[r] == r + k).all()


@THREE
def test_a_missing_rank_is_named(rank):
    """A repeated gather that rank 1 does not call any more."""
    pg, x = dist.group.WORLD, np.ones(2)
    parts = [np.zeros(2) for _ in range(dist.get_world_size())]
    for _ in range(3):
        dist.gather(x, parts if rank == 0 else None)
    pg.set_timeout(0.5)
    if rank != 1:
        with pytest.raises(CollectiveTimeoutError, match=NO_RANK_1):
            dist.gather(x, parts if rank == 0 else None)
    pg.store.barrier("end", dist.get_world_size(), 60.0)
