"""Whole Python processes as ranks: what they do at their end is that of any script.

Children of multiprocessing end in another way: without atexit, without sys.excepthook.
"""

import atexit
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import unisono
from tests.support.launches import Inherited
from unisono.core.stores import TCPStore

SRC = str(Path(unisono.__file__).parents[1])
LIMIT_S = 90.0

_PROLOGUE = """
import json, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import numpy as np
import unisono as dist
from tests.faults.fault_calls import attempt, store
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def tell(caught):
    print(json.dumps(vars(caught)), flush=True)
"""


@contextlib.contextmanager
def ranks_of(script, world_size, start=subprocess.Popen, **variables):
    """Start a script as every rank of a world whose store this process serves."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **variables,
    }
    try:
        with started([[]] * world_size, script, variables, start) as processes:
            yield processes, store
    finally:
        store.close()


@contextlib.contextmanager
def started(prefixes, script, variables, start=subprocess.Popen):
    """Start a script once for each prefix of its command line; end all that is left.

    A start by Forked takes a fifth of the CPU time.
    """
    path = os.pathsep.join([SRC, str(Path(__file__).parents[2])])
    world_size = str(len(prefixes))
    env = dict(os.environ) | {"PYTHONPATH": path, "WORLD_SIZE": world_size} | variables
    processes = []
    with contextlib.ExitStack() as stack:
        for rank, prefix in enumerate(prefixes):
            process = start(
                [*prefix, sys.executable, "-c", _PROLOGUE + script],
                env=env | {"RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(_end, process)
            processes.append(process)
        yield processes


class Forked:
    """A script in a fork of a server that has loaded unisono, as subprocess.Popen presents it."""

    def __init__(self, command, env, **_):
        self.stdin, self.stdout, self.stderr = (
            tempfile.TemporaryFile("w+")  # noqa: SIM115  `started` closes it
            for _ in range(3)
        )
        files = [Inherited(file.fileno()) for file in (self.stdin, self.stdout, self.stderr)]
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_execute, args=(command[-1], env, files))
        self._process.start()
        self.pid, self.kill = self._process.pid, self._process.kill

    def wait(self, timeout=None):
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"runs after {timeout} s"

    def communicate(self, timeout):
        self.wait(timeout)
        self.returncode = self._process.exitcode
        texts = []
        for file in (self.stdout, self.stderr):
            file.seek(0)
            texts.append(file.read())
        return texts


def _execute(script, env, files):
    """Become the process that runs a script, and end as it ends."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    code = 0
    try:
        exec(script, {"__name__": "__main__"})
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException as error:
        code = 1
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def outcome(process):
    """Wait for the end; return what the process told last, its exit code and its errors."""
    out, err = process.communicate(timeout=LIMIT_S)
    lines = out.splitlines()
    return (json.loads(lines[-1]) if lines else None), process.returncode, err


def _end(process):
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()
