"""A rank in the process of an actor, worker or task: join a group, call a function, leave.

Such a process outlives its groups and is not the program's own. A failure therefore must not end
the process: the rank reports it to the other ranks and returns it as an `RankOutcome`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from unisono.adapters.clusters.meeting import JOINED, STARTED, Meeting, attend
from unisono.core.c10d.lifecycle import init_process_group
from unisono.core.groups.process_group import ProcessGroup, group_timeout_s
from unisono.core.groups.world import process_world
from unisono.core.stores import PrefixStore
from unisono.errors import Context, NotInitializedError, PeerLostError, UnisonoError, UsageError

_RANKS_LATER_S = 5.0
"""How much longer than the caller a rank waits for the others. The caller knows more about ranks
that have not started, so its error must be first."""

_lock = threading.RLock()


class _OwnGroup:
    """The group of this process, and the rank that uses it now."""

    token = ""
    busy: tuple[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """The result or the failure of one call on one rank.

    Attributes:
        rank: The rank.
        value: Result of the call.
        text: Traceback if the call raised an error.
        error: That error, pickled; empty if it cannot be pickled.
        place: Process and host of the rank.
        lost: Why the rank is lost, or "".
    """

    rank: int
    value: Any = None
    text: str = ""
    error: bytes = b""
    place: str = ""
    lost: str = ""

    @property
    def failed(self) -> bool:
        """Whether the call has no result."""
        return bool(self.text or self.lost)


def attempt(meeting: Meeting, rank: int, action: Callable[[], Any]) -> RankOutcome:
    """Return the outcome of an action of this rank, which has the process for itself."""
    try:
        with _alone(meeting, rank):
            return RankOutcome(rank=rank, value=action())
    except KeyboardInterrupt:
        # The framework cancels the call in this way.
        raise
    except BaseException as error:
        return failure(meeting, rank, error)


def failure(meeting: Meeting, rank: int, error: BaseException, place: str = "") -> RankOutcome:
    """Return the outcome of a call that raised an error, by default in this process."""
    pickled = b""
    with contextlib.suppress(Exception):
        pickled = import_module(meeting.pickler).dumps(error)
    text = "".join(traceback.format_exception(error))
    place = place or f"pid {os.getpid()}, host {platform.node()}"
    return RankOutcome(rank=rank, text=text, error=pickled, place=place)


@contextlib.contextmanager
def _alone(meeting: Meeting, rank: int) -> Iterator[None]:
    """Refuse a second rank in this process."""
    with _lock:
        if _OwnGroup.busy is not None:
            token, other = _OwnGroup.busy
            if token == meeting.token and other != rank:
                raise UsageError(
                    f"ranks {other} and {rank} are threads of one process, {os.getpid()}: each "
                    "rank needs a process of its own",
                    hint="start workers that are processes, and give each rank its own worker",
                )
            raise UsageError(
                f"rank {rank} cannot start: process {os.getpid()} still runs an earlier call as "
                f"rank {other}",
                hint="wait for the end of that call, or choose other workers",
            )
        _OwnGroup.busy = meeting.token, rank
    try:
        yield
    finally:
        _OwnGroup.busy = None


def join(meeting: Meeting, rank: int) -> None:
    """Make the default group together with the other ranks of a meeting.

    The process outlives its groups, so an earlier default group is closed first.

    Raises:
        StoreConnectionError: The meeting is closed, because another rank has failed.
        PeerLostError: The framework has started this rank again.
        RendezvousError: Other ranks did not come.
    """
    if _OwnGroup.token == meeting.token:
        return  # Ray has made the call although it reported the actor as unavailable
    _OwnGroup.token = ""
    if process_world.default is not None:
        process_world.close()
    store = attend(meeting)
    try:
        if store.add(f"{STARTED}/{rank}", 1) > 1:
            raise PeerLostError(
                f"rank {rank} starts a second time: the framework has lost a rank of this group",
                context=Context(world_size=meeting.size, peers=(rank,)),
                hint="catch the error of the call, and call it again for a new group",
            )
        store.set_timeout(meeting.timeout_s + _RANKS_LATER_S)
        init_process_group(
            meeting.backend,
            store=PrefixStore("group", store),
            rank=rank,
            world_size=meeting.size,
            timeout=meeting.timeout_s + _RANKS_LATER_S,
        )
        store.set(f"{JOINED}/{rank}", b"")
    except BaseException:
        store.close()
        raise
    process_world.on_close.append(store.close)
    assert process_world.default is not None
    process_world.default.set_timeout(group_timeout_s(None))
    _OwnGroup.token = meeting.token


def leave(meeting: Meeting) -> None:
    """Close the group of a meeting if this process is still in it."""
    if _OwnGroup.token == meeting.token:
        _OwnGroup.token = ""
        if process_world.default is not None:
            process_world.close()


def call(meeting: Meeting, rank: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function in the group; after an error report it to the other ranks, and leave.

    Without the report the other ranks would wait for this rank until their time-out, because its
    process lives on. The rank stays if all ranks raise the error and the group is usable.
    """
    if _OwnGroup.token != meeting.token:
        raise NotInitializedError(
            f"rank {rank} is no longer in this group: it raised an error in an earlier call, its "
            "process was started again, or the process joined another group",
            hint="call init_group again",
        )
    try:
        return fn(*args)
    except BaseException as error:
        if not _is_known_to_all(error):
            text = "".join(traceback.format_exception_only(error)).strip()
            for group in list(process_world.groups.values()):
                group.report_failure(text)
            leave(meeting)
        raise


def join_and_call(meeting: Meeting, rank: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a group that lives as long as the call."""
    join(meeting, rank)
    try:
        return call(meeting, rank, fn, *args)
    finally:
        leave(meeting)


def _is_known_to_all(error: BaseException) -> bool:
    """Whether each rank of the call raises this error too, or a hint at it, and goes on."""
    if isinstance(error, UsageError):
        return error.told
    return isinstance(error, UnisonoError) and bool(error.context.usable)


class Transfers:
    """Groups that transfers between actors may use.

    Attributes:
        actors: The actors of each group by its token, for a process that hands objects over; None:
            no transport is registered.
        token: The group of this rank.
        group: The group for its transfers.
    """

    actors: ClassVar[dict[str, list[Any]] | None] = None
    token: ClassVar[str] = ""
    group: ClassVar[ProcessGroup | None] = None
