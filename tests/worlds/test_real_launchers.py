"""`init_process_group()` under Open MPI itself, where it is installed (Debian's openmpi-bin)."""

import shutil
import sys

import pytest

from tests.worlds.test_detection import BODY, expected, side_by_side

MPIRUN = shutil.which("mpirun.openmpi")


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(BODY)
    return str(path)


@pytest.mark.skipif(MPIRUN is None, reason="Open MPI is not installed")
def test_two_jobs_of_open_mpi_at_once_are_two_worlds(script, tmp_path):
    command = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable, script]
    outs = side_by_side([command] * 2, [{"TMPDIR": str(tmp_path)}] * 2)
    assert [sorted(out.splitlines()) for out in outs] == [expected(3)] * 2
