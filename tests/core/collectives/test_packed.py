"""Arrays in any layout, and AVG, in calls that C++ repeats: it packs, divides and unpacks."""

import gc
import itertools
import math
from functools import partial

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import fails
from tests.support.oracle import COMPLEX, FLOATS, INTEGERS, bits, np_dtype
from unisono.core.base.types import dtype_of_numpy
from unisono.core.engines.kernels import divide, reduce_into, scale
from unisono.core.schedules import available
from unisono.errors import CollectiveMismatchError, InvalidArgumentError

pytestmark = [pytest.mark.sweep(1), pytest.mark.native]

AVG, MAX, SUM = dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.SUM


class View:
    """A random view of this shape, and the memory around it."""

    def __init__(self, rng, shape, values):
        few = len(shape) < 5
        steps = rng.choice([-3, -2, -1, 1, 1, 2] if few else [-1, 1], len(shape)).tolist()
        order, beside = rng.permutation(len(shape)), int(few)
        sizes = [n * abs(step) + 2 * beside for n, step in zip(shape, steps, strict=True)]
        self._parts = []
        for n, step in zip(shape, steps, strict=True):
            part = slice(beside, beside + n * abs(step), abs(step))
            self._parts.append((part, slice(None, None, -1 if step < 0 else 1)))
        self._back = np.argsort(order)
        self._base = np.full([sizes[i] for i in order], 7, values.dtype)
        self.array = self._look(self._base)
        self.array[...] = values.reshape(shape)
        self._before = self._base.copy()

    def _look(self, base):
        view = base.transpose(self._back)
        for number in (0, 1):
            view = view[(*(parts[number] for parts in self._parts), ...)]
        return view

    def check(self, case, expected=None):
        """Compare with the values that it must have now; None: as before."""
        if expected is not None:
            self._look(self._before)[...] = np.reshape(expected, self.array.shape)
        assert bits(self._base) == bits(self._before), (case, self.array, expected)


def numbers(dtype, rank, count, salt):
    rng = np.random.default_rng([rank, count, salt])
    return rng.integers(0, 20, count).astype(dtype)


SHAPES = [(), (0,), (5,), (4, 3), (2, 3, 4), (1, 6, 1), (2, 1, 3, 2), (2,) * 10]


@pytest.mark.ranks(2, 3, kind="both")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_views_against_numpy(rank, shape):
    p, n = dist.get_world_size(), math.prod(shape)
    rng = np.random.default_rng([rank, *shape])
    for dtype in ("u1", "i2", "f4", "c16"):
        for salt in range(2):
            given = [numbers(dtype, r, n, salt) for r in range(p)]
            blocks = [numbers(dtype, r, p * n, salt).reshape(p, n) for r in range(p)]
            whole = (p, *shape)

            def view(values, shape=shape):
                return View(rng, shape, np.asarray(values))

            def views(rows):
                return [view(row) for row in rows]

            def zeros(shape=shape, dtype=dtype):
                return View(rng, shape, np.zeros(math.prod(shape), dtype))

            total, root = sum(given), salt % p
            mine = view(given[rank])
            dist.all_reduce(mine.array)
            mine.check("all_reduce", total)
            mine = view(given[rank])
            dist.broadcast(mine.array, root)
            mine.check("broadcast", given[root])
            mine = view(given[rank])
            dist.reduce(mine.array, root)
            mine.check("reduce", total if rank == root else None)
            mine, out = view(given[rank]), zeros(whole)
            dist.all_gather_into_tensor(out.array, mine.array)
            out.check("all_gather_into_tensor", np.stack(given))
            mine.check("input of all_gather_into_tensor")
            mine, outs = view(given[rank]), [zeros() for _ in range(p)]
            dist.all_gather([out.array for out in outs], mine.array)
            for out, expected in zip(outs, given, strict=True):
                out.check("all_gather", expected)
            mine, outs = view(given[rank]), [zeros() for _ in range(p)]
            dist.gather(mine.array, [o.array for o in outs] if rank == root else None, root)
            for out, expected in zip(outs, given, strict=True):
                out.check("gather", expected if rank == root else None)
            parts, out = views(blocks[rank]), zeros()
            dist.scatter(out.array, [x.array for x in parts] if rank == root else None, root)
            out.check("scatter", blocks[root][rank])
            parts, out = views(blocks[rank]), zeros()
            dist.reduce_scatter(out.array, [part.array for part in parts])
            out.check("reduce_scatter", sum(blocks)[rank])
            mine, out = view(blocks[rank], whole), zeros()
            dist.reduce_scatter_tensor(out.array, mine.array)
            out.check("reduce_scatter_tensor", sum(blocks)[rank])
            parts, outs = views(blocks[rank]), [zeros() for _ in range(p)]
            dist.all_to_all([out.array for out in outs], [part.array for part in parts])
            for source, out in enumerate(outs):
                out.check("all_to_all", blocks[source][rank])
            mine, out = view(blocks[rank], whole), zeros(whole)
            dist.all_to_all_single(out.array, mine.array)
            out.check("all_to_all_single", np.stack([rows[rank] for rows in blocks]))
            mine, out = view(given[rank]), zeros()
            work = dist.isend(mine.array, (rank + 1) % p)
            assert dist.recv(out.array, (rank - 1) % p) == (rank - 1) % p
            out.check("recv", given[rank - 1])
            work.wait()
            if rank == 0:
                dist.send(mine.array, 1)
            if rank == 1:
                out = zeros()
                dist.recv(out.array)
                out.check("recv of a view", given[0])


