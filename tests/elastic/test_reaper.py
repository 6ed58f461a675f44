"""The reaper program alone: whom it kills, and whom it does not."""

import contextlib
import os
import select
import signal
import subprocess
import sys

import pytest

from unisono.elastic import reaper

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and pidfd")

LIMIT_S = 10.0
SLEEPER = [sys.executable, "-S", "-c", "import signal; print(flush=True); signal.pause()"]


@pytest.fixture
def sleeper():
    """Start a process in a session of its own; it is killed in the end at the latest."""
    with contextlib.ExitStack() as stack:

        def start(**variables):
            process = subprocess.Popen(
                SLEEPER,
                stdout=subprocess.PIPE,
                env=dict(os.environ) | variables,
                start_new_session=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            process.stdout.readline()
            return process

        yield start


def reap(launch_id, text):
    """Run the reaper until it ends."""
    command = [sys.executable, "-I", "-S", reaper.__file__, launch_id]
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


def is_dead(process):
    handle = os.pidfd_open(process.pid)
    try:
        return bool(select.select([handle], [], [], 0)[0])
    finally:
        os.close(handle)


def line(process):
    return f"+ {process.pid} {reaper.start_time(process.pid)}\n"


def test_registered_groups_are_killed_at_end_of_file(sleeper):
    workers, other = [sleeper(), sleeper()], sleeper()
    reap("id", "".join(map(line, workers)))
    assert [worker.wait(LIMIT_S) for worker in workers] == [-signal.SIGKILL] * 2
    assert not is_dead(other)


@pytest.mark.parametrize("last", ["quit\n", "forget\n"])
def test_nobody_is_killed_after_the_all_clear(sleeper, last):
    worker = sleeper()
    reap("id", line(worker) + last)
    assert not is_dead(worker)


def test_number_that_changed_hands_is_spared(sleeper):
    stranger = sleeper()
    earlier = int(reaper.start_time(stranger.pid)) - 1
    reap("id", f"+ {stranger.pid} {earlier}\n")
    assert not is_dead(stranger)


def test_strays_are_found_by_the_launch_id_alone(sleeper):
    launch_id = os.urandom(16).hex()
    stray = sleeper(UNISONO_LAUNCH=launch_id)
    others = [sleeper(UNISONO_LAUNCH=launch_id + "0"), sleeper(OTHER=launch_id)]
    assert reaper.processes_of(launch_id) == [stray.pid]
    reap(launch_id, "")
    assert stray.wait(LIMIT_S) == -signal.SIGKILL
    assert not any(map(is_dead, others))


def test_signals_do_not_end_it(sleeper):
    worker = sleeper()
    command = [sys.executable, "-I", "-S", reaper.__file__, "id"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        # The registration is answered by nothing, so wait for the handlers by their effect.
        while not ignores(process.pid, signal.SIGTERM):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        process.stdin.write(line(worker).encode())
    assert process.returncode == 0
    assert worker.wait(LIMIT_S) == -signal.SIGKILL


def ignores(pid, signum):
    with open(f"/proc/{pid}/status") as status:
        [mask] = [text.split()[1] for text in status if text.startswith("SigIgn:")]
    return bool(int(mask, 16) >> (signum - 1) & 1)


def test_start_time_of_nobody_is_empty():
    process = subprocess.Popen(["true"])
    assert reaper.start_time(process.pid)
    process.wait()
    assert reaper.start_time(process.pid) == ""
