"""`spawn` with real processes, for the three start methods."""

import contextlib
import errno
import gc
import json
import os
import pickle
import re
import select
import signal
import subprocess
import sys
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.launcher import spawn_targets as targets
from tests.support.launches import LIMIT_S, gone
from unisono.core.platform.processes import open_files
from unisono.errors import WorkerFailedError
from unisono.launcher import spawn
from unisono.launcher.spawn import SpawnContext

METHODS = ["spawn", "fork", "forkserver"]


@pytest.fixture
def fifo(tmp_path):
    """Return the path of a new FIFO."""
    os.mkfifo(tmp_path / "fifo")
    return str(tmp_path / "fifo")


@pytest.mark.parametrize("method", METHODS)
def test_children_know_their_place_meet_and_the_parent_forgets(tmp_path, method):
    before = dict(os.environ)
    assert spawn(targets.meet, (tmp_path,), nprocs=3, start_method=method) is None
    assert dict(os.environ) == before
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for rank, (env, found) in enumerate(seen):
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": seen[0][0]["MASTER_PORT"],
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        assert {name: env.get(name) for name in expected} == expected
        assert found == ["0", "1", "2"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("method", METHODS)
def test_real_traceback_ends_the_error(method):
    with pytest.raises(WorkerFailedError) as caught:
        spawn(targets.fail_on_rank_1, ("raise",), nprocs=3, start_method=method)
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("first failure of 3 processes: rank 1 (pid ")
    assert "exited with code 1: ValueError: boom x" in first
    trace = rest[rest.index("Traceback (most recent call last):") :]
    assert trace[1].startswith(f'  File "{targets.__file__}", line ')
    assert trace[1].endswith("in fail_on_rank_1")
    assert trace[-1] == "ValueError: boom " + "x" * 200_000
    assert caught.value.context.rank == 1
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_what_is_no_exception_has_a_traceback_too():
    with pytest.raises(
        WorkerFailedError, match=r"exited with code 1: asyncio.*Error: boom"
    ) as caught:
        spawn(targets.fail_on_rank_1, ("cancel",), nprocs=2, start_method="fork")
    assert str(caught.value).splitlines()[-1] == "asyncio.exceptions.CancelledError: boom"


@pytest.mark.sweep(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("kind", "how"), [("exit", "exited with code 7"), ("kill", "was killed by SIGKILL")]
)
def test_failure_without_a_traceback(method, kind, how):
    with pytest.raises(WorkerFailedError, match=how) as caught:
        spawn(targets.fail_on_rank_1, (kind,), nprocs=2, start_method=method)
    assert caught.value.what.splitlines()[0].startswith("first failure of 2 processes: rank 1 ")


def test_a_rank_that_left_early_is_named(fifo):
    with pytest.raises(WorkerFailedError) as caught:
        spawn(targets.outlive_rank_1, (fifo,), nprocs=2, start_method="fork")
    told = r"left with exit code 0 before the first failure: rank 1 \d+\.\d s"
    assert re.fullmatch(told, caught.value.what.splitlines()[1])


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_that_starts_itself_is_told_the_idiom(launches, method):
    script = (
        "import unisono as dist\n"
        "def work(rank): pass\n"
        f"dist.spawn(work, nprocs=1, start_method={method!r})\n"
    )
    code, _, err = launches.run(script=script, program=[sys.executable])
    assert code == 1
    assert "UsageError: processes cannot be started by one that is starting\n" in err
    assert '`if __name__ == "__main__":`' in err


@pytest.mark.sweep(2)
@pytest.mark.parametrize("method", METHODS)
def test_context_without_join(fifo, method):
    context = spawn(targets.wait_for_release, (fifo,), nprocs=1, join=False, start_method=method)
    assert context.join(timeout=0) is False
    assert context.pids() == [process.pid for process in context.processes]
    assert len(context.pids()) == 1
    with open(fifo, "w"):
        assert context.processes[0].is_alive()
    assert context.join(timeout=LIMIT_S) is True
    assert context.join() is True
    assert [process.exitcode for process in context.processes] == [0]


def test_kill_does_not_wait_and_is_no_failure():
    context = spawn(targets.wait_for_a_signal, nprocs=2, join=False, start_method="fork")
    context.kill()
    assert all(process.exitcode < 0 for process in context.processes)
    assert context.join() is True


def test_children_without_a_descriptor_for_their_end_are_watched_too(fifo, monkeypatch):
    def full(*args):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    # Not for multiprocessing, which copies descriptors before the child runs.
    ours = SimpleNamespace(**vars(os) | {"dup": full})
    for method in METHODS:
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[SpawnContext.__module__], "os", ours)
            patch.setattr(os, "pidfd_open", full, raising=False)
            context = spawn(targets.wait_for_release, (fifo,), join=False, start_method=method)
        with open(fifo, "w"):
            assert context.join(timeout=0) is False
        assert context.join(timeout=LIMIT_S) is True


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no list of open descriptors")
def test_a_context_that_nobody_joins_leaves_no_descriptors():
    before = set(open_files(os.getpid()).items())
    context = spawn(print, nprocs=3, join=False, start_method="fork")
    for process in context.processes:
        process.join()
        process.close()
    del context, process
    gc.collect()
    left = set(open_files(os.getpid()).items()) - before
    assert [what for _, what in left if "pidfd" in what] == []