def averaged(dtype, arrays):
    """Return the average as the reference engine computes it."""
    kind, total = dtype_of_numpy(arrays[0].dtype), arrays[0].copy().view()
    stored = total.view(kind.storage)
    for other in arrays[1:]:
        reduce_into(stored, other.view(kind.storage), kind, AVG)
    divide(stored, kind, len(arrays))
    return total


def same_bits(x, expected):
    """Whether two arrays are equal in bits, but for those of NaN."""
    return bits(x) == bits(expected) or np.array_equal(x, expected, equal_nan=True)


@pytest.mark.ranks(1, 2, 3, kind="both")
def test_avg_of_every_dtype(rank):
    p = dist.get_world_size()
    odd = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3e4, 1.0, -1.0, 1e-7]
    for dtype in (*INTEGERS, *FLOATS, *COMPLEX):
        kind = np_dtype(dtype)
        if dtype in INTEGERS:
            ends = np.iinfo(kind)
            all_values = [ends.min, ends.max, 0, 1, 2, 3, ends.max // 2, ends.max // p]
            given = [np.roll(np.array(all_values, kind), r) for r in range(p)]
        else:
            with np.errstate(all="ignore"):
                given = [np.roll(odd, r * 3).astype(kind) for r in range(p)]
        with np.errstate(all="ignore"):
            # A rank's own values are not divided: complex infinities would become NaN.
            expected = averaged(dtype, given) if p > 1 else given[0]
        for _ in range(3):
            x = given[rank].copy()
            dist.all_reduce(x, AVG)
            assert same_bits(x, expected), (dtype, x, expected)
            y = given[rank].copy()
            dist.all_reduce(y, AVG, async_op=True).wait()
            assert bits(y) == bits(x), dtype
            z = np.zeros(2 * len(x), kind)[::-2]
            z[:] = given[rank]
            dist.all_reduce(z, AVG)
            assert bits(z) == bits(x), dtype


@pytest.mark.ranks(1, 2, 3, kind="both")
def test_premul_sum_of_every_dtype(rank):
    p = dist.get_world_size()
    odd = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3e4, 1.0, -1.0, 1e-7]
    # The last two round up in float16 if they are rounded to float32 before.
    factors = (1 / 3, -2.0, 0.0, 1e5, 1 + 2**-11 + 2**-30, 65519.9999999)
    for dtype, factor in itertools.product((*FLOATS, *COMPLEX), factors):
        op, kind = dist.ReduceOp.PREMUL_SUM(factor), np_dtype(dtype)
        with np.errstate(all="ignore"):
            given = [np.roll(odd, r * 3).astype(kind) for r in range(p)]
            scaled = [each.copy() for each in given]
            stored = [each.view(dtype_of_numpy(kind).storage) for each in scaled]
            for each in stored:
                scale(each, dtype_of_numpy(kind), factor)
            for each in stored[1:]:
                reduce_into(stored[0], each, dtype_of_numpy(kind), SUM)
        expected = scaled[0]
        whole, columns = np.concatenate(given), [np.zeros((10, 2), kind)[:, 1] for _ in given]
        for k in range(3):
            view = np.zeros(20, kind)[::-2]
            for x in (given[0].copy(), view):
                x[:] = given[rank]
                work = dist.all_reduce(x, op, async_op=k == 2)
                if work is not None:
                    work.wait()
                    assert work.result()[0] is x
                assert same_bits(x, expected), (dtype, factor, x, expected)
            part, before = np.zeros(10, kind), whole.copy()
            dist.reduce_scatter_tensor(part, whole, op)
            assert bits(whole) == bits(before)
            for column, values in zip(columns, given, strict=True):
                column[:] = values
            listed = np.zeros(10, kind)
            dist.reduce_scatter(listed, columns, op)
            assert same_bits(listed, part), (dtype, factor)
            assert all(bits(c) == bits(v) for c, v in zip(columns, given, strict=True))
            root = given[rank].copy()
            dist.reduce(root, 0, op)
            assert same_bits(root, expected if rank == 0 else given[rank])


