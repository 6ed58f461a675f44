"""Every operation on arrays of every dtype and layout, against the oracle."""

import hashlib
import warnings

import numpy as np
from oracle import (
    ALL_OPS,
    DTYPES,
    REDUCE_OPS,
    Placed,
    bits,
    check,
    layouts,
    np_dtype,
    reduce_op,
    reduced,
    values,
)  # fmt: skip

import unisono as dist
from unisono.errors import UnsupportedError


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


def unchanged(case, inputs, before):
    for one, data in zip(inputs, before, strict=True):
        assert bits(one.elements()) == bits(data), f"{case}: an input was changed"


def move(case, make, rank, p, count, how):
    """Run all operations that only move data, with blocks of `count` elements."""
    root = p // 2
    mine = [values(make.dtype, r, count) for r in range(p)]
    block = [[values(make.dtype, r, count, 1 + to) for to in range(p)] for r in range(p)]

    x = make.full(mine[rank])
    dist.broadcast(x.array, root, **how)
    check((*case, "broadcast"), x.elements(), mine[root])

    x, outs = make.full(mine[rank]), [make.empty(count) for _ in range(p)]
    dist.all_gather(arrays(outs), x.array, **how)
    for r in range(p):
        check((*case, "all_gather", r), outs[r].elements(), mine[r])
    dist.gather(x.array, arrays(outs) if rank == root else None, root, **how)
    for r in range(p):
        check((*case, "gather", r), outs[r].elements(), mine[r])
    flat = make.empty(p * count)
    dist.all_gather_into_tensor(flat.array, x.array, **how)
    check((*case, "all_gather_into_tensor"), flat.elements(), np.concatenate(mine))
    unchanged(case, [x], [mine[rank]])

    second = [make.full(values(make.dtype, r, count + 1)) for r in range(p)]
    rows = [[make.empty(count), make.empty(count + 1)] for _ in range(p)]
    inputs = [x.array, second[rank].array]
    dist.all_gather_coalesced([arrays(row) for row in rows], inputs, **how)
    for r in range(p):
        check((*case, "all_gather_coalesced", r), rows[r][0].elements(), mine[r])
        check((*case, "all_gather_coalesced", r), rows[r][1].elements(), second[r].elements())

    ins, out = [make.full(b) for b in block[rank]], make.empty(count)
    dist.scatter(out.array, arrays(ins) if rank == root else None, root, **how)
    check((*case, "scatter"), out.elements(), block[root][rank])
    outs = [make.empty(count) for _ in range(p)]
    dist.all_to_all(arrays(outs), arrays(ins), **how)
    for r in range(p):
        check((*case, "all_to_all", r), outs[r].elements(), block[r][rank])
    unchanged(case, ins, block[rank])


def move_rows(case, make, rank, p, how):
    """all_to_all_single of rows, in equal and in uneven parts."""
    width = 3

    def sent(r, to):
        return (r * 2 + to) % 3

    for what, rows in (("equal", lambda r, to: 2), ("uneven", sent)):
        parts = [
            [values(make.dtype, r, rows(r, to) * width, to) for to in range(p)] for r in range(p)
        ]
        mine, expected = (
            np.concatenate(parts[rank]),
            np.concatenate([parts[r][rank] for r in range(p)]),
        )
        x, out = make.full(mine), make.empty(expected.size)
        ins, outs = [rows(rank, to) for to in range(p)], [rows(r, rank) for r in range(p)]
        if make.layout != "fortran":
            ins, outs = [n * width for n in ins], [n * width for n in outs]
        else:  # Placed gives Fortran arrays [size/3, 3] if the size is a multiple of 3
            assert x.array.shape[1:] == (width,)
        splits = (None, None) if what == "equal" else (outs, ins)
        dist.all_to_all_single(out.array, x.array, *splits, **how)
        check((*case, "all_to_all_single", what), out.elements(), expected)
        unchanged(case, [x], [mine])


