"""Several tensors as one message, of any layout, against NumPy."""

import numpy as np
import pytest

import unisono as dist


def layouts(values):
    """Return an array with these values in C order, of each layout."""
    flat = np.asarray(values, np.float32)
    strided = np.zeros(2 * flat.size, np.float32)[::2]
    backward = np.zeros(flat.size, np.float32)[::-1]
    fortran = np.zeros((flat.size // 2, 2), np.float32, order="F")
    for array in (strided, backward):
        array[:] = flat
    fortran[:] = flat.reshape(-1, 2)
    return [flat.copy(), strided, backward, fortran, np.zeros(0, np.float32)]


def data(rank, count):
    return np.arange(count) + 100 * rank


@pytest.mark.ranks(1, 2, 3, 5, engine="both")
def test_several_tensors_in_one_call(rank):
    pg = dist.group.WORLD
    p, n = pg.size(), 6
    zeros = np.zeros(p * n)
    outs = layouts(zeros)
    pg.all_gather_into_tensor_coalesced(outs, layouts(data(rank, n)))
    whole = np.concatenate([data(r, n) for r in range(p)])
    for out in outs[:-1]:
        assert (out.ravel() == whole).all(), out
    outs = layouts(np.zeros(n))
    ins = layouts(data(rank, p * n))
    pg.reduce_scatter_tensor_coalesced(outs, ins, dist.ReduceOp.SUM)
    expected = sum(data(r, p * n) for r in range(p))[rank * n : (rank + 1) * n]
    for out in outs[:-1]:
        assert (out.ravel() == expected).all(), out
    assert all((i.ravel() == data(rank, p * n)).all() for i in ins[:-1]), "inputs keep their values"
    ones = [np.full(p, rank + 1.0), np.full(2 * p, 1.0)]
    outs = [np.zeros(1), np.zeros(2)]
    factor = dist.ReduceOp.PREMUL_SUM(2)
    pg.reduce_scatter_tensor_coalesced(outs, ones, factor, async_op=True).wait()
    assert outs[0].tolist() == [p * (p + 1)]
    assert outs[1].tolist() == [2 * p] * 2
