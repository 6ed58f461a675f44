"""Large arguments of `launch` and `spawn`, and children that die before they have read them."""

import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import pytest

import unisono.launcher
from tests.launcher import launch_targets as targets
from tests.support.programs import python
from unisono.errors import WorkerFailedError
from unisono.launcher import launch, spawn
from unisono.launcher.payload import Payload

SRC = str(Path(unisono.launcher.__file__).parents[2])
LARGE = 1_600_000  # more than the pipe of a new process holds


def run(script, *, text):
    script.write_text(text)
    return python(script, env=os.environ | {"PYTHONPATH": SRC})


START = f"""
import os, sys, types
from unisono.launcher import launch, spawn
def work(rank, data): return len(data)
def start(): {{call}}
class Report(Exception): pass
data = bytes({LARGE})
"""
CALLS = {
    "launch": "return launch(work, 2, args=(data,))",
    "spawn": "return spawn(work, args=(data,), nprocs=2)",
}


@pytest.mark.parametrize("call", CALLS)
def test_script_without_a_guard(tmp_path, call):
    done = run(tmp_path / "script.py", text=START.format(call=CALLS[call]) + "start()\n")
    last = done.stderr[done.stderr.index("WorkerFailedError: ") :]
    assert done.returncode == 1
    assert "exited with code 1: unisono.errors.UsageError: processes cannot be started" in last
    assert f'  File "{tmp_path}/script.py", line ' in last
    assert '`if __name__ == "__main__":`' in last


def test_child_that_leaves_while_it_imports_main(tmp_path):
    text = START.format(call=CALLS["launch"]) + 'if __name__ == "__main__": start()\n'
    done = run(tmp_path / "script.py", text=text + "else: os._exit(3)\n")
    assert "exited with code 3\n" in done.stderr
    assert f"it ended while it imported {tmp_path}/script.py" in done.stderr
    assert '`if __name__ == "__main__":`' in done.stderr


def test_child_that_calls_exit_while_it_imports_main(tmp_path):
    text = START.format(call=CALLS["launch"]) + 'if __name__ == "__main__": start()\n'
    done = run(tmp_path / "script.py", text=text + "else: sys.exit(0)\n")
    assert "exited with code 1: SystemExit: 0\n" in done.stderr
    assert "line 9, in <module>\n" in done.stderr


def test_child_that_is_killed_before_it_has_read(monkeypatch):
    resource_tracker.ensure_running()
    real = multiprocessing.util.spawnv_passfds

    def killed(*args):
        pid = real(*args)
        os.kill(pid, signal.SIGKILL)
        return pid

    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", killed)
    with pytest.raises(WorkerFailedError, match=r"rank 0 .* was killed by SIGKILL\n"):
        launch(max, 1, (bytes(LARGE),))


def test_spawn_of_a_function_that_no_file_has(tmp_path):
    code = "from unisono.launcher import spawn\ndef work(rank): pass\nspawn(work, nprocs=1)\n"
    done = python("-", input=code, env=os.environ | {"PYTHONPATH": SRC})
    last = done.stderr[done.stderr.index("WorkerFailedError: ") :]
    assert "AttributeError: Can't get attribute 'work' on <module '__main__'" in last
    assert "hint: define the function at the top level of a module" in last
    assert "`unisono.launch`" in last


def test_a_function_that_exits_gives_no_result():
    with pytest.raises(WorkerFailedError, match="exited with code 0 before `fn` returned"):
        launch(targets.leave, 1)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_arrays_arrive_whole_and_each_rank_may_write_to_its_own(method):
    writable, fixed = np.arange(100_000.0), np.arange(50_000)
    fixed.flags.writeable = False
    seen = launch(targets.add_rank, 3, (writable, fixed, "text"), start_method=method)
    sums = [float((writable + rank).sum()) for rank in range(3)]
    assert seen == [(expected, int(fixed.sum()), False, "text") for expected in sums]
    assert np.array_equal(writable, np.arange(100_000.0))


@pytest.mark.linux("files in memory")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_ranks_together_have_an_array_once(method):
    array = np.arange(10**6)
    found = launch(targets.share_of_memory, 3, (array,), start_method=method)
    sums, shares = zip(*found, strict=True)
    assert sums == (int(array.sum()),) * 3
    assert sum(shares) == pytest.approx(array.nbytes, rel=0.05)


@pytest.mark.parametrize("start", [launch, spawn])
def test_memory_of_arguments_is_freed_in_the_ranks(tmp_path, start):
    start(targets.payload_files, nprocs=1, args=(bytes(LARGE), str(tmp_path / "found")))
    assert (tmp_path / "found").read_text() == "[]"


def test_forked_ranks_inherit_their_arguments():
    array = np.arange(3)
    lock = threading.Lock()  # cannot be pickled
    seen = launch(targets.locked, 2, (lock, array), start_method="fork")
    assert seen == [[0, 1, 2], [1, 2, 3]]
    assert array.tolist() == [0, 1, 2]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawn_passes_what_only_a_child_may_inherit(method):
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    spawn(targets.put_sum, (queue, np.ones(LARGE)), nprocs=2, start_method=method)
    assert sorted(queue.get() for _ in range(2)) == [(0, LARGE), (1, LARGE)]
    queue.close()


@pytest.mark.parametrize("memfd", [True, False])
def test_payload_is_the_same_with_a_file_on_disk(monkeypatch, memfd):
    if not memfd:
        monkeypatch.delattr(os, "memfd_create", raising=False)
        monkeypatch.setattr(tempfile, "tempdir", None)
    value = {"array": np.arange(30_000), "small": np.arange(3), "bytes": b"x" * LARGE}
    payload = Payload(value)
    first, second = payload.load(), payload.load()
    assert first["bytes"] == value["bytes"]
    assert np.array_equal(first["array"], value["array"])
    first["array"][:] = 0
    assert np.array_equal(second["array"], value["array"])
    assert np.array_equal(second["small"], value["small"])


def test_arrays_are_aligned_and_not_in_the_pickle():
    arrays = [np.zeros(n, np.uint8) for n in (70_001, 70_003, 70_007)]
    loaded = Payload(arrays, pickle.dumps).load()
    assert [each.ctypes.data % 64 for each in loaded] == [0, 0, 0]
    assert [each.size for each in loaded] == [70_001, 70_003, 70_007]
