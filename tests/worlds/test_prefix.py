"""scan and exscan, for every reduce op and dtype, against NumPy."""

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import fails
from unisono.base.types import all_dtypes, require_reducible
from unisono.errors import CollectiveMismatchError, UnsupportedError
from unisono.schedules import available

Op = dist.ReduceOp
UFUNCS = {
    Op.SUM: np.add, Op.AVG: np.add, Op.PREMUL_SUM(2): np.add, Op.PRODUCT: np.multiply,
    Op.MIN: np.minimum, Op.MAX: np.maximum,
    Op.BAND: np.bitwise_and, Op.BOR: np.bitwise_or, Op.BXOR: np.bitwise_xor,
}  # fmt: skip
PLAIN = [dtype for dtype in all_dtypes() if dtype.kind != "x" and dtype.name != "bfloat16"]


def data(rank, count, dtype):
    """Whole numbers of -3..3 (0 and 1 for bool), whose reductions are exact."""
    numbers = (np.arange(count) * 3 + rank * 5) % 7 - 3
    if dtype.kind == "b":
        return numbers > 0
    if dtype.kind == "u":
        numbers = abs(numbers)
    return numbers.astype(dtype.storage)


def expected(rank, members, count, dtype, op):
    if members == 0:
        return data(rank, count, dtype)
    parts = [data(r, count, dtype) for r in range(members)]
    if op.factor is not None:
        parts = [part * dtype.storage.type(op.factor) for part in parts]
    with np.errstate(all="ignore"):
        total = UFUNCS[op].reduce(parts, axis=0, dtype=dtype.storage)
    if op is not Op.AVG:
        return total
    if dtype.kind in "iu":
        return np.trunc(total / members).astype(dtype.storage)
    return total / dtype.storage.type(members)


@pytest.mark.sweep(4)
@pytest.mark.ranks(1, 2, 3, 6, kind="both", engine="both")
def test_every_op_and_dtype(rank):
    for dtype in PLAIN:
        for op in UFUNCS:
            try:
                require_reducible(dtype, op)
            except UnsupportedError:
                continue
            for name, members in (("scan", rank + 1), ("exscan", rank)):
                x = data(rank, 9, dtype)
                assert getattr(dist, name)(x, op) is None
                want = expected(rank, members, 9, dtype, op)
                assert x.dtype == want.dtype
                assert (x == want).all(), (name, dtype.name, op, rank, x, want)


@pytest.mark.sweep(4)
@pytest.mark.ranks(1, 2, 3, 6, kind="both", engine="both")
def test_every_algorithm_and_size(rank):
    p, float64 = dist.get_world_size(), next(d for d in PLAIN if d.name == "float64")
    for name, members in (("scan", rank + 1), ("exscan", rank)):
        call = getattr(dist, name)
        for algorithm in available(name, p):
            for count in (0, 1, 5, 40_000, 200_000):
                x = data(rank, count, float64)
                call(x, algorithm=algorithm)
                want = expected(rank, members, count, float64, Op.SUM)
                assert (x == want).all(), (name, algorithm, count)
        x = data(rank, 60, float64)
        every_third = np.zeros(180)[::3]
        every_third[:] = x
        work = call(every_third, Op.MAX, async_op=True)
        work.wait()
        assert (every_third == expected(rank, members, 60, float64, Op.MAX)).all()
        turned = np.asfortranarray(x.reshape(6, 10))
        call(turned)
        assert (turned.ravel() == expected(rank, members, 60, float64, Op.SUM)).all()
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
