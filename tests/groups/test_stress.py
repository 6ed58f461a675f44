"""Random programs: the two engines agree bit for bit, and every message arrives once."""

import pytest
import stress_bodies
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unisono.engines import is_native_built
from unisono.testing import run

few = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.skipif(not is_native_built(), reason="the C++ engine is not built")
@few
@given(seed=st.integers(0, 2**32), size=st.integers(1, 4))
def test_engines_agree_bit_for_bit(seed, size):
    native, reference = (
        run(stress_bodies.random_calls, size, engine=engine, args=(seed, 12))
        for engine in ("native", "reference")
    )
    for ours, theirs in zip(native, reference, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a[:4] == b[:4]
            assert a == b, a[:4]


@few
@given(seed=st.integers(0, 2**32), size=st.integers(1, 4))
def test_messages_on_threads(seed, size):
    run(stress_bodies.random_graph, size, args=(seed, 80))


def test_messages_on_processes():
    run(stress_bodies.random_graph, 3, ranks="processes", args=(7, 200))