@pytest.mark.ranks(3, kind="both")
def test_avg_divides_by_the_ranks_that_contribute(rank):
    for _ in range(3):
        x = np.full(3, 6.0 * (rank + 1))
        dist.scan(x, AVG)
        assert x.tolist() == [[6.0] * 3, [9.0] * 3, [12.0] * 3][rank]
        x = np.full(3, 6.0 * (rank + 1))
        dist.exscan(x, AVG)
        assert x.tolist() == [[6.0] * 3, [6.0] * 3, [9.0] * 3][rank]
        x = np.full(3, 6.0 * (rank + 1))
        dist.reduce(x, 1, AVG)
        assert x.tolist() == [12.0 if rank == 1 else 6.0 * (rank + 1)] * 3
        out = np.zeros(1)
        dist.reduce_scatter_tensor(out, np.arange(3.0) * (rank + 1), AVG)
        assert out[0] == 2.0 * rank


@pytest.mark.ranks(3, kind="both")
def test_a_reduce_keeps_the_tensors_of_other_ranks(rank):
    for algorithm in available("reduce", 3):
        for root in range(3):
            for _ in range(2):
                table = np.full((5, 2), rank + 1.0)
                dist.reduce(table[:, 1], root, algorithm=algorithm)
                whole = np.full(5, rank + 1.0)
                dist.reduce(whole, root, algorithm=algorithm)
                expected = 6.0 if rank == root else rank + 1.0
                assert table.tolist() == [[rank + 1.0, expected]] * 5, algorithm
                assert whole.tolist() == [expected] * 5, algorithm


@pytest.mark.ranks(3, kind="both")
def test_a_failed_call_leaves_a_view_as_it_was(rank):
    table = np.arange(12.0).reshape(4, 3)
    for _ in range(3):
        before = table.copy()
        x = table[:, rank]
        with fails(CollectiveMismatchError, "all_reduce(float64[4], SUM)"):
            dist.broadcast(x, 0) if rank == 1 else dist.all_reduce(x)
        with fails(CollectiveMismatchError, "all_reduce(float64[4], SUM)"):
            call = partial(dist.broadcast, x, 0) if rank == 1 else partial(dist.all_reduce, x)
            call(async_op=True).wait()
        assert (table == before).all()
        dist.all_reduce(x)
        rest = [r for r in range(3) if r != rank]
        assert (table[:, rest] == before[:, rest]).all()
        table[:, rank] = before[:, rank]


@pytest.mark.ranks(3, kind="both")
def test_views_in_an_uneven_exchange(rank):
    """C++ has begun the call when the ranks find that their sizes differ."""
    splits = [1, 0, 2] if rank == 1 else [1, 2, 0]
    expected = [[0, 10, 20], [1, 21, 22], [2, 11, 12]][rank]
    for k in range(4):
        out, x = np.full((3, 2), -1), np.full((3, 2), -1)
        x[:, 1] = np.arange(3) + 10 * rank
        sizes = () if k == 0 or rank == 0 else (splits, splits)
        dist.all_to_all_single(out[:, 0], x[:, 1], *sizes, async_op=True).wait()
        if k % 2:
            out[:] = -1
            dist.all_to_all_single(out[:, 0], x[:, 1], *sizes)
        even = [rank, 10 + rank, 20 + rank]
        assert out[:, 0].tolist() == (expected if k else even)
        assert out[:, 1].tolist() == [-1] * 3


@pytest.mark.ranks(2, kind="both")
def test_what_cannot_be_packed_is_refused(rank):
    for _ in range(3):
        x = np.arange(8.0)[::2]
        dist.all_reduce(x)
        x.flags.writeable = False
        with fails(InvalidArgumentError, "tensor is read-only"):
            dist.all_reduce(x)
        with fails(InvalidArgumentError, "overlaps itself"):
            dist.all_reduce(np.lib.stride_tricks.as_strided(np.ones(4), (4,), (0,)))
        one = np.lib.stride_tricks.as_strided(np.full(1, 3.0 + rank), (4,), (0,))
        out = np.zeros((2, 4))
        dist.all_gather_into_tensor(out, one)
        assert out.tolist() == [[3.0] * 4, [4.0] * 4]
        table = np.zeros((3, 4))
        for part in (np.s_[:2], np.s_[:, :3], np.s_[:, 1:]):
            # Calls of the same kind, which C++ repeats.
            outs = [np.zeros((3, 4))[part] for _ in range(2)]
            dist.all_gather(outs, np.ones(outs[0].shape))
        for columns in ([table[:2], table[1:]], [table[:, :3], table[:, 1:]]):
            with fails(InvalidArgumentError, "share memory"):
                dist.all_gather(columns, np.ones(columns[0].shape))
        dist.all_gather([table[:, :2], table[:, 2:]], np.full((3, 2), rank + 1.0))
        assert table.tolist() == [[1.0, 1.0, 2.0, 2.0]] * 3


