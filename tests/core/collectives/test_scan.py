"""scan and exscan, against NumPy; the matrix has every reduce op and dtype."""

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import fails, finish
from tests.support.operations import Operations
from unisono.core.schedules import available
from unisono.errors import CollectiveMismatchError, UnsupportedError

Op = dist.ReduceOp


@pytest.mark.sweep(2)
@pytest.mark.ranks(1, 2, 3, 6, kind="both", engine="both")
def test_every_algorithm_and_size(rank):
    p = dist.get_world_size()
    for name, members in (("scan", range(rank + 1)), ("exscan", range(rank))):
        for algorithm in available(name, p):
            for count in (0, 1, 5, 40_000, 200_000):
                how = {"algorithm": algorithm}
                calls = Operations(rank, p, count, dtype=np.float64, how=how)
                getattr(calls, name)()
                calls.check(name, algorithm, count)
        calls = Operations(rank, p, 60, dtype=np.float64)
        # C++ runs the later ones.
        for x, calls.op, is_async in 2 * (
            (np.zeros(180)[::3].reshape(6, 10), Op.MAX, True),
            (np.zeros((6, 10), order="F"), Op.SUM, False),
            (np.zeros(60), Op.MAX, False),
            (np.zeros(60), Op.SUM, True),
        ):
            x.flat[:] = calls.value(rank)
            finish(getattr(dist, name)(x, calls.op, async_op=is_async))
            assert (x.ravel() == (calls.reduced(members) if members else calls.value(rank))).all()
    # The use of exscan: where the part of each rank begins.
    first = np.array([3 * rank + 1])
    dist.exscan(first)
    assert first[0] == (sum(3 * r + 1 for r in range(rank)) if rank else 1)


@pytest.mark.ranks(2)
def test_calls_that_do_not_match(rank):
    op = Op.MAX if rank == 0 else Op.SUM
    with fails(CollectiveMismatchError, "called scan(float64[2], MAX)"):
        dist.scan(np.ones(2), op)
    with fails(CollectiveMismatchError, "called exscan(float64[2], SUM)"):
        (dist.exscan if rank else dist.scan)(np.ones(2))
    with pytest.raises(UnsupportedError, match="MIN is not defined on complex64"):
        dist.scan(np.ones(2, np.complex64), Op.MIN)
    group = dist.new_group([1])
    if rank == 0:
        with pytest.warns(UserWarning, match="running scan on a rank that does not belong"):
            assert dist.scan(np.ones(1), group=group) is None
    dist.barrier()
