"""Replacements of single workers, while the others keep their state (`--restart worker`).

A replacement has the place of the worker that failed, and UNISONO_JOIN=1. Its `init_process_group`
waits until the other ranks call `reconfigure`. If they end instead, the replacement has no job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unisono.base.deadline import Deadline
from unisono.errors import StoreError
from unisono.launcher.environment import Place
from unisono.launcher.report import WorkerFailure, is_consequence
from unisono.launcher.workers.worker import Worker
from unisono.rendezvous.membership import loads
from unisono.stores import TCPStore

_LOOK_S = 1.0
_STORE_S = 2.0


class Replacements:
    """The replacements of one attempt.

    Args:
        place: The place of the node's workers.
        budget: Largest number of replacements; 0 if a failure restarts all workers.
        on_replacement: Function that is called with the failure before a replacement starts.

    Attributes:
        workers: The replacements.
        count: Number of replacements, also if one could not be started.
    """

    def __init__(
        self, place: Place, budget: int, on_replacement: Callable[[WorkerFailure], None]
    ) -> None:
        self.workers: list[Worker] = []
        self.count = 0
        self._place = place
        self._budget = budget
        self._on_replacement = on_replacement
        self._next = Deadline(_LOOK_S)

    def may_replace(self, failure: WorkerFailure, running: Sequence[Worker]) -> bool:
        """Return whether a worker that failed may get a replacement.

        A worker of the first world must keep the state of the job. A failure that only reports the
        loss of another worker shows that the script does not call `reconfigure`.
        """
        others = [worker for worker in running if worker not in self.workers]
        return self.count < self._budget and bool(others) and not is_consequence(failure.text)

    def begin(self, failure: WorkerFailure) -> None:
        """Count the next replacement."""
        self.count += 1
        self._on_replacement(failure)

    def look_in_s(self, running: Sequence[Worker]) -> float:
        """Return in how many seconds to call `unneeded`; infinity if that is not needed."""
        only = running and all(worker in self.workers for worker in running)
        return self._next.remaining() if only else float("inf")

    def unneeded(self, running: Sequence[Worker]) -> list[Worker]:
        """Return the running workers if each of them waits to join a job without other ranks."""
        if self.look_in_s(running) > 0.0:
            return []
        self._next = Deadline(_LOOK_S)
        waiting = self._waiting()
        return list(running) if all(worker.pid in waiting for worker in running) else []

    def _waiting(self) -> set[int]:
        """Return the process numbers of the newcomers that no rank has admitted."""
        world = self._place.world
        key = f"worker/attempt_{world.restarts}/unisono/membership/document"
        try:
            with TCPStore(
                world.master_addr, world.master_port, timeout=_STORE_S, token=self._place.token
            ) as store:
                text = store.get(key) if store.check([key]) else b""
        except StoreError:
            return set()
        return {int(each.member.user.rpartition("~")[2]) for each in loads(text).waiting}