def test_others_may_go_on_after_a_failure(fifo):
    context = spawn(targets.fail_or_wait, (fifo,), nprocs=2, join=False, start_method="fork")
    with open(fifo, "w"):
        connection.wait([context.processes[1].sentinel])
        assert context.join(timeout=0.0, stop_on_failure=False) is False
        assert context.processes[0].is_alive()
    with pytest.raises(WorkerFailedError, match="rank 1"):
        context.join(timeout=LIMIT_S, stop_on_failure=False)
    assert [process.exitcode for process in context.processes] == [0, 3]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("method", METHODS)
def test_child_that_ignores_sigterm_is_killed_after_the_grace(fifo, method):
    options = {"nprocs": 2, "join": False, "start_method": method}
    context = spawn(targets.fail_or_stay, (fifo,), **options)
    with pytest.raises(WorkerFailedError, match=r"rank 1 .* exited with code 3") as caught:
        context.join(grace_period=0.1)
    assert "then" not in caught.value.what  # rank 0 did not fail by itself
    assert [process.exitcode for process in context.processes] == [-signal.SIGKILL, 3]


def test_daemon_flag_is_passed_on(fifo):
    context = spawn(targets.wait_for_release, (fifo,), join=False, daemon=True, start_method="fork")
    assert [process.daemon for process in context.processes] == [True]
    with open(fifo, "w"):
        pass
    assert context.join(timeout=LIMIT_S) is True


def test_grandchild_does_not_hide_its_parents_death(fifo):
    # It keeps the pipe open that multiprocessing shows as the sentinel.
    with open(fifo, "r+b", buffering=0) as pipe:
        try:
            with pytest.raises(WorkerFailedError, match="SIGKILL"):
                spawn(targets.fork_a_grandchild_and_die, (fifo,), start_method="fork")
        finally:
            os.kill(int(pipe.readline()), signal.SIGKILL)


def test_function_that_cannot_be_pickled():
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        spawn(lambda rank: None, nprocs=2, start_method="spawn")


PARENT = """
import os, sys, threading
sys.path.insert(0, {folder!r})
from tests.launcher.spawn_targets import announce_and_wait
from unisono.launcher import spawn
from unisono.core.platform.processes import open_files
if __name__ == "__main__":
    options = dict(nprocs=2, start_method={method!r})
    if {in_thread}:
        thread = threading.Thread(
            target=lambda: spawn(announce_and_wait, join=False, **options)
        )
        thread.start()
        thread.join()
        os.write(1, b"thread ended\\n")
        threading.Event().wait()
    else:
        spawn(announce_and_wait, **options)
"""


def parent_of(launches, method, *, in_thread):
    """Start a program that spawns two children, which print their numbers and wait."""
    here = str(Path(__file__).parents[2])
    text = PARENT.format(folder=here, method=method, in_thread=in_thread)
    return launches.start(script=text, program=[sys.executable])


@pytest.mark.linux("pidfd")
@pytest.mark.sweep(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_children_end_with_their_parent(launches, method, signum):
    parent = parent_of(launches, method, in_thread=False)
    children = [int(line) for line in parent.lines(2)]
    parent.send_signal(signum)
    assert gone(children)
    assert parent.wait() == -signum


@pytest.mark.linux("pidfd")
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_children_outlive_the_thread_that_made_them(launches, method):
    parent = parent_of(launches, method, in_thread=True)
    children = [int(line) for line in set(parent.lines(3)) - {"thread ended"}]
    assert len(children) == 2
    assert not gone(children, 0.01)
    parent.send_signal(signal.SIGKILL)
    assert gone(children)


# Rank 0 watches its parent only after the parent's end. Rank 1 was forked later, so it has the pipe
# open whose end would show the end of the parent to rank 0.
ORPHAN = """
import importlib, multiprocessing, os, select
import unisono

spawn = importlib.import_module("unisono.launcher.spawn")
parent, held, watch = os.pidfd_open(os.getpid()), os.dup(0), spawn._watch_parent

def watch_late(*arguments):
    os.write(1, b"%d\\n" % os.getpid())
    if multiprocessing.current_process().name == "unisono-rank-1":
        os.read(held, 1)
        os._exit(0)
    select.select([parent], [], [])
    watch(arguments[0], {signal})

spawn._watch_parent = watch_late
unisono.spawn(print, nprocs=2, start_method="fork")
"""


@pytest.mark.linux("pidfd")
@pytest.mark.parametrize("signal_works", [True, False])
def test_a_child_that_starts_as_its_parent_is_killed_ends(signal_works):
    command = [sys.executable, "-c", ORPHAN.format(signal=signal_works)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        pids = {int(parent.stdout.readline()) for _ in range(2)}
        handles = [os.pidfd_open(pid) for pid in pids]
        try:
            parent.kill()
            ended = select.select(handles, [], [], 30.0)[0]
            assert len(ended) == 1, "rank 0 goes on without its parent"
            parent.stdin.close()
            left = [handle for handle in handles if handle not in ended]
            assert select.select(left, [], [], 30.0)[0]
        finally:
            for handle in handles:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                os.close(handle)


def test_lines_of_ranks_stay_whole_if_python_does_not_buffer(launches):
    script = (
        "import sys, unisono\n"
        "def work(rank):\n"
        "    # A write of the text, and one of its end, would mix with those of other ranks.\n"
        "    assert sys.stdout.line_buffering and not sys.stdout.write_through\n"
        "    print('whole', rank)\n"
        "if __name__ == '__main__':\n"
        "    unisono.spawn(work, nprocs=2)\n"
    )
    code, out, err = launches.run(script=script, program=[sys.executable, "-u"])
    assert code == 0, err
    assert sorted(out.splitlines()) == ["whole 0", "whole 1"]
