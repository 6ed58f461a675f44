"""Groups of ranks that count as several hosts: programs of messages in C++."""

from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.worlds import (
    algorithm_bodies,
    apart_bodies,
    matrix_bodies,
    mismatch_bodies,
    quick_bodies,
    stress_bodies,
)
from tests.worlds.test_mismatch import check
from unisono.base import config
from unisono.engines import is_native_built
from unisono.testing import run

pytestmark = [
    pytest.mark.skipif(not is_native_built(), reason="the C++ engine is not built"),
    pytest.mark.skipif(
        config.get("UNISONO_ENGINE") == "reference", reason="UNISONO_ENGINE forbids it"
    ),
]


@pytest.fixture(params=[1, 2], autouse=True)
def per_host(monkeypatch, request):
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", str(request.param))
    return request.param


@pytest.fixture(params=["threads", "processes"])
def apart(request, per_host):
    """Return `run`, on threads and on processes; on processes with one rank per host only."""
    if request.param == "processes" and per_host > 1:
        pytest.skip("threads will do")
    return partial(run, ranks=request.param)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), size=st.integers(2, 5))
def test_as_the_reference_engine_bit_for_bit(seed, size):
    stress_bodies.check_engines_agree(size, seed)


def test_every_operation_on_every_dtype():
    results = run(matrix_bodies.matrix, 3, args=("numpy", False), engine="native")
    assert len({digest for digest, _ in results}) == 1, "ranks differ"


@pytest.mark.parametrize("size", [3, 4, 5])
def test_every_algorithm_by_name(size):
    calls = run(algorithm_bodies.every_algorithm, size, engine="native")
    assert min(calls) >= len(algorithm_bodies.COLLECTIVES) * 2


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_rank_names_both_sides(size):
    check(run(mismatch_bodies.every_case, size, args=(1, False)), 1)


@pytest.mark.parametrize("size", [2, 4])
def test_calls_are_repeated_without_python(apart, size):
    for wrong, seen in apart(quick_bodies.every_function, size):
        assert wrong == 0
        assert [seen[i] for i in range(len(seen)) if i % 3] == [True] * 8


def test_a_missing_rank_is_named(apart):
    quick_bodies.check_missing(apart(quick_bodies.missing, 3, args=(1.0,)), 1.0)


def test_abort_ends_a_repeated_call(apart):
    quick_bodies.check_aborted(apart(quick_bodies.aborted, 3))


def test_a_mismatch_among_repeated_calls(apart):
    for texts, x in apart(quick_bodies.odd_one, 3):
        assert [k for k, _ in texts] == [0, 1, 2, 3]
        assert x == [9.0] * 3


def test_an_even_exchange_among_uneven_ones(apart):
    quick_bodies.check_one_uneven(apart(quick_bodies.one_uneven, 3))


@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("algorithm", ["two_level", None])
def test_two_levels(apart, per_host, hosts, algorithm):
    size = hosts * per_host
    if per_host == 1 and algorithm:
        pytest.skip("there is one level only")
    apart(apart_bodies.two_levels, size, args=(algorithm,))