def reduce(case, make, rank, p, count, op, how):
    """Run all operations that reduce; return the bytes that must be equal on all ranks."""
    root = p - 1
    mine = [values(make.dtype, r, count) for r in range(p)]
    expected, slack = reduced(make.dtype, op, mine)
    x = make.full(mine[rank])
    dist.all_reduce(x.array, reduce_op(op), **how)
    check((*case, "all_reduce"), x.elements(), expected, slack)
    same = bits(x.elements())

    x = make.full(mine[rank])
    dist.reduce(x.array, root, reduce_op(op), **how)
    if rank == root:
        check((*case, "reduce"), x.elements(), expected, slack)
    else:
        unchanged((*case, "reduce"), [x], [mine[rank]])

    second = [values(make.dtype, r, count + 2) for r in range(p)]
    pair = [make.full(mine[rank]), make.full(second[rank])]
    dist.all_reduce_coalesced(arrays(pair), reduce_op(op), **how)
    check((*case, "all_reduce_coalesced", 0), pair[0].elements(), expected, slack)
    check((*case, "all_reduce_coalesced", 1), pair[1].elements(), *reduced(make.dtype, op, second))
    same += bits(pair[1].elements())

    block = [[values(make.dtype, r, count, 1 + to) for to in range(p)] for r in range(p)]
    expected, slack = reduced(make.dtype, op, [block[r][rank] for r in range(p)])
    ins, out = [make.full(b) for b in block[rank]], make.empty(count)
    dist.reduce_scatter(out.array, arrays(ins), reduce_op(op), **how)
    check((*case, "reduce_scatter"), out.elements(), expected, slack)
    unchanged((*case, "reduce_scatter"), ins, block[rank])
    whole, out = make.full(np.concatenate(block[rank])), make.empty(count)
    dist.reduce_scatter_tensor(out.array, whole.array, reduce_op(op), **how)
    check((*case, "reduce_scatter_tensor"), out.elements(), expected, slack)
    unchanged((*case, "reduce_scatter_tensor"), [whole], [np.concatenate(block[rank])])
    return same


def refuse(case, make, op):
    """A reduce op that the dtype lacks is refused before anything is sent."""
    told = []
    for call in (dist.all_reduce, dist.reduce):
        x = make.full(values(make.dtype, 0, 3))
        extra = {"dst": 0} if call is dist.reduce else {}
        try:
            call(x.array, op=reduce_op(op), **extra)
        except UnsupportedError as error:
            told.append(error.what)
        else:
            raise AssertionError(f"{case}: {op} on {make.dtype} was accepted")
    assert len(set(told)) == 1, (case, told)
    assert f"reduce op {op} is not defined on {make.dtype} " in told[0], (case, told)
    dist.barrier()
    return told


def matrix(rank, library, thorough=True):
    """Run the matrix; return what must be equal on all ranks."""
    warnings.simplefilter("error")
    p, digest, told = dist.get_world_size(), hashlib.sha256(), []
    if library == "mixed":
        library = "torch" if rank % 2 else "numpy"
        shapes = ["contiguous", "strided", "fortran"]
    else:
        shapes = layouts(library) if p <= 4 else ["contiguous", "negative"]
    counts = sorted({0, 1, max(p - 1, 0), p + 1, 2 * p})
    for dtype in DTYPES:
        for layout in shapes:
            make, case = Maker(dtype, layout, library), (library, p, dtype, layout)
            sizes = counts if layout == "contiguous" and thorough else [6]
            for count in sizes:
                move((*case, count), make, rank, p, count, {})
            move_rows(case, make, rank, p, {})
            for op in REDUCE_OPS[dtype]:
                for count in sizes[1:4:2] if len(sizes) > 1 else sizes:
                    digest.update(reduce((*case, count, op), make, rank, p, count, op, {}))
        make = Maker(dtype, "scalar", library)
        for op in REDUCE_OPS[dtype][:2]:
            mine = [values(dtype, r, 1) for r in range(p)]
            x = make.full(mine[rank])
            dist.all_reduce(x.array, reduce_op(op))
            check((dtype, "0-d", op), x.elements(), *reduced(dtype, op, mine))
        x = make.full(values(dtype, rank, 1))
        dist.broadcast(x.array, 0)
        check((dtype, "0-d", "broadcast"), x.elements(), values(dtype, 0, 1))
        for op in set(ALL_OPS) - set(REDUCE_OPS[dtype]):
            told += refuse((dtype, op), Maker(dtype, "contiguous", library), op)
    return digest.hexdigest(), sorted(told)


def awkward_floats(rank):
    """Signed zeros, infinities, NaNs, subnormals: bits of all_reduce by case."""
    odd = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, 3.4e38, 1.0, -1.0]
    p, results = dist.get_world_size(), {}
    rng = np.random.default_rng(rank)
    for algorithm in [None, "linear", "ring", "recursive_doubling", "halving_doubling", "one_shot",
                      "two_shot", "tree", "double_tree"]:  # fmt: skip
        for op in ["SUM", "PRODUCT", "MIN", "MAX", "AVG"]:
            x = rng.choice(np.array(odd, np.float32), 200)
            dist.all_reduce(x, reduce_op(op), algorithm=algorithm)
            results[p, algorithm, op, "float32"] = hashlib.sha256(x).hexdigest()
        for dtype in ("complex64", "complex128"):
            z = (rng.normal(size=97) + 1j * rng.normal(size=97)).astype(dtype)
            dist.all_reduce(z, dist.ReduceOp.PRODUCT, algorithm=algorithm)
            results[p, algorithm, "PRODUCT", dtype] = hashlib.sha256(z).hexdigest()
    return results
