"""Groups in Ray actors, Dask workers and Spark tasks: each program runs in a cluster of its own.

A cluster starts processes and threads that live as long as its program, so the program is a process
of its own. It prints a line for each case.
"""

import os
import re
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

from tests.support.tools import tool

pytestmark = pytest.mark.timeout(560)

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# A busy machine may need minutes for what an idle machine does in 20 s.
LIMIT_S = 500
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


FRAMEWORKS = [
    pytest.param("ray", marks=needs("ray")),
    pytest.param("dask", marks=needs("distributed")),
    pytest.param("spark", marks=needs("pyspark", "java")),
]


@pytest.fixture
def run():
    """Return a function that runs a program, and returns its output; nothing may stay behind."""
    mark = f"unisono-test-{uuid.uuid4().hex}"
    # Not tmp_path, because the paths of Ray's sockets must be short.
    folder = Path(tempfile.mkdtemp(prefix="u"))
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder),
        "TMPDIR": str(folder),
        "RAY_TMPDIR": str(folder),
        "UNISONO_TEST_MARK": mark,
    }

    def run_one(script):
        done = subprocess.run(
            [sys.executable, str(script)],
            env=environment, capture_output=True, text=True, timeout=LIMIT_S, cwd=folder,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        yield run_one
        give_up_s = time.monotonic() + PATIENCE_S
        while (left := list(processes(mark))) and time.monotonic() < give_up_s:
            time.sleep(0.1)
        assert not left
    finally:
        for pid in processes(mark):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_cluster(name, run):
    cases = run(HERE / f"{name}_program.py").splitlines()
    assert len([case for case in cases if " passed, " in case]) > 8


# The last lines that an example prints.
PRINTED = {
    "ray": ("ray_tuning.py", r"round 3: (rate [\d.]+ reads [\d.]+%(, )?){3}"),
    "dask": ("dask_kmeans.py", r"rank 1: \d+ rows, largest difference to one process \de[+-]\d+"),
    "spark": (
        "spark_logistic.py",
        r"rank 1: [89]\d\.\d% right, largest difference to one process \de[+-]\d+",
    ),
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_example(name, run):
    script, line = PRINTED[name]
    assert re.fullmatch(line, run(ROOT / "examples" / script).splitlines()[-1])


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_first_program_of_the_page(name, run, tmp_path):
    page = (ROOT / f"docs/howto/{name}.md").read_text(encoding="utf-8")
    text = tool("readme").blocks("python", page)[0]
    script = tmp_path / "program.py"
    script.write_text(text, encoding="utf-8")
    printed = re.search(r"\)  # (\[.*\])$", text, re.MULTILINE)[1]
    assert printed in run(script).splitlines()
