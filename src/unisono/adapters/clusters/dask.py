"""Groups whose ranks are tasks on Dask workers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from unisono.adapters.clusters import member
from unisono.adapters.clusters.meeting import Meeting, close_meeting, open_meeting
from unisono.adapters.clusters.member import RankOutcome
from unisono.adapters.clusters.outcomes import OUTSIDE, CallOnRanks, T, collect
from unisono.core.base.deadline import Deadline, Timeout
from unisono.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError, UsageError

try:
    from distributed import Client, Future, wait
    from distributed.comm import get_address_host
    from distributed.scheduler import KilledWorker
except ImportError as error:
    raise ImportError("unisono.dask needs Dask: pip install 'unisono[dask]'") from error

_FETCH_S = 5.0
"""How long a result may travel before the caller looks for lost workers. The time doubles with each
attempt, because a large result may take longer."""

_clients: dict[Meeting, str] = {}
"""On the scheduler: the client of each meeting that is open."""

_HINT = "is each worker idle? A rank takes one thread of its worker until the end of the call"


def run(
    client: Client,
    fn: Callable[..., Any],
    *args: Any,
    workers: Sequence[Any] | None = None,
    timeout: Timeout = 60,
    backend: str | None = None,
) -> list[Any]:
    """Call `fn(*args)` on Dask workers as the ranks of one group; return the results, by rank.

    Inside `fn` the default process group has one rank per worker. The group ends with the call.
    The scheduler serves the store of the group, so unisono must be installed there too.

    Args:
        client: Client of the cluster.
        fn: Function of `args`. Dask pickles it.
        args: The same for every rank. A Dask future becomes its result.
        workers: Addresses or names of the workers; rank 0 first. If None, all workers, in the order
            of their addresses.
        timeout: For the start of all ranks; seconds or timedelta. Calls in the group have the
            default time-out of `init_process_group`.
        backend: As for `init_process_group`.

    Raises:
        RendezvousError: Ranks did not start in time; names them and their workers.
        PeerLostError: A worker died; names its rank and address.
        InvalidArgumentError: A worker that does not exist, or a worker given twice.
        UsageError: Workers are threads of one process.
        UnsupportedError: The client is asynchronous.
        Exception: The error of the rank that failed first. Its cause is a WorkerFailedError that
            ends with the traceback.
    """
    if not isinstance(client, Client):
        raise ArgumentTypeError(f"client must be a Client of Dask, got {type(client).__name__}")
    if client.asynchronous:
        raise UnsupportedError(
            "unisono.dask.run needs a synchronous client: it would block the event loop",
            hint="call it in a thread, with a Client(..., asynchronous=False)",
        )
    found = client.run_on_scheduler(_find, workers)
    addresses = [address for address, _ in found]
    for rank, address in enumerate(addresses):
        if address in addresses[:rank]:
            raise InvalidArgumentError(
                f"worker {address} is given twice: each rank needs a worker of its own"
            )
        if address.startswith("inproc:"):
            raise UsageError(
                f"worker {address} is a thread: each rank needs a process of its own",
                hint="start the cluster with processes=True",
            )
    meeting = client.run_on_scheduler(_open, client.id, len(found), timeout, backend)
    call = _Tasks(client, meeting, found)
    try:
        start = Deadline(timeout)
        call.submit(fn, *args)
        return collect(call, start, hint=_HINT)
    finally:
        client.cancel(list(call.pending), force=True)
        call.at_store(_close)


class _Tasks(CallOnRanks):
    """One task on each worker.

    Dask keeps a task pending for ever if the only worker that may run it has died. This class
    therefore asks the scheduler about the workers, too.
    """

    def __init__(
        self, client: Client, meeting: Meeting, workers: Sequence[tuple[str, str]]
    ) -> None:
        super().__init__(meeting, [f"worker {address}" for address, _ in workers])
        self.pending: dict[Future, int] = {}
        self._client = client
        self._workers = workers
        self._fetch_s = _FETCH_S

    def at_store(self, fn: Callable[..., T], *args: Any) -> T:
        """Call `fn(meeting, *args)` on the scheduler."""
        result: T = self._client.run_on_scheduler(fn, self.meeting, *args)
        return result

    def submit(self, fn: Callable[..., Any], *args: Any) -> None:
        """Submit the ranks, each to its worker only, and to be run at most once."""
        name = f"unisono-{uuid.uuid4().hex}"
        how: dict[str, Any] = {"allow_other_workers": False, "pure": False, "retries": 0}
        for rank, (address, _) in enumerate(self._workers):
            how |= {"key": f"{name}-{rank}", "workers": [address]}
            future = self._client.submit(_rank, self.meeting, rank, fn, *args, **how)
            self.pending[future] = rank

    def poll(self, timeout_s: float) -> Iterator[RankOutcome]:
        """Wait for the first tasks that end, and look for lost workers."""
        try:
            done = wait(list(self.pending), timeout=timeout_s, return_when="FIRST_COMPLETED").done
        except TimeoutError:
            done = set()
        for future in done:
            if outcome := self._outcome(future):
                del self.pending[future]
                yield outcome
        if not done:
            lost = self._client.run_on_scheduler(_lost, self._workers)
            for future, rank in list(self.pending.items()):
                if rank in lost:
                    del self.pending[future]
                    yield RankOutcome(rank=rank, lost="the scheduler lost the connection to it")

    def _outcome(self, future: Future) -> RankOutcome | None:
        """Return the outcome of a task that has ended; None if it is not here yet."""
        rank = self.pending[future]
        try:
            outcome: RankOutcome = future.result(timeout=self._fetch_s)
            return outcome
        except TimeoutError:
            # The worker may have died after the end of the task; then Dask would wait for ever.
            self._fetch_s *= 2
            return None
        except KilledWorker as error:
            return RankOutcome(rank=rank, lost=str(error))
        except Exception as error:
            return member.failure(self.meeting, rank, error, OUTSIDE)


def _rank(meeting: Meeting, rank: int, fn: Callable[..., Any], *args: Any) -> RankOutcome:
    return member.attempt(meeting, rank, lambda: member.join_and_call(meeting, rank, fn, *args))


def _find(workers: Sequence[Any] | None, dask_scheduler: Any = None) -> list[tuple[str, str]]:
    """Return the address and the id of each worker; called on the scheduler.

    A restarted worker may have the address of the former worker, but has another id.
    """
    known: Mapping[str, Any] = dask_scheduler.workers
    if workers is None:
        addresses = sorted(known)
    else:
        addresses = [dask_scheduler.coerce_address(each, resolve=False) for each in workers]
    for address in addresses:
        if address not in known:
            raise InvalidArgumentError(
                f"{address!r} is no worker of this cluster (workers: {', '.join(sorted(known))})"
            )
    return [(address, known[address].server_id) for address in addresses]


def _open(
    client: str, size: int, timeout: Timeout, backend: str | None, dask_scheduler: Any = None
) -> Meeting:
    """Serve a store on the scheduler, and close the stores of clients that have gone."""
    for meeting, other in list(_clients.items()):
        if other not in dask_scheduler.clients:
            _close(meeting)
    host = get_address_host(dask_scheduler.address)
    meeting = open_meeting(host, size, timeout, backend, "cloudpickle")
    _clients[meeting] = client
    return meeting


def _close(meeting: Meeting) -> None:
    _clients.pop(meeting, None)
    close_meeting(meeting)


def _lost(workers: Sequence[tuple[str, str]], dask_scheduler: Any = None) -> set[int]:
    """Return the ranks whose workers are gone; called on the scheduler."""
    known: Mapping[str, Any] = dask_scheduler.workers
    ids = [known[address].server_id if address in known else None for address, _ in workers]
    return {rank for rank, (_, id) in enumerate(workers) if ids[rank] != id}
