"""Half-started workers with torch loaded, which make a restart faster.

After a failure all workers are started again. `import torch` takes most of the time until their
first collective. While a job runs, the agent therefore starts a second interpreter for each worker
with the worker's command line. It loads torch and waits before the script (see
`warm_site/sitecustomize.py`). At a restart it gets its environment and runs the script.

A script must not notice that torch was loaded early. A worker therefore has no half-started
worker if its script may change the environment before it imports torch (see `script_scan`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence

from unisono.core.base.deadline import Deadline
from unisono.core.platform.processes import loaded_files
from unisono.errors import LaunchError
from unisono.launcher.workers import warm_site
from unisono.launcher.workers.worker import CommandWorker, Worker

FIRST_LOOK_S = 2.0
"""How long a job runs before the first half-started worker; until then the job needs the CPUs."""

_BETWEEN_S = 1.0
_LAST_LOOK_S = 60.0
_TORCH = re.compile(r"(/\S*/torch)/lib/libtorch_cpu\.\S+")


class WarmWorkers:
    """The half-started workers of one node.

    Args:
        commands: Command line of each worker.
        count: Only workers with a local rank below this number may have a half-started worker.
    """

    def __init__(self, commands: Sequence[Sequence[str]], count: int) -> None:
        self._commands = commands[:count]
        self._candidates = list(range(len(self._commands)))
        self._waiting: dict[int, tuple[CommandWorker, socket.socket]] = {}
        self._pause_s = FIRST_LOOK_S
        self._next: Deadline | None = None

    def begin(self, *, wanted: bool) -> None:
        """Begin to prepare for the next attempt if it is `wanted`, that is, if it is possible."""
        self.close()
        self._pause_s = FIRST_LOOK_S
        self._next = Deadline(self._pause_s) if self._candidates and wanted else None

    def due_s(self) -> float | None:
        """Return in how many seconds to call `look`; None if no further call is needed."""
        return None if self._next is None else self._next.remaining()

    def look(
        self,
        running: Mapping[int, Worker],
        environment: Callable[[int], dict[str, str]],
        start: Callable[[int, Mapping[str, str], Sequence[int]], CommandWorker],
    ) -> None:
        """Start the next half-started worker if it is time and if the running worker uses torch.

        Args:
            running: The workers of this node, by local rank.
            environment: Function that returns the environment of a local rank in this attempt.
            start: Function that starts the worker of a local rank with an environment and open
                descriptors.
        """
        if self._next is None or not self._next.expired():
            return
        missing = [rank for rank in self._candidates if rank in running.keys() - self._waiting]
        for local_rank in missing:
            if folder := _torch_of(running[local_rank].pid):
                # Imported late, because it imports the modules of Python's compiler.
                from unisono.launcher.workers.script_scan import is_untouched

                if not is_untouched(*self._commands[local_rank]):
                    self._candidates.remove(local_rank)
                    continue
                self._start(local_rank, environment(local_rank), folder, start)
                self._next = Deadline(_BETWEEN_S) if len(missing) > 1 else None
                return
        self._pause_s *= 2
        self._next = Deadline(self._pause_s) if self._pause_s <= _LAST_LOOK_S else None

    def take(self, local_rank: int, env: Mapping[str, str]) -> CommandWorker | None:
        """Send the environment to a half-started worker and return it; None if none is ready."""
        if local_rank not in self._waiting:
            return None
        worker, link = self._waiting.pop(local_rank)
        text = json.dumps(dict(env)).encode()
        with link, contextlib.suppress(OSError):
            # A worker that is not ready could still fail, which would look like a failure of the
            # script.
            if link.recv(1) and link.send(text) == len(text):
                return worker
        _discard(worker)
        return None

    def pids(self) -> list[int]:
        """Return the process numbers of the half-started workers."""
        return [worker.pid for worker, _ in self._waiting.values()]

    def close(self) -> None:
        """Stop the half-started workers that were not taken."""
        for worker, link in self._waiting.values():
            link.close()
            _discard(worker)
        self._waiting.clear()

    def _start(
        self,
        local_rank: int,
        env: dict[str, str],
        torch_folder: str,
        start: Callable[[int, Mapping[str, str], Sequence[int]], CommandWorker],
    ) -> None:
        ours, theirs = socket.socketpair()
        # Otherwise the agent would wait for a worker that is not ready, or for one that does not
        # read a large environment.
        ours.setblocking(False)
        paths = [os.path.dirname(warm_site.__file__), env.get("PYTHONPATH", "")]
        env |= {
            "UNISONO_WARM_LINK": f"{theirs.fileno()}:{torch_folder}",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        with theirs:
            try:
                self._waiting[local_rank] = start(local_rank, env, [theirs.fileno()]), ours
            except LaunchError:
                # No process or no memory is left: the restart starts this worker as usual.
                ours.close()
                self._candidates.remove(local_rank)


def _discard(worker: CommandWorker) -> None:
    worker.kill()
    with contextlib.suppress(LaunchError):
        worker.reap()
    for stream in (worker.stdout, worker.stderr):
        if stream is not None:
            stream.close()


def _torch_of(pid: int) -> str:
    """Return the folder of the torch that a process has loaded, or ""."""
    found = filter(None, map(_TORCH.fullmatch, loaded_files(pid)))
    return next((each[1] for each in found), "")
