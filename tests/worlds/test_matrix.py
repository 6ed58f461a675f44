"""Operation x dtype x reduce op x layout x world size x engine, against NumPy."""

import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.worlds import matrix_bodies
from unisono.engines import is_native_built
from unisono.testing import run

ROOT = Path(__file__).parents[2]
SIZES = [1, 2, 3, 4, 7, 8]
ENGINES = [
    pytest.param(
        "native", marks=pytest.mark.skipif(not is_native_built(), reason="no native engine")
    ),
    "reference",
]


@cache
def cells(size, engine):
    """Run the matrix once for the test of its results and for the page."""
    results = run(matrix_bodies.matrix, size, args=("numpy",), engine=engine, timeout=300)
    assert len({digest for digest, _ in results}) == 1, "ranks differ"
    return sum((found for _, found in results), Counter())


def require_one_outcome_each(found):
    outcomes = {}
    for name, dtype, op, outcome in found:
        outcomes.setdefault((name, dtype, op), set()).add(outcome)
    assert {cell: seen for cell, seen in outcomes.items() if len(seen) > 1} == {}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", SIZES)
def test_numpy_arrays_on_threads(size, engine):
    require_one_outcome_each(cells(size, engine))


@pytest.mark.skipif(not is_native_built(), reason="no native engine")
def test_the_published_page_is_that_of_the_run():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import matrix_page
    finally:
        sys.path.remove(str(ROOT / "tools"))
    runs = [cells(size, engine) for size in SIZES for engine in ("native", "reference")]
    found = sum(runs, Counter())
    require_one_outcome_each(found)
    page = (ROOT / "docs/reference/matrix.md").read_text(encoding="utf-8")
    assert page == matrix_page.page(found, SIZES), "run `make docs`"


@pytest.mark.parametrize("library", ["torch", "mixed"])
def test_torch_tensors_and_both_kinds_together(library):
    pytest.importorskip("torch")
    results = run(matrix_bodies.matrix, 3, args=(library, False))
    assert len({digest for digest, _ in results}) == 1, "ranks differ"


def test_on_processes():
    results = run(matrix_bodies.matrix, 3, ranks="processes", args=("numpy", False))
    assert len({digest for digest, _ in results}) == 1, "ranks differ"


@pytest.mark.parametrize("per_host", [0, 1, 2])
def test_large_arrays_in_a_sub_group(monkeypatch, per_host):
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", str(per_host))
    compared = run(matrix_bodies.large, 4)
    assert compared[0] == compared[1] == compared[2] > 100


@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_all_reduce_has_the_same_bits_everywhere_for_awkward_floats(monkeypatch, size, engine):
    monkeypatch.setenv("UNISONO_ENGINE", engine)
    results = run(matrix_bodies.awkward_floats, size)
    for case in results[0]:
        assert len({result[case] for result in results}) == 1, f"{case}: ranks differ"
