"""The hint after SIGKILL: a worker that the kernel really kills, and one that it did not."""

import os
import shlex
import signal

import pytest

from tests.support.cgroups import small_cgroup
from tests.support.launches import RUN
from unisono.core.platform import machine, memory
from unisono.launcher.workers import oom

pytestmark = pytest.mark.linux("looks into /proc")

EATER = """
import os
if os.environ["RANK"] == "1":
    blocks = []
    while True:
        blocks.append(b"x" * (1 << 20))
os.read(0, 1)
"""


def test_worker_that_the_kernel_kills_for_want_of_memory(launches, tmp_path):
    (tmp_path / "eater.py").write_text(EATER)
    with small_cgroup(96 << 20) as folder:
        run = f"echo $$ >{folder}/cgroup.procs; exec {shlex.join(RUN)} -n 2 eater.py"
        launch = launches.start(program=["sh", "-c", run])
        assert launch.wait() == 128 + signal.SIGKILL
    last = launch.finish()[2].splitlines()[-1]
    assert "first failure: rank 1 " in last
    assert " was killed by SIGKILL (out of memory: " in last


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """A host whose counts are files here, and whose log is closed to us."""
    for name in ("memory.events", "vmstat"):
        (tmp_path / name).write_text("low 0\noom_kill 3\n")
    (tmp_path / "memory.max").write_text("1048576\n")
    real = memory.read_text
    counts = str(tmp_path / "vmstat")
    monkeypatch.setattr(
        memory, "read_text", lambda path: real(path.replace("/proc/vmstat", counts))
    )
    files = str(tmp_path / "memory.events"), str(tmp_path / "memory.max")
    monkeypatch.setattr(memory, "_cgroup_files", lambda: files)
    monkeypatch.setattr(oom, "open_end_of_kernel_log", lambda: None)
    return tmp_path


def test_what_the_counts_say(kernel):
    with oom.OomWatch() as watch:
        assert watch.hint(1) == ""
        (kernel / "vmstat").write_text("oom_kill 4\n")
        assert watch.hint(1).startswith("probably out of memory: ")
        (kernel / "memory.events").write_text("oom 1\noom_kill 4\noom_group_kill 0\n")
        assert watch.hint(1) == "out of memory: its cgroup's limit of 1048576 bytes was reached"


@pytest.mark.parametrize(
    ("unreadable", "expected"),
    [
        (["vmstat"], ""),
        (["memory.events"], ""),
        (["vmstat", "memory.events"], "out of memory? see dmesg"),
    ],
)
def test_a_count_that_did_not_rise_excludes_the_cause(kernel, unreadable, expected):
    for name in unreadable:
        (kernel / name).write_text("low 0\n")
    with oom.OomWatch() as watch:
        assert watch.hint(1) == expected


def test_worker_that_another_process_kills(launches):
    if memory.kills().on_host is None:
        pytest.skip("the kernel does not count its kills")
    _, _, err = launches.run(script="import os\nos.kill(os.getpid(), 9)\n")
    assert err.splitlines()[-1].endswith(" was killed by SIGKILL")


def test_what_the_log_says(kernel, monkeypatch):
    log, kernel_end = os.pipe()
    os.set_blocking(log, False)
    monkeypatch.setattr(oom, "open_end_of_kernel_log", lambda: log)
    with oom.OomWatch() as watch, open(kernel_end, "wb", buffering=0) as writer:
        writer.write(b"6,1,2,-;Memory cgroup out of memory: Killed process 123 (python) total-vm\n")
        for _ in range(2):
            assert watch.hint(123) == "out of memory: the kernel's log names this process"
            assert watch.hint(12) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0::/\n", ("memory.events", "memory.max")),
        ("0::/user.slice/a\n", ("user.slice/a/memory.events", "user.slice/a/memory.max")),
        (
            "9:name=systemd:/\n4:cpuset,memory:/job:1\n0::/\n",
            ("memory/job:1/memory.oom_control", "memory/job:1/memory.limit_in_bytes"),
        ),
        ("", ("memory.events", "memory.max")),
    ],
)
def test_files_of_the_cgroup(monkeypatch, text, expected):
    monkeypatch.setattr(machine, "read_text", lambda path: text)
    assert memory._cgroup_files() == tuple(f"/sys/fs/cgroup/{name}" for name in expected)
