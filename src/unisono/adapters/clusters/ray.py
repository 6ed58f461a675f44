"""Groups whose ranks are Ray actors."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from unisono.adapters.clusters import member
from unisono.adapters.clusters.meeting import STARTED, Meeting, close_meeting, open_meeting, posts
from unisono.adapters.clusters.member import RankOutcome, Transfers
from unisono.adapters.clusters.outcomes import OUTSIDE, CallOnRanks, collect
from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.c10d.new_groups import new_group
from unisono.core.groups.process_group import group_timeout_s
from unisono.errors import (
    ArgumentTypeError,
    ClosedError,
    InvalidArgumentError,
    UnsupportedError,
    UsageError,
)

try:
    import ray
    from ray import cloudpickle as _pickler
    from ray.actor import ActorHandle
    from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
except ImportError as error:
    raise ImportError("unisono.ray needs Ray: pip install 'unisono[ray]'") from error

_CLOSE_S = 5.0
"""How long `close` waits for actors. A busy actor leaves the group at the end of its call."""

_AGAIN_S = 0.2
"""How long until the call of an actor that Ray restarts is made again; Ray refuses it at once."""

_HINT = "does the cluster have the resources that the actor asks for, and is the actor idle?"


def init_group(
    actors: Sequence[Any],
    backend: str | None = None,
    timeout: Timeout = 60,
    name: str = "ray",
) -> Group:
    """Make a default process group in running actors; their order gives the ranks.

    In the actors all functions of unisono use this group from then on, in every method of the
    actor. A former default group of an actor is closed.

    The caller serves the store of the group and must live as long as the group. It may be a
    driver on a node of the cluster, an actor or a task.

    Args:
        actors: Actor handles, each of another actor; rank 0 first.
        backend: As for `init_process_group`.
        timeout: For the start of all ranks; seconds or timedelta. Calls in the group have the
            default time-out of `init_process_group`.
        name: Name of the group in error messages.

    An actor that Ray is restarting (`max_restarts`) is waited for.

    Raises:
        RendezvousError: Actors did not start in time; names them.
        PeerLostError: An actor died.
        InvalidArgumentError: No actors, or an actor given twice.
        UnsupportedError: The caller uses Ray Client, which the actors cannot reach.
        Exception: The error of the rank that failed first.
    """
    actors = list(actors)
    for actor in actors:
        if not isinstance(actor, ActorHandle):
            raise ArgumentTypeError(f"actors must be actor handles, got {type(actor).__name__}")
    ids = [actor._actor_id for actor in actors]
    if twice := [rank for rank, each in enumerate(ids) if each in ids[:rank]]:
        raise InvalidArgumentError(
            f"actors {ids.index(ids[twice[0]])} and {twice[0]} are the same actor: each rank needs "
            "an actor of its own"
        )
    if ray.util.client.ray.is_connected():
        raise UnsupportedError(
            "unisono.ray.init_group through Ray Client: the actors cannot reach this process",
            hint="call it in a task or an actor, or submit the program with `ray job submit`",
        )
    host = ray.util.get_node_ip_address()
    meeting = open_meeting(host, len(actors), timeout, backend, _pickler.__name__)
    names = [f"{actor!r} of group {name!r}" for actor in actors]
    group = Group(actors, meeting, names)
    transfers = Transfers.actors is not None
    try:
        calls = group._call(_join, transfers, ids)
        calls.again = lambda rank: group._submit(rank, _join, transfers, ids)
        collect(calls, Deadline(timeout), hint=_HINT)
    except BaseException:
        close_meeting(meeting)
        raise
    if Transfers.actors is not None:
        Transfers.actors[meeting.token] = ids
        weakref.finalize(group, Transfers.actors.pop, meeting.token, None)
    return group


def register_collective() -> None:
    """Register the backend "UNISONO" of `ray.util.collective`, in this process.

    Call it in each actor, and in the driver for `create_collective_group`. Further calls do
    nothing. The groups of `ray.util.collective` are independent of `init_group`.
    """
    from ray.util.collective.backend_registry import register_collective_backend

    from unisono.adapters.clusters.ray_collective import CollectiveGroup

    with contextlib.suppress(ValueError):  # It is registered already.
        register_collective_backend(CollectiveGroup.backend(), CollectiveGroup)


def register_tensor_transport() -> None:
    """Register the transports "UNISONO" and "UNISONO_NUMPY" of Ray's direct transport.

    Then tensors, or NumPy arrays, that an actor's method with `tensor_transport="unisono"` or
    "unisono_numpy" returns go from actor to actor by messages, not through Ray's object store. Both
    actors must be in one group of `init_group`.

    Call it in the driver, before the classes of these actors and `init_group`. Further calls do
    nothing.

    Raises:
        ImportError: This Ray has no direct transport.
    """
    if Transfers.actors is None:
        from unisono.adapters.clusters.ray_transport import register

        register()
        Transfers.actors = {}


class Group:
    """A process group in Ray actors, which `init_group` returns.

    As a context manager it closes the group at the end.

    Attributes:
        size: Number of ranks.
    """

    def __init__(self, actors: Sequence[Any], meeting: Meeting, names: Sequence[str]) -> None:
        self.size = meeting.size
        self._actors = actors
        self._meeting = meeting
        self._names = names
        self._closed = False
        self._runs = threading.Lock()

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `fn(actor, *args)` in every actor at once and return the results, by rank.

        If `fn` raises an error on a rank, the other ranks in a call of unisono raise
        PeerFailedError, and the group is broken. It stays usable after errors that leave a group
        usable, such as CollectiveMismatchError.

        Args:
            fn: Function of the actor's instance and further arguments. Ray pickles it.
            args: The same for every rank. An ObjectRef becomes its object.

        Raises:
            PeerLostError: An actor died; names its rank.
            UsageError: Another thread is in a call of `run`. Two calls might reach the actors in
                different orders.
            Exception: The error of the rank that failed first. Its cause is a WorkerFailedError
                that ends with the traceback.
        """
        if self._closed:
            raise ClosedError("the group of Ray actors is closed")
        if not self._runs.acquire(blocking=False):
            raise UsageError("run: another thread is in a call of run of this group")
        try:
            return collect(self._call(_run, fn, *args))
        finally:
            self._runs.release()

    def close(self) -> None:
        """Close the group in all actors; the actors live on. A second call does nothing."""
        if not self._closed:
            self._closed = True
            (Transfers.actors or {}).pop(self._meeting.token, None)
            try:
                if ray.is_initialized():  # Otherwise the calls would start another Ray.
                    refs = [a.__ray_call__.remote(_leave, self._meeting) for a in self._actors]
                    ray.wait(refs, num_returns=len(refs), timeout=_CLOSE_S)
            finally:
                close_meeting(self._meeting)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Group of {self.size} Ray actors{', closed' if self._closed else ''}>"

    def _call(self, action: Callable[..., RankOutcome], *args: Any) -> _ActorCalls:
        calls = _ActorCalls(self._meeting, self._names)
        for rank in range(self.size):
            calls.pending[self._submit(rank, action, *args)] = rank
        return calls

    def _submit(self, rank: int, action: Callable[..., RankOutcome], *args: Any) -> Any:
        # A restarted actor must not repeat the call: it is no longer in the group.
        call = self._actors[rank].__ray_call__.options(max_task_retries=0)
        return call.remote(action, self._meeting, rank, *args)


