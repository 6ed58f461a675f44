"""Signals at any moment of a launch, and the pauses between restarts."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from tests.support.programs import python
from unisono.core.base.deadline import Deadline
from unisono.launcher import back_off
from unisono.launcher.agent import Agent
from unisono.launcher.back_off import BackOff
from unisono.launcher.signals import ENDING, Signals

pytestmark = pytest.mark.linux("adopts orphans")


class Swallowing:
    """Sends a signal where Python ignores exceptions."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


def begin_badly(*args, **keywords):
    Swallowing()
    return Agent(*args, **keywords)


def test_signal_before_the_agent_can_handle_it_is_not_lost(launches):
    patches = {"unisono.workbench.cli.run.run.Agent": begin_badly}
    code, out, err = launches.run("-n1", script="input()\nprint('ended')", patches=patches)
    assert (code, out) == (130, ""), err
    assert err == "unisono run: stopped by SIGINT\n"


def test_signal_while_the_command_is_imported_is_not_lost(tmp_path):
    # Python ignores exceptions in callbacks of its import system, as it does here.
    script = tmp_path / "s.py"
    script.write_text(
        "import os, signal, sys\n"
        "from unisono.__main__ import main\n"
        "class Swallowing:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "class Finder:\n"
        "    def find_spec(self, name, *others):\n"
        "        if name == 'unisono.workbench.cli.main':\n"
        "            Swallowing()\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv[1:] = ['--version']\n"
        "sys.exit(main())\n"
    )
    done = python(script)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "unisono: interrupted\n"


@pytest.mark.parametrize("name", ENDING)
def test_signal_that_also_the_guard_forwards_counts_once(monkeypatch, name):
    """Slurm sends it to all processes, so the launcher gets it twice."""
    signum = getattr(signal, name)
    another = signal.SIGTERM if name == "SIGINT" else signal.SIGINT
    # A shell's background job ignores some of them, and `Signals` keeps that.
    before = {each: signal.signal(each, signal.default_int_handler) for each in (signum, another)}
    with contextlib.ExitStack() as stack:
        for each in before.items():
            stack.callback(signal.signal, *each)
        signals = stack.enter_context(Signals())
        counts = []
        for each in (signum, signum, another, signal.SIGUSR1, signal.SIGUSR1, signum):
            signal.raise_signal(each)
            counts.append(signals.read())
        assert counts == [[signum], [], [another], [signal.SIGUSR1], [signal.SIGUSR1], []]
        # Later it is the second one, by which the user ends the grace period.
        monkeypatch.setattr(Deadline, "expired", lambda self: True)
        signal.raise_signal(signum)
        assert signals.ending() == signum


def signal_in_report(result):
    os.kill(os.getpid(), signal.SIGTERM)
    print("the report", file=sys.stderr, flush=True)


def test_signal_at_the_end_changes_no_exit_code_and_no_report(launches):
    patches = {"unisono.workbench.cli.run.run._print_report": signal_in_report}
    code, _, err = launches.run("-n1", script="raise SystemExit(7)", patches=patches)
    assert (code, err) == (7, "the report\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_a_child_is_forked_is_not_lost(tmp_path, number):
    # Python ignores the exception of a signal handler that runs in a hook of fork.
    script = tmp_path / "s.py"
    script.write_text(
        "import os, signal, sys, unisono\n"
        "def handler(signum, frame):\n"
        "    sys.exit(9)\n"
        f"signal.signal({int(number)}, handler)\n"
        f"os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), {int(number)}))\n"
        "def fn(rank):\n"
        f"    assert signal.getsignal({int(number)}) is handler\n"
        "unisono.spawn(fn, nprocs=2, start_method='fork')\n"
    )
    done = python(script)
    assert (done.returncode, done.stdout, done.stderr) == (9, "", "")


def test_signal_ends_an_agent_whose_store_stands_still(job_of):
    job = job_of()
    first, second, *_ = job.pair("--grace=0.2")
    os.kill(first.inner(), signal.SIGSTOP)
    try:
        second.send_signal(signal.SIGINT)
        # A read of the store waits for a minute.
        assert second.wait(40.0) == 130
    finally:
        os.kill(first.inner(), signal.SIGCONT)


def pauses(monkeypatch, *between_s):
    """Return the pauses before restarts whose workers ran for so long."""
    now = [0.0]
    monkeypatch.setattr(back_off.time, "monotonic", lambda: now[0])
    found, pauses = [], BackOff()
    for ran_s in between_s:
        now[0] += ran_s
        found.append(round(pauses.begin(), 3))
        now[0] += found[-1]
    return found


def test_pauses_grow_while_workers_fail_at_once(monkeypatch):
    at_once = [0.01] * 9
    assert pauses(monkeypatch, *at_once) == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_first_restart_after_a_long_run_is_immediate(monkeypatch):
    assert pauses(monkeypatch, 3600, 3600, 0.1, 0.1, 3600, 4.9, 5.1) == [0, 0, 0.1, 0.2, 0, 0.1, 0]


@pytest.mark.parametrize("restart", ["all", "worker"])
def test_signal_ends_a_pause_between_restarts(launches, restart):
    patches = {"unisono.launcher.back_off.FIRST_S": 1000.0}
    patches["unisono.launcher.back_off.LONGEST_S"] = 1000.0
    script = """
import os, signal
if os.environ["RANK"] == "1":
    signal.pause()
print("fails", flush=True)
raise SystemExit(7)
"""
    flags = "-n2", "--max-restarts=9", f"--restart={restart}"
    launch = launches.start(*flags, script=script, patches=patches)
    launch.lines(2, "fails")
    launch.send_signal(signal.SIGTERM)
    code, out, err = launch.finish()
    assert (code, out) == (143, "fails\n" * 2)
    assert ("restart 1 of 9\n" if restart == "all" else "replacement 1 of 9\n") in err


@pytest.mark.parametrize(
    ("seed", "rounds"), [(1, 26), pytest.param(1000, 300, marks=pytest.mark.whole("takes 80 s"))]
)
def test_storm_of_signals(seed, rounds):
    """`make fuzz-signals` sends more."""
    command = [sys.executable, "-m", "tests.fuzz.signal_storm", str(seed), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
