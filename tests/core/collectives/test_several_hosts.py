"""Groups of ranks that count as several hosts: programs of messages in C++."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import unisono as dist
from tests.core.collectives import test_algorithms, test_mismatch, test_prepared, test_stress
from tests.support.matrix import matrix
from tests.support.operations import Operations
from unisono.testing import run

pytestmark = pytest.mark.native


@pytest.fixture(params=[1, 2], autouse=True)
def per_host(monkeypatch, request):
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", str(request.param))


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), size=st.integers(2, 5))
def test_as_the_reference_engine_bit_for_bit(seed, size):
    test_stress.check_engines_agree(size, seed)


# Bodies of tests that run on one host elsewhere.
HEAVY = [
    *((test_algorithms.test_every_algorithm_by_name, size) for size in (3, 4, 5)),
    *((test_mismatch.make_every_case, size) for size in (2, 3, 5)),
    (matrix, 3),
]
REPEATED = [
    (test_prepared.test_every_function_repeats_with_other_contents, 2),
    (test_prepared.test_every_function_repeats_with_other_contents, 4),
    (test_prepared.test_a_missing_rank_is_named, 3),
    (test_prepared.test_abort_ends_a_repeated_call, 3),
    (test_prepared.test_a_mismatch_names_both_calls, 3),
    (test_prepared.test_an_even_exchange_among_uneven_ones, 3),
]


def name(value):
    return value.__name__.removeprefix("test_") if callable(value) else None


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("body", "size"), HEAVY, ids=name)
def test_every_call(body, size):
    run(body, size, engine="native")


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("per_host", "kind"), [(1, "threads"), (2, "threads"), (1, "processes")], indirect=["per_host"]
)
@pytest.mark.parametrize(("body", "size"), REPEATED, ids=name)
def test_repeated_calls(kind, body, size):
    run(body, size, ranks=kind)


def two_levels(rank, algorithm):
    """Run each collective that has two levels, on small whole numbers."""
    p = dist.get_world_size()
    for count in (1, 7, 1000, 70_001):
        how = {"algorithm": algorithm}
        calls = Operations(rank, p, count, dtype=np.float32, modulus=101, how=how)
        for calls.root in range(p):
            calls.broadcast()
            calls.reduce()
        calls.all_reduce()
        calls.all_gather_into_tensor()
        calls.reduce_scatter_tensor()
        calls.all_to_all_single()
        calls.check(count)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("per_host", "size", "kind", "algorithm"),
    [
        *((1, size, kind, None) for size in (2, 3) for kind in ("threads", "processes")),
        *((2, size, "threads", algorithm) for size in (4, 6) for algorithm in (None, "two_level")),
    ],
    indirect=["per_host"],
)
def test_two_levels(size, kind, algorithm):
    run(two_levels, size, ranks=kind, args=(algorithm,))
