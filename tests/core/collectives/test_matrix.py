"""Operation x dtype x reduce op x layout x world size x engine, against NumPy."""

import hashlib
from collections import Counter

import numpy as np
import pytest

import unisono as dist
from tests.support.matrix import matrix, require_one_outcome_each
from tests.support.oracle import DTYPES, REDUCE_OPS, check, np_dtype, reduce_op, reduction, values
from tests.support.tools import ROOT, tool
from unisono.testing import run

matrix_page = tool("matrix_page")


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("engine", "size"), matrix_page.RUNS)
def test_numpy_arrays_on_threads(size, engine, drawn):
    # Below, three ranks run it with all dtypes.
    how = "numpy", True, drawn(DTYPES, 6)
    found = run(matrix, size, args=how, engine=engine, timeout=300)
    require_one_outcome_each(sum(found, Counter()))


def test_processes_and_the_published_page():
    found = sum(run(matrix, 3, ranks="processes"), Counter())
    require_one_outcome_each(found)
    page = (ROOT / "docs/reference/matrix.md").read_text(encoding="utf-8")
    assert page == matrix_page.page(found), "run `make docs`"


@pytest.mark.sweep(1)
@pytest.mark.ranks(3)
@pytest.mark.parametrize("library", ["torch", "mixed"])
def test_torch_tensors_and_both_kinds_together(rank, library, drawn):
    pytest.importorskip("torch")
    matrix(rank, library, dtypes=drawn(DTYPES, 6))


def large_arrays(rank):
    """Reduce arrays of several pieces.

    The values come again and again, so that the oracle need see them once only.
    """
    members = [0, 2, 1]
    group = dist.new_group(members, sort_ranks=False)
    if rank not in members:
        return
    p, me, part = len(members), members.index(rank), 997
    for dtype in DTYPES:
        count = 1_100_001 // np_dtype(dtype).itemsize
        for op in REDUCE_OPS[dtype]:
            expected, slack = reduction(dtype, op, p, part)
            expected = np.resize(expected, count)
            slack = None if slack is None else np.resize(slack, count)
            x = np.resize(values(dtype, me, part), count)
            dist.all_reduce(x, reduce_op(op), group=group)
            check(("all_reduce", dtype, op), x, expected, slack)
            whole = np.concatenate([np.resize(values(dtype, me, part), count // 3)] * p)
            out = np.zeros(count // 3, whole.dtype)
            dist.reduce_scatter_tensor(out, whole, reduce_op(op), group=group)
            few = None if slack is None else slack[: count // 3]
            check(("reduce_scatter", dtype, op), out, expected[: count // 3], few)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("per_host", [0, 1, 2])
def test_large_arrays_in_a_sub_group(monkeypatch, per_host):
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", str(per_host))
    run(large_arrays, 4)


@pytest.mark.sweep(3)
@pytest.mark.ranks(2, 3, 4, 7, 8, engine="both")
def test_all_reduce_has_the_same_bits_everywhere_for_awkward_floats(rank):
    """Signed zeros, infinities, NaNs, subnormals."""
    odd = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, 3.4e38, 1.0, -1.0]
    results = {}
    rng = np.random.default_rng(rank)
    for algorithm in [None, "linear", "ring", "recursive_doubling", "halving_doubling", "one_shot",
                      "two_shot", "tree", "double_tree"]:  # fmt: skip
        for op in ["SUM", "PRODUCT", "MIN", "MAX", "AVG"]:
            x = rng.choice(np.array(odd, np.float32), 200)
            dist.all_reduce(x, reduce_op(op), algorithm=algorithm)
            results[algorithm, op, "float32"] = hashlib.sha256(x).hexdigest()
        for dtype in ("complex64", "complex128"):
            z = (rng.normal(size=97) + 1j * rng.normal(size=97)).astype(dtype)
            dist.all_reduce(z, dist.ReduceOp.PRODUCT, algorithm=algorithm)
            results[algorithm, "PRODUCT", dtype] = hashlib.sha256(z).hexdigest()
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, results)
    assert everywhere == [results] * len(everywhere)
