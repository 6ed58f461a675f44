"""Workers that come and go while the others keep their state (`--restart worker`).

A *newcomer* is a worker with UNISONO_JOIN=1: the replacement of a worker that failed, or a worker
of a node that joined a running job. Its `init_process_group` waits until the other ranks call
`reconfigure`. If they end instead, the newcomer has no job. If a worker fails before it has met the
others, they wait for its rank. So its replacement is no newcomer, and takes that rank.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from unisono.core.base.deadline import Deadline
from unisono.core.base.process_identity import Life, life_of
from unisono.core.rendezvous.agents.dynamic import DynamicRendezvous, RestartsLeft
from unisono.core.rendezvous.agents.state import Idle, Replaced, Unmet
from unisono.core.rendezvous.membership import MembershipState, loads
from unisono.core.rendezvous.services import open_launched
from unisono.core.stores import PrefixStore, Store, TCPStore
from unisono.errors import UnisonoError
from unisono.launcher.back_off import BackOff
from unisono.launcher.environment import NodePlace
from unisono.launcher.report import WorkerFailure
from unisono.launcher.traceback_text import is_consequence
from unisono.launcher.workers.worker import Worker

_LOOK_S = 1.0
_STORE_S = 2.0
_DOCUMENT = "unisono/membership/document"
# Keys of torch's default group begin with it.
_TORCH = "default_pg/0//cpu//"


class Replacements:
    """The newcomers of one attempt, and the failures that do not end it.

    Args:
        place: The place of the node's workers.
        rendezvous: This node's part in the job; None: each failure ends the attempt.
        answer: Function that takes the oldest answer of the job to `ask`; None if it is not there.
        least: Number of workers of this node that must run or have ended with exit code 0.
        notify: Function that shows a line of text.
        back_off: The pauses before the restarts of this node.

    Attributes:
        newcomers: The newcomers that no rank has taken in, as far as known.
        count: Number of replacements, also if one could not be started.
        asked: The failures for which `answered` will return an answer.
        notify: See above.
    """

    def __init__(
        self,
        place: NodePlace,
        rendezvous: DynamicRendezvous | None = None,
        answer: Callable[[], RestartsLeft | None] = lambda: None,
        least: int = 0,
        notify: Callable[[str], None] = lambda line: None,
        back_off: BackOff | None = None,
    ) -> None:
        self.newcomers: set[Worker] = set()
        self.count = 0
        self.asked: deque[tuple[Worker, WorkerFailure]] = deque()
        self.notify = notify
        self._place = place
        self._rendezvous = rendezvous
        self._answer = answer
        self._least = least
        self._idle = self._met = place.node.joined
        self._next = Deadline(_LOOK_S)
        self._back_off = back_off or BackOff()

    def ask(self, worker: Worker, failure: WorkerFailure, running: Sequence[Worker]) -> bool:
        """Ask the job for a replacement; return False if it would be of no use.

        A worker must keep the state of the job. A failure that only reports the loss of another
        worker shows that the script does not call `reconfigure`.
        """
        if is_consequence(failure.text) or not self._is_held(running):
            return False
        assert self._rendezvous is not None
        self.asked.append((worker, failure))
        self._back_off.begin()
        self._rendezvous.report(Replaced, self._place.world.epoch)
        return True

    def answered(self) -> tuple[Worker, WorkerFailure, RestartsLeft] | None:
        """Return the oldest failure of `asked` with its answer.

        None if there is no answer, or if it is too early for a replacement.
        """
        if not (self.asked and self._back_off.over()) or (answer := self._answer()) is None:
            return None
        self.count += answer.granted
        return *self.asked.popleft(), answer

    def answer_in_s(self) -> float:
        """Return in how many seconds to call `answered`; infinity if a wake-up will come."""
        return self._back_off.in_s() if self.asked else float("inf")

    def has_met(self, rank: int) -> bool:
        """Return whether a worker has met the others in `init_process_group`.

        A worker that never calls it has not met the others, either.
        """
        # The number of its worlds, then its process while it meets the others.
        size = self._place.world_size
        own, *claims = self._claims([rank, (rank - 1) % size, (rank + 1) % size])
        number, _, meets = own.partition(b" ")
        if not meets:
            return int(number or 0) > 0
        # If it fails after the last barrier of the meeting, its neighbours leave the meeting.
        return any(claim.isdigit() and int(claim) >= int(number) for claim in claims)

    def may_do_without(self, failed: Worker, workers: Sequence[Worker]) -> bool:
        """Return whether the others go on without a worker that no restart is left for."""
        rest = [each for each in workers if each is not failed and not each.exit_code]
        if self._rendezvous is None or len(rest) < self._least or self._rendezvous.restart_left:
            return False
        if not self.has_met(failed.rank):
            return False
        return any(each.exit_code == 0 for each in rest) or self._is_held(rest)

    def look_in_s(self, running: Sequence[Worker]) -> float:
        """Return in how many seconds to call `unneeded`; infinity if that is not needed."""
        only = running and (self._idle or self.newcomers.issuperset(running) or self._may_wait)
        return self._next.remaining() if only else float("inf")

    def unneeded(self, running: Sequence[Worker]) -> list[Worker]:
        """Return the running workers if each of them waits to join a job without other ranks.

        If a worker waits to found a job with ranks of a node that is gone, the world ends.
        """
        if self.look_in_s(running) > 0.0:
            return []
        self._next = Deadline(_LOOK_S)
        assert self._rendezvous is not None
        if self._may_wait:
            first, count = self._place.first_rank, self._place.node.nprocs
            claims = self._claims(range(first, first + count))
            self._met = all(claim.isdigit() for claim in claims)
            if any(claim and not claim.isdigit() for claim in claims):
                self._rendezvous.report(Unmet, self._place.world.epoch)
                self._met = True
        # Read before the document: these ranks may take a newcomer in as long as they run.
        others = self._rendezvous.others_hold_state
        waiting = _processes(each.member.user for each in self._read().waiting)
        idle = self.newcomers.issuperset(running)
        if idle is not self._idle:
            self._idle = idle
            self._rendezvous.report(Idle, self._place.world.epoch, idle=idle)
        all_wait = idle and waiting.issuperset(worker.pid for worker in running)
        return list(running) if all_wait and not others else []

    @property
    def _may_wait(self) -> bool:
        """Whether workers may wait in `init_process_group` for the ranks of a node that is gone."""
        lost = self._rendezvous is not None and self._rendezvous.state.gone
        return bool(lost) and not self._met

    def _claims(self, ranks: Sequence[int]) -> list[bytes]:
        """Return what ranks wrote into the store when they met the others; b"1" if not known."""
        if not self._place.node.joined:
            keys = [f"cpu/rank/{rank}" for rank in ranks]
            with contextlib.suppress(UnisonoError):
                return _get(self._place, {f"default_pg/0/{key}": f"{_TORCH}{key}" for key in keys})
        return [b"1" for _ in ranks]

    def _is_held(self, running: Sequence[Worker]) -> bool:
        """Whether a rank of the job has its state, so that newcomers can get it."""
        if self._rendezvous is None:
            return False
        if running and self.newcomers.issuperset(running):
            self._read()
        here = not self.newcomers.issuperset(running)
        return here or self._rendezvous.others_hold_state

    def _read(self) -> MembershipState:
        """Read the document of the ranks; forget the newcomers that ranks have taken in."""
        try:
            [text] = _get(self._place, {_DOCUMENT: f"{_TORCH}{_DOCUMENT}"})
            state = loads(text)
        except UnisonoError:
            return MembershipState()
        taken = _processes(each.user for each in state.members)
        self.newcomers = {worker for worker in self.newcomers if worker.pid not in taken}
        return state


def _open(place: NodePlace) -> Store:
    """Open the workers' store."""
    world = place.world
    if world.store_url:
        return open_launched(world.store_url, _STORE_S)
    store = TCPStore(world.master_addr, world.master_port, timeout=_STORE_S, token=place.token)
    return PrefixStore(f"worker/attempt_{world.restarts}", store, owns_store=True)


def _get(place: NodePlace, keys: Mapping[str, str]) -> list[bytes]:
    """Return the values of keys of unisono's ranks, or of torch's, in the workers' store, or b"".

    The store is opened once: the agent can handle no signal while its host does not answer.

    Args:
        place: The place of the node's workers.
        keys: Key of unisono's ranks -> key of torch's ranks.
    """

    def value(key: str, torch_key: str) -> bytes:
        if store.check([key]):
            return store.get(key)
        # A service has no keys of torch: its groups meet at the first node.
        server = store.underlying_store if isinstance(store, PrefixStore) else store
        return server.get(torch_key) if server.check([torch_key]) else b""

    with _open(place) as store:
        return [value(*pair) for pair in keys.items()]


def _processes(users: Iterable[str]) -> set[int]:
    """Return the numbers of the living processes of this machine among users."""
    alive = (user for user in users if user and life_of(user) is Life.ALIVE)
    return {int(user.rpartition("~")[2]) for user in alive}
