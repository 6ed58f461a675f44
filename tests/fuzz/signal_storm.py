"""Send signals at random moments to launches whose workers fail at once, and see them end.

Each round forks a launch, waits for a random time, and sends SIGINT or SIGTERM, sometimes twice.
The launch must end in time, with the exit status of one of the signals, and leave no process.
A failing round prints its seed.

    python -m tests.fuzz.signal_storm [SEED] [ROUNDS]
"""

import contextlib
import ctypes
import gc
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import unisono
from unisono.launcher import back_off
from unisono.workbench.cli.main import main

LIMIT_S = 20.0
"""Time in which a launch must end, and in which a machine with much other work makes it end."""

_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LONGEST_S = 0.35

_FAILS = ("--no-python", "false")
_PYTHON = ("--no-python", sys.executable, "-S", "-c", "raise SystemExit(3)")
_WAITS = ("--no-python", "sleep", "100")
_DEAF = ("--no-python", "sh", "-c", "trap '' INT TERM; sleep 0.01; exit 1")
_ORPHANS = ("--no-python", "sh", "-c", "sleep 100 & exit 1")


def _run(*words):
    return lambda folder: main(["run", "--max-restarts", "100000", "--grace", "0.3", *words])


def _node(folder, node):
    return main(
        ["run", "--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint={folder}/store",
         "--rdzv-conf=store_type=file,last_call_timeout=0.05,close_timeout=1", "--grace=0.3",
         "--monitor-interval=0.01", "--max-restarts=100000", *_FAILS]
    )  # fmt: skip


def _fails(rank):
    raise ValueError("at once")


def _spawn(folder):
    while True:
        with contextlib.suppress(unisono.errors.WorkerFailedError):
            unisono.spawn(_fails, nprocs=2, start_method="fork")


def _new(folder):
    words = ["run", "--max-restarts=100000", "-n1", *_FAILS]
    code = "import sys; from unisono.__main__ import main; sys.exit(main())"
    os.execv(sys.executable, [sys.executable, "-c", code, *words])


SHAPES = {
    "fails": [_run("-n1", *_FAILS)],
    "two": [_run("-n2", *_FAILS)],
    "python": [_run("-n1", *_PYTHON)],
    "waits": [_run("-n2", *_WAITS)],
    "deaf": [_run("-n2", *_DEAF)],
    "orphans": [_run("-n1", *_ORPHANS)],
    "worker": [_run("-n2", "--restart=worker", *_FAILS)],
    "varies": [_run("-n1:3", "--restart=worker", *_FAILS)],
    "ends": [lambda folder: main(["run", "-n2", *_FAILS])],
    "succeeds": [lambda folder: main(["run", "-n2", "--no-python", "true"])],
    "nodes": [lambda folder: _node(folder, 0), lambda folder: _node(folder, 1)],
    "spawn": [_spawn],
    "new": [_new],
}
"""Launches of one round, by the name of the round's kind."""

_OWN_CODES = {"ends": {1}, "succeeds": {0}, "new": {1}}
"""Exit codes without a signal, and of an interpreter that is interrupted before it has started."""


class Fault(Exception):
    """What a round found."""


def become_heir():
    """Make orphans of the launches children of this process, so that it sees them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def round_of(seed, folder, shape=None):
    """Run one round.

    Raises:
        Fault: A launch did not end in time, ended wrongly, or left a process.
    """
    draw = random.Random(seed)
    shape = shape or draw.choice(list(SHAPES))
    backoff = draw.random() < 0.2
    launches = {}
    for number, launch in enumerate(SHAPES[shape]):
        pid = _forked(launch, folder, f"{folder}/text{number}", backoff)
        launches[pid] = os.pidfd_open(pid)
    told = f"seed {seed} ({shape}{', back-off' * backoff})"
    try:
        sent = set()
        for pid, handle in launches.items():
            signals = [(draw.uniform(0.0, _LONGEST_S), draw.choice(_SIGNALS))]
            by_group = draw.random() < 0.2  # as a terminal does
            if draw.random() < 0.3:
                signals.append((draw.uniform(0.0, 0.03), draw.choice(_SIGNALS)))
            for pause_s, signum in signals:
                # The random moment; nothing is awaited.
                if not select.select([handle], [], [], pause_s)[0]:
                    (os.killpg if by_group else os.kill)(pid, signum)
                    sent.add(signum)
                told += f", {pause_s:.4f} s {signum.name}"
        for number, handle in enumerate(launches.values()):
            if not select.select([handle], [], [], LIMIT_S)[0]:
                raise Fault(f"{told}: launch {number} did not end within {LIMIT_S:g} s")
        right = {128 + n for n in sent} | {-n for n in sent} | _OWN_CODES.get(shape, set())
        for pid in launches:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code not in right:
                raise Fault(f"{told}: exit code {code}, not one of {sorted(right)}")
        _check_none_left(told)
    except Fault as fault:
        texts = [Path(f"{folder}/text{n}").read_text()[-3000:] for n in range(len(launches))]
        raise Fault("\n".join([str(fault), *texts])) from None
    finally:
        for handle in launches.values():
            os.close(handle)


def _check_none_left(told):
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        # A killed process may need a moment to end.
        if not pid:
            if time.monotonic() > deadline:
                left = Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
                lines = [Path(f"/proc/{each}/cmdline").read_text() for each in left]
                for each in left:
                    os.kill(int(each), signal.SIGKILL)
                    os.waitpid(int(each), 0)
                raise Fault(f"{told}: left {lines}")
            select.select([], [], [], 0.005)


def _forked(launch, folder, path, backoff):
    """Run a launch in a fork with the signal handlers of a new interpreter."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    # Python would ignore a KeyboardInterrupt in a hook of fork.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(file)
        # The child does the same; one of them is first.
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", closefd=False) for n in (1, 2))
        os.chdir(folder)
        # A shell's background job ignores some signals.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for signum in _SIGNALS[1:]:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if not backoff:
            back_off.LONGEST_S = 0.0
        code = launch(folder)
    except SystemExit as error:
        code = error.code or 0
    except KeyboardInterrupt:
        # As an interpreter ends.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        traceback.print_exc()
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def storm(seed, rounds, shapes=None):
    """Run rounds; return the texts of the faults."""
    become_heir()
    gc.freeze()
    faults = []
    for number in range(seed, seed + rounds):
        with tempfile.TemporaryDirectory(prefix="storm") as folder:
            shape = shapes[number % len(shapes)] if shapes else None
            try:
                round_of(number, folder, shape)
            except Fault as fault:
                faults.append(str(fault))
                print(fault, flush=True)
                _kill_children()
    return faults


def _kill_children():
    while left := Path("/proc/self/task", str(os.getpid()), "children").read_text().split():
        for each in left:
            os.kill(int(each), signal.SIGKILL)
        for each in left:
            os.waitpid(int(each), 0)


if __name__ == "__main__":
    first = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 300
    begun = time.monotonic()
    found = storm(first, count)
    print(f"{count} rounds, {len(found)} faults, {time.monotonic() - begun:.0f} s")
    sys.exit(bool(found))