class _ActorCalls(CallOnRanks):
    """The calls of one function on all actors.

    Attributes:
        pending: The ranks of the calls that have not ended, by Ray's reference.
        again: Makes the call of a rank again, whose actor Ray is about to restart; None: the rank
            is lost.
    """

    def __init__(self, meeting: Meeting, names: Sequence[str]) -> None:
        super().__init__(meeting, names)
        self.pending: dict[Any, int] = {}
        self.again: Callable[[int], Any] | None = None

    def poll(self, timeout_s: float) -> Iterator[RankOutcome]:
        """Wait for the first calls that end."""
        done, _ = ray.wait(list(self.pending), num_returns=1, timeout=timeout_s)
        for ref in done:
            rank = self.pending.pop(ref)
            try:
                yield ray.get(ref)
            except RayTaskError as error:
                yield member.failure(self.meeting, rank, error.cause or error, OUTSIDE)
            except RayError as error:
                # The call may have begun: then the ranks of this start have met the former process.
                restarts = isinstance(error, ActorUnavailableError)
                if restarts and self.again and rank not in posts(self.meeting, STARTED):
                    time.sleep(_AGAIN_S)
                    self.pending[self.again(rank)] = rank
                    continue
                yield RankOutcome(rank=rank, lost=str(error).partition("\n")[0])


def _join(
    actor: object, meeting: Meeting, rank: int, transfers: bool, ids: list[Any]
) -> RankOutcome:
    def action() -> None:
        member.join(meeting, rank)
        if transfers and Transfers.token != meeting.token:
            Transfers.group = new_group(timeout=group_timeout_s(None), group_desc="transfers")
            Transfers.actors, Transfers.token = {meeting.token: ids}, meeting.token

    return member.attempt(meeting, rank, action)


def _run(
    actor: object, meeting: Meeting, rank: int, fn: Callable[..., Any], *args: Any
) -> RankOutcome:
    return member.attempt(meeting, rank, lambda: member.call(meeting, rank, fn, actor, *args))


def _leave(actor: object, meeting: Meeting) -> None:
    member.leave(meeting)
