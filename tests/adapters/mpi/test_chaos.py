"""Worlds of tests/adapters/mpi/chaos.py: up to three rounds of each fault."""

import pytest

from tests.adapters.mpi import chaos as mpi_chaos
from unisono.adapters.mpi import library as mpi_library

pytestmark = [
    pytest.mark.skipif(bool(mpi_library.why_absent()), reason="there is no MPI library"),
    pytest.mark.whole("a world of MPI with faults, 20 s"),
]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_faults_one_after_another(seed):
    """World 2 has faults while MPI makes a group, so it may end early."""
    ways = list(mpi_chaos.ERRORS)
    rounds, problems = mpi_chaos.one_world(seed, ways)
    assert not problems, "\n".join(problems)
    expected = {"abort", "mismatch", "kill"} if seed < 2 else set()
    assert expected <= {each.way for each, _, _ in rounds}
