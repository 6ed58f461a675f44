"""Random programs: the two engines agree bit for bit, and every message arrives once."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.worlds import stress_bodies
from unisono.engines import is_native_built
from unisono.testing import run

few = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.skipif(not is_native_built(), reason="the C++ engine is not built")
@few
@given(seed=st.integers(0, 2**32), size=st.integers(1, 4))
def test_engines_agree_bit_for_bit(seed, size):
    stress_bodies.check_engines_agree(size, seed)


@few
@given(seed=st.integers(0, 2**32), size=st.integers(1, 4))
def test_messages_on_threads(seed, size):
    run(stress_bodies.random_graph, size, args=(seed, 80))


def test_messages_on_processes():
    run(stress_bodies.random_graph, 3, ranks="processes", args=(7, 200))
