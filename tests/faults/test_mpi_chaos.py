"""One world of tests/faults/mpi_chaos.py: three rounds of each fault."""

import pytest

from tests.faults import mpi_chaos
from unisono.engines import mpi_library

pytestmark = [
    pytest.mark.skipif(bool(mpi_library.why_absent()), reason="there is no MPI library"),
    pytest.mark.whole("a world of MPI with faults, 20 s"),
]


@pytest.mark.parametrize("seed", [0, 1])
def test_faults_one_after_another(seed):
    ways = list(mpi_chaos.ERRORS)
    rounds, problems = mpi_chaos.one_world(seed, ways)
    assert not problems, "\n".join(problems)
    assert {"abort", "mismatch", "kill"} <= {each.way for each, _, _ in rounds}