@pytest.mark.ranks(2, kind="both")
def test_inputs_inside_outputs(rank):
    for _ in range(3):
        whole = np.full((2, 3), -1.0)
        whole[rank] = rank + 1
        dist.all_gather_into_tensor(whole, whole[rank])
        assert whole.tolist() == [[1.0] * 3, [2.0] * 3]
        whole = np.arange(6.0).reshape(2, 3)
        dist.reduce_scatter_tensor(whole[0], whole)
        assert whole.tolist() == [[[0, 2, 4], [6, 8, 10]][rank], [3, 4, 5]]
        outs = [np.zeros(2), np.zeros(2)]
        outs[1 - rank][:] = rank + 5
        dist.all_gather(outs, outs[1 - rank])
        assert [out.tolist() for out in outs] == [[5.0] * 2, [6.0] * 2]


@pytest.mark.ranks(2, kind="both")
def test_calls_in_flight_have_their_own_copies(rank):
    # In the second round C++ makes the copies.
    for _ in range(2):
        table = np.arange(4.0)[:, None] * np.ones(64) + rank
        columns = [table[:, k] for k in range(64)]
        works = [dist.all_reduce(column, async_op=True) for column in columns]
        dist.all_reduce(table[:, 0])
        for column, work in zip(columns, works, strict=True):
            work.wait()
            assert work.result()[0] is column
        del work, works, columns
        gc.collect()
        once = 2 * np.arange(4.0) + 1
        assert (table[:, 1:] == once[:, None]).all()
        assert (table[:, 0] == 2 * once).all()
        # A call in flight fills its copy in its turn.
        x, out = np.full((2, 2), rank + 1.0)[:, 1], np.zeros((2, 2, 2))[..., 0]
        works = [dist.all_reduce(x, async_op=True)]
        works.append(dist.all_gather_into_tensor(out, x, async_op=True))
        works.append(dist.all_gather_into_tensor(out, out[rank], async_op=True))
        for work in works:
            work.wait()
        assert out.tolist() == [[3.0] * 2] * 2
        whole = np.full((3, 2), rank + 1.0)
        work = dist.reduce(whole, 0, async_op=True)
        work.wait()
        assert work.result()[0] is whole
        assert whole.tolist() == [[3.0 if rank == 0 else 2.0] * 2] * 3


@pytest.mark.ranks(2, kind="both")
def test_a_shorter_message_into_a_view(rank):
    for _ in range(3):
        if rank == 0:
            dist.send(np.arange(3.0), 1)
            dist.send(np.arange(8.0)[::2], 1)
            dist.send(np.ones(5), 1)
        else:
            table = np.full((4, 2), -1.0)
            assert dist.recv(table[:, 1], 0, partial=True) == 3
            assert table.tolist() == [[-1, 0], [-1, 1], [-1, 2], [-1, -1]]
            assert dist.recv(table[::-1, 0], partial=True) == 4
            assert table[:, 0].tolist() == [6, 4, 2, 0]
            with pytest.raises(CollectiveMismatchError):
                dist.recv(table[:, 0], 0, partial=True)
            assert table[:, 0].tolist() == [6, 4, 2, 0]


@pytest.mark.ranks(3, kind="both")
def test_a_new_shape_of_a_known_call(rank):
    for n in range(1, 9):
        for shape in ((n,), (n, 2), (2, n, 1)):
            for op, expected in ((SUM, 6.0), (MAX, 3.0), (AVG, 2.0)):
                x = np.full(shape, rank + 1.0)
                dist.all_reduce(x, op)
                assert (x == expected).all()
            x = np.full(shape, float(rank))
            dist.broadcast(x, n % 3)
            assert (x == n % 3).all()
    # Too large for the algorithm of the small ones.
    x = np.full(100_000, rank + 1.0)
    dist.all_reduce(x)
    assert (x == 6).all()
    with fails(CollectiveMismatchError, "float64[3, 4]", "float64[4, 3]"):
        dist.all_reduce(np.ones((3, 4) if rank else (4, 3)))
