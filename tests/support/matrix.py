"""Every operation on arrays of every dtype and layout, against the oracle."""

import hashlib
import warnings
from collections import Counter

import numpy as np

import unisono as dist
from tests.support.oracle import (
    ALL_OPS,
    DTYPES,
    REDUCE_OPS,
    Placed,
    bits,
    check,
    layouts,
    np_dtype,
    reduce_op,
    reduction,
    values,
)  # fmt: skip
from unisono.errors import InvalidArgumentError, UnsupportedError


class Maker:
    """Makes arrays of one dtype, layout and library."""

    def __init__(self, dtype, layout, library):
        self.dtype, self.layout, self.library = dtype, layout, library

    def full(self, data):
        return Placed(data, self.layout, self.library)

    def empty(self, count):
        data = np.zeros(count, np_dtype(self.dtype))
        data.view(np.uint8)[:] = 1
        return self.full(data)


def arrays(placed):
    return [one.array for one in placed]


class Matrix:
    """One rank's run of the matrix.

    Attributes:
        cells: How often each (operation, dtype, reduce op, outcome) was seen.
        digest: Of what must be equal on all ranks.
    """

    def __init__(self, rank, library):
        self.rank, self.p, self.library = rank, dist.get_world_size(), library
        self.cells, self.digest = Counter(), hashlib.sha256()
        self.case = ()

    def see(self, name, make, got, expected, slack=None, op=""):
        """Compare, and count the cell."""
        check((*self.case, name, op), got.elements(), expected, slack)
        self.cells[name, make.dtype, op, "equal" if slack is None else "rounded"] += 1

    def unchanged(self, name, inputs, before):
        for one, data in zip(inputs, before, strict=True):
            assert bits(one.elements()) == bits(data), f"{(*self.case, name)}: an input was changed"

    def blocks(self, dtype, count):
        """Return [from][to] blocks."""
        return [[values(dtype, r, count, 1 + to) for to in range(self.p)] for r in range(self.p)]

    # ---- operations that move ---------------------------------------------------------------

    def move(self, make, count):
        """Run all operations that only move data, with blocks of `count` elements."""
        rank, p, root, dtype = self.rank, self.p, self.p // 2, make.dtype
        mine = [values(dtype, r, count) for r in range(p)]

        x = make.full(mine[rank])
        dist.broadcast(x.array, root)
        self.see("broadcast", make, x, mine[root])

        x, outs = make.full(mine[rank]), [make.empty(count) for _ in range(p)]
        dist.all_gather(arrays(outs), x.array)
        for r in range(p):
            self.see("all_gather", make, outs[r], mine[r])
        outs = [make.empty(count) for _ in range(p)]
        dist.gather(x.array, arrays(outs) if rank == root else None, root)
        if rank == root:
            for r in range(p):
                self.see("gather", make, outs[r], mine[r])
        flat = make.empty(p * count)
        dist.all_gather_into_tensor(flat.array, x.array)
        self.see("all_gather_into_tensor", make, flat, np.concatenate(mine))
        self.unchanged("all_gather", [x], [mine[rank]])
        self.move_several(make, count)

        block = self.blocks(dtype, count)
        ins, out = [make.full(b) for b in block[rank]], make.empty(count)
        dist.scatter(out.array, arrays(ins) if rank == root else None, root)
        self.see("scatter", make, out, block[root][rank])
        outs = [make.empty(count) for _ in range(p)]
        dist.all_to_all(arrays(outs), arrays(ins))
        for r in range(p):
            self.see("all_to_all", make, outs[r], block[r][rank])
        self.unchanged("all_to_all", ins, block[rank])
        if make.layout in ("contiguous", "strided") and (p <= 4 or count > p):
            self.move_uneven(make, count)
        self.send(make, count)

    def move_several(self, make, count):
        """all_gather of a list of tensors."""
        p, rank = self.p, self.rank
        sizes = (count, count + 1)
        inputs = [make.full(values(make.dtype, rank, n)) for n in sizes]
        rows = [[make.empty(n) for n in sizes] for _ in range(p)]
        dist.all_gather_coalesced([arrays(row) for row in rows], arrays(inputs))
        for r in range(p):
            for got, n in zip(rows[r], sizes, strict=True):
                self.see("all_gather_coalesced", make, got, values(make.dtype, r, n))

    def move_uneven(self, make, count):
        """Lists whose arrays differ in size: rank r has count + r % 3 elements."""
        rank, p, root, dtype = self.rank, self.p, 0, make.dtype
        sizes = [count + r % 3 for r in range(p)]
        x = make.full(values(dtype, rank, sizes[rank]))
        outs = [make.empty(n) for n in sizes]
        dist.all_gather(arrays(outs), x.array)
        for r, n in enumerate(sizes):
            self.see("all_gather (uneven)", make, outs[r], values(dtype, r, n))
        outs = [make.empty(n) for n in sizes]
        dist.gather(x.array, arrays(outs) if rank == root else None, root)
        if rank == root:
            for r, n in enumerate(sizes):
                self.see("gather (uneven)", make, outs[r], values(dtype, r, n))
        ins = [make.full(values(dtype, root, n, 1)) for n in sizes]
        out = make.empty(sizes[rank])
        dist.scatter(out.array, arrays(ins) if rank == root else None, root)
        self.see("scatter (uneven)", make, out, values(dtype, root, sizes[rank], 1))

    def send(self, make, count):
        """To the next rank, from the one before, and from any."""
        rank, p = self.rank, self.p
        x, out = make.full(values(make.dtype, rank, count)), make.empty(count)
        before = values(make.dtype, (rank - 1) % p, count)
        for tag, source in enumerate([(rank - 1) % p, None]):
            out = make.empty(count)
            works = [dist.irecv(out.array, source, tag=tag)]
            works.append(dist.isend(x.array, (rank + 1) % p, tag=tag))
            for work in works:
                work.wait()
            name = "isend + irecv" if tag == 0 else "irecv from any"
            self.see(name, make, out, before)

    def move_rows(self, make):
        """all_to_all_single of rows, in equal and in uneven parts."""
        rank, p, width = self.rank, self.p, 3

        def sent(r, to):
            return (r * 2 + to) % 3

        for what, rows in (("equal", lambda r, to: 2), ("uneven", sent)):
            parts = [
                [values(make.dtype, r, rows(r, to) * width, to) for to in range(p)]
                for r in range(p)
            ]
            mine = np.concatenate(parts[rank])
            expected = np.concatenate([parts[r][rank] for r in range(p)])
            x, out = make.full(mine), make.empty(expected.size)
            ins, outs = [rows(rank, to) for to in range(p)], [rows(r, rank) for r in range(p)]
            if make.layout != "fortran":
                ins, outs = [n * width for n in ins], [n * width for n in outs]
            else:  # Placed gives Fortran arrays [size/3, 3] if the size is a multiple of 3
                assert x.array.shape[1:] == (width,)
            splits = (None, None) if what == "equal" else (outs, ins)
            dist.all_to_all_single(out.array, x.array, *splits)
            name = "all_to_all_single" + ("" if what == "equal" else " (uneven)")
            self.see(name, make, out, expected)
            self.unchanged(name, [x], [mine])

    # ---- operations that reduce -------------------------------------------------------------

    def reduce(self, make, count, op):
        """Run all operations that reduce."""
        rank, p, root, dtype, how = self.rank, self.p, self.p - 1, make.dtype, reduce_op(op)
        mine = values(dtype, rank, count)
        expected = reduction(dtype, op, p, count)
        x = make.full(mine)
        dist.all_reduce(x.array, how)
        self.see("all_reduce", make, x, *expected, op)
        self.digest.update(bits(x.elements()))

        x = make.full(mine)
        dist.reduce(x.array, root, how)
        if rank == root:
            self.see("reduce", make, x, *expected, op)
        else:
            self.unchanged("reduce", [x], [mine])

        sizes = (count, count + 2)
        pair = [make.full(values(dtype, rank, n)) for n in sizes]
        dist.all_reduce_coalesced(arrays(pair), how)
        for got, n in zip(pair, sizes, strict=True):
            self.see("all_reduce_coalesced", make, got, *reduction(dtype, op, p, n), op)
            self.digest.update(bits(got.elements()))

        block, expected = self.blocks(dtype, count), reduction(dtype, op, p, count, 1 + rank)
        ins, out = [make.full(b) for b in block[rank]], make.empty(count)
        dist.reduce_scatter(out.array, arrays(ins), how)
        self.see("reduce_scatter", make, out, *expected, op)
        self.unchanged("reduce_scatter", ins, block[rank])
        whole, out = make.full(np.concatenate(block[rank])), make.empty(count)
        dist.reduce_scatter_tensor(out.array, whole.array, how)
        self.see("reduce_scatter_tensor", make, out, *expected, op)
        self.unchanged("reduce_scatter_tensor", [whole], [np.concatenate(block[rank])])

    def reduce_beyond_torch(self, make, count, op):
        """Prefix reductions, and reduce_scatter of blocks of different size."""
        rank, dtype, how = self.rank, make.dtype, reduce_op(op)
        mine = values(dtype, rank, count)
        x = make.full(mine)
        dist.scan(x.array, how)
        self.see("scan", make, x, *reduction(dtype, op, rank + 1, count), op)
        x = make.full(mine)
        dist.exscan(x.array, how)
        if rank == 0:
            self.unchanged("exscan", [x], [mine])
        else:
            self.see("exscan", make, x, *reduction(dtype, op, rank, count), op)
        sizes = [count + r % 3 for r in range(self.p)]
        ins = [make.full(values(dtype, rank, n, 1 + to)) for to, n in enumerate(sizes)]
        out = make.empty(sizes[rank])
        dist.reduce_scatter(out.array, arrays(ins), how)
        expected = reduction(dtype, op, self.p, sizes[rank], 1 + rank)
        self.see("reduce_scatter (uneven)", make, out, *expected, op)

    # ---- what is refused --------------------------------------------------------------------

    def refuse(self, make, op):
        """A reduce op that the dtype lacks is refused on every rank, before anything is sent."""
        how, p = reduce_op(op), self.p
        x, xs = make.empty(1).array, [make.empty(1).array for _ in range(p)]
        whole = make.empty(p).array
        parts = [make.empty(1 + r % 3).array for r in range(p)]
        mine = make.empty(1 + self.rank % 3).array
        calls = {
            "all_reduce": lambda: dist.all_reduce(x, how),
            "reduce": lambda: dist.reduce(x, 0, how),
            "all_reduce_coalesced": lambda: dist.all_reduce_coalesced(xs, how),
            "reduce_scatter": lambda: dist.reduce_scatter(x, xs, how),
            "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(x, whole, how),
            "reduce_scatter (uneven)": lambda: dist.reduce_scatter(mine, parts, how),
            "scan": lambda: dist.scan(x, how),
            "exscan": lambda: dist.exscan(x, how),
        }
        for name, call in calls.items():
            told = self.error_of(call, UnsupportedError, (make.dtype, name, op))
            assert f"reduce op {op} is not defined on {make.dtype} " in told, told
            self.cells[name, make.dtype, op, "UnsupportedError"] += 1

    def refuse_sizes(self, make):
        """One element more or less than the ranks can share equally is refused on every rank."""
        p = self.p
        for extra in (-1, 1):
            one, whole = make.empty(2).array, make.empty(2 * p + extra).array
            calls = {
                "all_gather_into_tensor": lambda a, b: dist.all_gather_into_tensor(b, a),
                "reduce_scatter_tensor": lambda a, b: dist.reduce_scatter_tensor(a, b),
            }
            if p > 2:
                calls["all_to_all_single"] = lambda a, b: dist.all_to_all_single(b, b)
            for name, call in calls.items():
                told = self.error_of(
                    lambda call=call, one=one, whole=whole: call(one, whole),
                    InvalidArgumentError,
                    (make.dtype, name, extra),
                )
                assert str(2 * p + extra) in told, (name, told)
                self.cells[name, "", f"{extra:+d} element", "InvalidArgumentError"] += 1

    def error_of(self, call, error, case):
        try:
            call()
        except error as raised:
            self.digest.update(raised.what.encode())
            return raised.what
        raise AssertionError(f"{case} was accepted")

    # ---- all of it --------------------------------------------------------------------------

    def run(self, shapes, thorough):
        # The fnuz variants move as the other float8 do; a few ranks are enough.
        for dtype in [d for d in DTYPES if self.p <= 3 or "fnuz" not in d]:
            for layout in shapes:
                self.layout(Maker(dtype, layout, self.library), thorough)
            make = Maker(dtype, "contiguous", self.library)
            for op in sorted(set(ALL_OPS) - set(REDUCE_OPS[dtype])):
                self.refuse(make, op)
            dist.barrier()
        self.refuse_sizes(Maker("float32", "contiguous", self.library))
        dist.barrier()

    def layout(self, make, thorough):
        """All operations on one dtype and layout."""
        p = self.p
        self.case = (self.library, p, make.dtype, make.layout)
        counts = [6]
        if make.layout == "scalar":
            counts = [1]
        elif make.layout == "contiguous" and thorough:
            counts = sorted({0, max(p - 1, 1), p + 1} | ({2 * p} if p <= 4 else set()))
        for count in counts:
            self.case = (*self.case[:4], count)
            self.move(make, count)
            # Few dtypes for nothing and for p - 1 elements: reductions take most of the time.
            if count > p or len(counts) == 1 or make.dtype in ("float32", "int64"):
                for op in REDUCE_OPS[make.dtype]:
                    self.reduce(make, count, op)
                    if make.layout == "contiguous" or (p <= 4 and make.layout == "strided"):
                        self.reduce_beyond_torch(make, count, op)
        if make.layout != "scalar":
            self.move_rows(make)


def matrix(rank, library="numpy", thorough=False):
    """Run the matrix; return its cells after a check that all ranks found the same."""
    warnings.simplefilter("error")
    if library == "mixed":
        library = "torch" if rank % 2 else "numpy"
        shapes = ["contiguous", "strided", "fortran", "scalar"]
    else:
        shapes = [*layouts(library), "scalar"]
    found = Matrix(rank, library)
    found.run(shapes, thorough)
    digests = [None] * found.p
    dist.all_gather_object(digests, found.digest.hexdigest())
    assert len(set(digests)) == 1, "ranks differ"
    return found.cells


def require_one_outcome_each(cells):
    """Fail if an operation on a dtype with a reduce op ended in different ways."""
    outcomes = {}
    for name, dtype, op, outcome in cells:
        outcomes.setdefault((name, dtype, op), set()).add(outcome)
    assert {cell: seen for cell, seen in outcomes.items() if len(seen) > 1} == {}
