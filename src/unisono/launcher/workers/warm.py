"""Workers of the next attempt, half-started while the present ones run: they have torch already.

After a failure all workers are started again, and most of the time until their first collective
goes by in `import torch`. So while a job runs, the agent starts an interpreter for each worker with
the worker's own command line. It stops before the script, with torch loaded, and waits; see
`warm_site/sitecustomize.py`. At a restart it gets its environment and goes on.

That torch is loaded a little early must not show. So there is none for a script that might tell
torch something through its environment first, as far as its own files let one see.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence

from unisono.base.deadline import Deadline
from unisono.errors import LaunchError
from unisono.launcher.workers import warm_site
from unisono.launcher.workers.worker import Worker

__all__ = ["FIRST_LOOK_S", "WarmWorkers"]

FIRST_LOOK_S = 2.0
"""How long a job runs before the first one is started: the workers need the CPUs themselves."""

_BETWEEN_S = 1.0
_LAST_LOOK_S = 60.0
_TORCH = re.compile(r" (/\S*/torch)/lib/libtorch_cpu\.\S+\n")


class WarmWorkers:
    """The half-started workers of one node.

    Args:
        commands: Command line of each worker.
        count: How many of the first workers may have one.
    """

    def __init__(self, commands: Sequence[Sequence[str]], count: int) -> None:
        self._commands = commands[:count]
        self._candidates = list(range(len(self._commands)))
        self._waiting: dict[int, tuple[Worker, socket.socket]] = {}
        self._pause_s = FIRST_LOOK_S
        self._next: Deadline | None = None

    def begin(self, *, wanted: bool) -> None:
        """Take note that an attempt has started; `wanted`: there may be a further one."""
        self.close()
        self._pause_s = FIRST_LOOK_S
        self._next = Deadline(self._pause_s) if self._candidates and wanted else None

    def due_s(self) -> float | None:
        """Return in how many seconds to call `look`; None if not again."""
        return None if self._next is None else self._next.remaining()

    def look(
        self,
        running: Sequence[Worker],
        environment: Callable[[int], dict[str, str]],
        start: Callable[[int, Mapping[str, str], Sequence[int]], Worker],
    ) -> None:
        """Start the next one if it is time, and if the worker whose place it takes uses torch.

        Args:
            running: The workers of this node, by local rank.
            environment: Returns that of a local rank in this attempt.
            start: Starts the worker of a local rank with an environment and open descriptors.
        """
        if self._next is None or not self._next.expired():
            return
        missing = [rank for rank in self._candidates if rank not in self._waiting]
        for local_rank in missing:
            if folder := _torch_of(running[local_rank].pid):
                if not _is_safe(self._commands[local_rank]):
                    self._candidates.remove(local_rank)
                    continue
                self._start(local_rank, environment(local_rank), folder, start)
                self._next = Deadline(_BETWEEN_S) if len(missing) > 1 else None
                return
        self._pause_s *= 2
        self._next = Deadline(self._pause_s) if self._pause_s <= _LAST_LOOK_S else None

    def take(self, local_rank: int, env: Mapping[str, str]) -> Worker | None:
        """Let a worker go on with its environment; None if there is none that is ready."""
        if local_rank not in self._waiting:
            return None
        worker, link = self._waiting.pop(local_rank)
        text = json.dumps(dict(env)).encode()
        with link, contextlib.suppress(OSError):
            # One that is not ready yet could still fail, and this would be taken for the script's.
            if link.recv(1) and link.send(text) == len(text):
                return worker
        _discard(worker)
        return None

    def pids(self) -> list[int]:
        """Return the process numbers of those that wait."""
        return [worker.pid for worker, _ in self._waiting.values()]

    def close(self) -> None:
        """End those that nobody has taken."""
        for worker, link in self._waiting.values():
            link.close()
            _discard(worker)
        self._waiting.clear()

    def _start(
        self,
        local_rank: int,
        env: dict[str, str],
        torch_folder: str,
        start: Callable[[int, Mapping[str, str], Sequence[int]], Worker],
    ) -> None:
        ours, theirs = socket.socketpair()
        # Neither one that is not ready nor an environment too large shall make the agent wait.
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
                # No more processes, or no memory: the restart will do without.
                ours.close()
                self._candidates.remove(local_rank)


def _discard(worker: Worker) -> None:
    worker.kill_group()
    with contextlib.suppress(LaunchError):
        worker.reap()
    for stream in (worker.stdout, worker.stderr):
        if stream is not None:
            stream.close()


def _torch_of(pid: int) -> str:
    """Return the folder of the torch that a process has loaded, or ""."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            found = _TORCH.search(maps.read())
    except OSError:
        return ""
    return found[1] if found else ""


def _is_safe(command: Sequence[str]) -> bool:
    # Loaded when a job has been running for a while: it needs the compiler's modules.
    from unisono.launcher.workers.script_scan import is_untouched

    return is_untouched(*command)
