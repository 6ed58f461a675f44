"""Whole Python processes as ranks: what they do at their end is that of any script.

Children of multiprocessing end in another way: without atexit, without sys.excepthook.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import unisono
from unisono.stores import TCPStore

SRC = str(Path(unisono.__file__).parents[1])
LIMIT_S = 90.0
Process = subprocess.Popen

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
def ranks_of(script, world_size, **variables):
    """Start a script as every rank of a world whose store this process serves."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **variables,
    }
    try:
        with started([[]] * world_size, script, variables) as processes:
            yield processes, store
    finally:
        store.close()


@contextlib.contextmanager
def started(prefixes, script, variables):
    """Start a script once for each prefix of its command line; end all that is left."""
    path = os.pathsep.join([SRC, str(Path(__file__).parents[2])])
    world_size = str(len(prefixes))
    env = dict(os.environ) | {"PYTHONPATH": path, "WORLD_SIZE": world_size} | variables
    processes = []
    with contextlib.ExitStack() as stack:
        for rank, prefix in enumerate(prefixes):
            process = Process(
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
