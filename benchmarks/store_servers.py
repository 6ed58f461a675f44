"""The servers that `benchmarks/store.py` compares, each in a separate process.

`python benchmarks/store_servers.py KIND` is such a process. Its main thread waits for a line on
standard input, and then computes in Python without end.
"""

from __future__ import annotations

import glob
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from importlib import import_module, util
from typing import Any

from unisono.core.base.deadline import Deadline
from unisono.core.stores import TCPStore
from unisono.launcher.workers.worker import opened, parent_death_hook

KINDS = ("torch", "unisono", "redis")

_START_S = 60.0


def why_not(kind: str) -> str:
    """Return why a server cannot run here; empty if it can."""
    if kind == "torch" and util.find_spec("torch") is None:
        return "torch is not installed"
    if kind == "redis" and shutil.which("redis-server") is None:
        return "redis-server is not installed (Debian's package redis-server has it)"
    return ""


class Server:
    """One running server; a context manager that stops it.

    Args:
        kind: One of `KINDS`.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        command = _redis_command() if kind == "redis" else [sys.executable, __file__, kind]
        self._process: subprocess.Popen[str] = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # If the benchmark is killed, paused servers and Redis are killed, too.
            preexec_fn=parent_death_hook(),
        )
        try:
            port = command[-1] if kind == "redis" else opened(self._process.stdout).readline()
            self.port = int(port)
            _wait_for(self.port)
        except BaseException:
            self.close()
            raise

    def cpu_us(self) -> float:
        """Return the CPU time that the server has used so far."""
        return sum(map(_ran_ns, glob.glob(f"/proc/{self._process.pid}/task/*/schedstat"))) / 1e3

    def resident_bytes(self) -> int:
        """Return the resident memory of the server."""
        with open(f"/proc/{self._process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def keep_python_busy(self) -> None:
        """Make the main thread of the server's process compute in Python, until `close`."""
        stdin = opened(self._process.stdin)
        stdin.write("busy\n")
        stdin.flush()

    def pause(self) -> None:
        """Stop the process, so that it uses no CPU while others are measured."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a paused process."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _ran_ns(path: str) -> int:
    try:
        with open(path) as file:
            return int(file.read().split()[0])
    except OSError:  # that thread has just ended
        return 0


def _redis_command() -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = ["--bind", "127.0.0.1", "--appendonly", "no", "--loglevel", "warning", "--save"]
    return ["redis-server", *words, "", "--port", str(port)]


def _wait_for(port: int) -> None:
    deadline = Deadline(_START_S)
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError as error:
            if deadline.expired():
                raise TimeoutError(f"the server did not start: {error}") from error
            time.sleep(0.02)


def _serve(kind: str) -> None:
    if kind == "torch":
        dist: Any = import_module("torch.distributed")
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=300))
    else:
        store = TCPStore("127.0.0.1", 0, is_master=True, token="")
    print(store.port, flush=True)
    if sys.stdin.readline():
        while True:
            pass


if __name__ == "__main__":
    _serve(sys.argv[1])
