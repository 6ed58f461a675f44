"""What the engines could do differently, and must not."""

import itertools

import numpy as np
import pytest

import unisono as dist
from tests.support.operations import Operations
from unisono.base import log
from unisono.engines import shared_memory
from unisono.errors import UnsupportedError
from unisono.testing import run

BOTH = pytest.mark.parametrize("engine", ["native", "reference"])


@pytest.mark.ranks(3, engine="both")
def test_the_root_of_a_broadcast_may_be_read_only(rank):
    values = np.arange(5.0) if rank == 1 else np.zeros(5)
    values.flags.writeable = rank != 1
    dist.broadcast(values, src=1)
    assert values.tolist() == [0, 1, 2, 3, 4]


def shown(rank):
    return repr(dist.group.WORLD), repr(dist.new_group([1, 0], sort_ranks=False))


@BOTH
def test_a_group_and_its_sub_group_have_the_engine_that_was_asked_for(engine, caplog, monkeypatch):
    monkeypatch.setattr(log, "_logged", set())
    for group, part in run(shown, 2, engine=engine):
        assert f"engine={engine}" in group
        assert f"engine={engine}" in part
    assert "slow" not in caplog.text


def test_native_is_refused_where_it_cannot_be(monkeypatch):
    monkeypatch.setattr("unisono.base.seam._extension", None)
    monkeypatch.setattr("unisono.engines.choice.why_absent", "it is not built")
    with pytest.raises(UnsupportedError, match="cannot use the native engine: it is not built"):
        run(shown, 2, engine="native")


class Exchange(Operations):
    """Calls in which rank i has `numbers[i, j]` elements for rank j."""

    def table(self):
        return self.numbers


@pytest.mark.ranks(2, 3, 5, engine="both")
def test_uneven_exchange(rank):
    """all_to_all of blocks from nothing to several pieces of a slot, as one array and as lists."""
    p = dist.get_world_size()
    random = np.random.default_rng(p)
    sizes = random.choice([0, 1, 7, 1000, 70_000, 300_000], (p, p))
    calls = Exchange(rank, p, dtype=np.float64, uneven=True)
    calls.numbers = sizes
    calls.all_to_all_single()
    calls.all_to_all()
    calls.check(sizes)
    # Lists of neighbours are used in place, also where they are input and output.
    (out, expected), (sent, _) = calls.made[:2]
    out[:] = -1
    ends = np.cumsum([0, *sizes[:, rank]])
    together = [out[a:b] for a, b in itertools.pairwise(ends)]
    dist.all_to_all(together, np.split(sent, np.cumsum(sizes[rank])[:-1]))
    assert (out == expected).all()


@pytest.mark.ranks(3, engine="both")
def test_lists_of_neighbours(rank):
    """Collectives on lists whose arrays are rows of one, some of which are the input as well."""
    p, n = dist.get_world_size(), 5
    grid = np.full((p, n), -1.0)
    grid[rank] = np.arange(n) + 10 * rank
    whole = np.arange(n) + 10.0 * np.arange(p)[:, None]
    dist.all_gather(list(grid), grid[rank])
    assert (grid == whole).all()
    mixed = grid[::-1].copy()
    dist.all_gather(list(mixed), mixed[p - 1 - rank])
    assert (mixed == whole).all()
    mixed = np.zeros((p, n))
    dist.gather(whole[rank], list(mixed) if rank == 0 else None)
    assert (mixed == (whole if rank == 0 else 0)).all()
    part = np.zeros(n)
    dist.scatter(part, list(whole) if rank == 0 else None)
    assert (part == whole[rank]).all()
    rows = whole.copy()
    dist.reduce_scatter(rows[0], list(rows))
    assert (rows[0] == p * whole[rank]).all()
    assert (rows[1:] == whole[1:]).all()
    rows = whole.copy()
    dist.all_to_all(list(rows), list(rows))
    assert (rows == whole[rank]).all()
    rows = whole.copy()
    dist.reduce_scatter(part, list(rows), dist.ReduceOp.PREMUL_SUM(2.0))
    assert (part == 2 * p * whole[rank]).all()
    assert (rows == whole).all()


def sum_and_engine(rank):
    values = np.full(100_000, rank + 1.0)
    dist.all_reduce(values)
    return float(values[0]), float(values[-1]), repr(dist.group.WORLD)


@pytest.mark.native
def test_memory_is_shared_only_where_its_nonce_is_found(monkeypatch, caplog):
    """Hosts may look alike in every word, such as two copies of one virtual machine."""
    real = shared_memory._engine

    class OtherMemory:
        create = real.Segment.create

        @staticmethod
        def attach(pid, fd, nonce):
            return real.Segment.attach(pid, fd, bytes(len(nonce)))

    class Engine:
        Segment = OtherMemory

        def __getattr__(self, name):
            return getattr(real, name)

    monkeypatch.setattr(shared_memory, "_engine", Engine())
    monkeypatch.setattr(log, "_logged", set())
    for first, last, group in run(sum_and_engine, 3, engine="native"):
        assert (first, last) == (6.0, 6.0)
        assert "engine=native over=messages" in group
    (told,) = [r for r in caplog.records if "cannot share memory" in r.message]
    assert "(it is not the same)" in told.message
