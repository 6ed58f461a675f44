"""Groups in Ray actors, Dask workers and Spark tasks: each program runs in a cluster of its own.

A cluster starts processes and threads that live as long as its program, so the program is a process
of its own. It prints a line for each case.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_S = 220
# Processes of a cluster may outlive their program for as long as this.
PATIENCE_S = 20.0


def needs(package, command=""):
    missing = [name for name in [package] if find_spec(name) is None]
    missing += [name for name in [command] if name and shutil.which(name) is None]
    return [
        pytest.mark.whole("starts a cluster"),
        pytest.mark.skipif(bool(missing), reason=f"not installed: {missing}; `make frameworks`"),
    ]


def processes(mark):
    """Return the processes with a text in their environment."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                yield int(path.parts[2])
        except OSError:
            continue


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("ray", marks=needs("ray")),
        pytest.param("dask", marks=needs("distributed")),
        pytest.param("spark", marks=needs("pyspark", "java")),
    ],
)
def test_cluster(name):
    mark = f"unisono-test-{uuid.uuid4().hex}"
    # Not tmp_path, because the paths of Ray's sockets must be short.
    folder = tempfile.mkdtemp(prefix="u")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": folder,
        "TMPDIR": folder,
        "UNISONO_TEST_MARK": mark,
    }
    try:
        done = subprocess.run(
            [sys.executable, str(HERE / f"{name}_program.py"), folder],
            env=environment, capture_output=True, text=True, timeout=LIMIT_S, cwd=folder,
        )  # fmt: skip
        cases = [line for line in done.stdout.splitlines() if " passed, " in line]
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(cases) > 8
        give_up_s = time.monotonic() + PATIENCE_S
        while (left := list(processes(mark))) and time.monotonic() < give_up_s:
            time.sleep(0.1)
        assert not left
    finally:
        for pid in processes(mark):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
