"""The part of this process in a job whose ranks come and go.

`unisono.core.rendezvous.membership` has the rules of the document, `membership_store` its reads and
writes. Here are the facts about other processes, and the group that follows.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.core.backends import DeviceBackend, GroupSpec
from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.log import get_logger, log_once
from unisono.core.base.net.silence import HOST_FAILED
from unisono.core.base.process_identity import describe, host_of, is_dead, new_user
from unisono.core.groups.membership_store import YES, Document, WatchedStore, first_proposal
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.recorder import note_generation
from unisono.core.rendezvous.membership import (
    Attendance,
    Come,
    Connected,
    Expired,
    JoinRequest,
    Member,
    MembershipEvent,
    MembershipState,
    MembersLost,
    WaitingMember,
    founder,
    next_event,
)
from unisono.core.stores import Store
from unisono.errors import (
    Context,
    RendezvousError,
    StoreError,
    StoreTimeoutError,
    UnisonoError,
    UnsupportedError,
)

_log = get_logger("groups.membership")

# How long a step waits for the store's answer. With a longer time a store that does not answer
# delays a step. With a shorter time a newcomer is not seen while the store is busy.
_ANSWER_S = 1.0

# How long the members of a new generation wait for the address of one of them. Then that member
# counts as lost. With a shorter time a member on a busy machine would be excluded.
_CONNECT_S = 10.0


class _SupersededError(Exception):
    """A member of the new generation ended, or waits for the next one, before all connected."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """The conditions of a rank for the next generation.

    Attributes:
        deadline: Of the whole call.
        min_size: Least number of ranks.
        max_size: Number of ranks from which on no newcomer is admitted; 0: no limit.
        blamed: Ranks of the default group that a time-out blames.
    """

    deadline: Deadline
    min_size: int = 1
    max_size: int = 0
    blamed: tuple[int, ...] = ()


class Membership:
    """The part of this process in the job.

    Args:
        store: The store of the job.
        me: This process.
        world: Number of the world that founded the membership; 0 for a newcomer.
        options: `pg_options` of the groups.

    Attributes:
        document: The shared document.
        me: This process; `me.current` is whether it holds the state of the job.
        members: The members of the present generation, by rank.
        generation: Its number; 0 for a newcomer.
        max_size: The limit of newcomers that the members of this generation agreed on; 0: none.
        linked: The last generation whose members were connected.
        undecided: The key and the proposal of a commit to which the store gave no answer.
    """

    def __init__(self, store: Store, me: Member, world: int = 0, options: Any = None) -> None:
        self.document = Document(store)
        self._options = options
        self.me = me
        self.world = world
        self.generation = 0
        self.members: tuple[Member, ...] = ()
        self.max_size = 0
        self.linked = 0
        self.undecided: tuple[str, bytes] | None = None
        self._looked_s = 0.0
        self._blamed: tuple[str, ...] = ()

    @classmethod
    def of_founder(cls, store: Store, group: ProcessGroup, options: Any) -> Membership:
        """Return the membership of a rank of the first generation; sends nothing."""
        world = max(backend.world_number for backend in group.backends.values())
        members = tuple(Member(id=founder(world, rank)) for rank in range(group.size()))
        made = cls(store, replace(members[group.rank()], user=new_user()), world, options)
        made.members, made.generation, made.linked = members, 1, 1
        return made

    @classmethod
    def of_newcomer(cls, store: Store, options: Any) -> Membership:
        """Return the membership of a process that has no rank yet."""
        me = Member(id=uuid.uuid4().hex, user=new_user(), current=False)
        return cls(store, me, options=options)

    @property
    def sources(self) -> tuple[int, ...]:
        """The ranks that held the state of the job when the generation was formed."""
        return tuple(rank for rank, each in enumerate(self.members) if each.current)

    def hold_state(self) -> None:
        """Record that this process holds the state of the job."""
        self.me = replace(self.me, current=True)

    def settle(self, store: Store, timeout: Timeout) -> None:
        """Ask again whether an undecided step counts; this process lacks the step then."""
        if self.undecided is None:
            return
        if first_proposal(store, *self.undecided, timeout) == YES:
            self.me = replace(self.me, current=False)
        self.undecided = None

    def has_changed(self, group: ProcessGroup) -> bool:
        """Return whether a rank of the group is lost or a process waits to join.

        The answer about processes that wait may be 50 ms old.
        """
        if _unreachable(group) or _broken(group):
            return True
        if (now_s := time.monotonic()) < self._looked_s + 0.05:
            return False
        self._looked_s = now_s
        try:
            state = self.document.read(_ANSWER_S)
        except StoreError as error:
            # The job can go on without its store until a rank is lost. A store that does not answer
            # must not take its whole time-out in each step.
            self._looked_s = (end_s := time.monotonic()) + max(1.0, 10 * (end_s - now_s))
            log_once(_log, logging.WARNING, "no process can join any more: %s", error.what)
            return False
        full = self.max_size and group.size() >= self.max_size
        changed = not full and any(not is_dead(each.member.user) for each in state.waiting)
        others = state.came or state.generation > self.generation
        changed = changed or (state.world == self.world and bool(others))
        if changed:
            # A commit asks again soon after the program did, and must not get another answer.
            self._looked_s = 0.0
        return changed

    def next_group(
        self,
        wishes: Wishes,
        old: ProcessGroup | None,
        timeout_s: float,
        backend: str | None,
    ) -> ProcessGroup:
        """Meet until a generation is formed whose members are all connected; return its group.

        Args:
            wishes: The conditions of this rank.
            old: The group of the present generation; None for a newcomer.
            timeout_s: Default time-out of the new group's calls.
            backend: Of the new group.

        Raises:
            RendezvousError: Members did not come, there is no quorum, or the generation was formed
                without this rank.
        """
        while True:
            try:
                state = self._meet(wishes, old)
                self.world, self.generation = state.world, state.generation
                self.members, self._blamed = state.members, ()
                self.max_size = state.max_size
                group = self._connect(state, timeout_s, backend)
            except RendezvousError:
                raise
            except BaseException:
                self._withdraw()
                raise
            if group is not None:
                self.linked, self._looked_s = self.generation, 0.0
                note_generation(self.generation)
                return group

    def is_succeeded(self) -> bool:
        """Return whether the others formed a later generation, without this rank."""
        state = self.document.read(_ANSWER_S)
        return (state.world, state.generation) > (self.world, self.generation)

    def _meet(self, wishes: Wishes, old: ProcessGroup | None) -> MembershipState:
        """Wait until a generation with this process is formed."""
        mine = Attendance(
            id=self.me.id,
            generation=self.generation,
            began_s=time.monotonic(),
            timeout_s=wishes.deadline.remaining(),
        )
        arrival = WaitingMember(member=self.me, min_size=wishes.min_size, max_size=wishes.max_size)
        founders = len(self.members) if self.generation == 1 else 0
        if self.generation:
            self._drop_dead_newcomers(_patience(wishes))
            first: MembershipEvent = Come(arrival, self.world, self.generation, founders)
        else:
            first = JoinRequest(arrival)
        state = self.document.change(first, _patience(wishes))
        ids = [each.id for each in self.members]
        # The links of an older generation do not belong to these members.
        linked = old if self.linked == self.generation else None
        blamed = [*self._blamed] + [ids[rank] for rank in wishes.blamed if linked is not None]
        while True:
            moved = (state.world, state.generation) != (self.world, self.generation)
            if self.me.id in state.ids and moved:
                return state
            if self.generation and moved:
                raise self._succeeded_by(state)
            reasons = {ids[rank]: reason for rank, reason in _unreachable(linked).items()}
            event = next_event(
                mine,
                state,
                time.monotonic(),
                ended=[
                    *_ended(state, linked, ids),
                    *self._given_up(state, reasons, _patience(wishes)),
                ],
                unreachable=reasons,
                vanished=[each for each, reason in reasons.items() if HOST_FAILED in reason],
                blamed=blamed,
            )
            if event is None and self.generation and not state.is_possible():
                event = Expired(self.me.id, state.generation)
            if event is None:
                self.document.wait(self.world or state.world, state.generation + 1)
                state = self.document.read(_patience(wishes))
                continue
            missing = state
            state = self.document.change(event, _patience(wishes))
            if isinstance(event, Expired) and not self._takes_part(state):
                raise self._gave_up(missing, wishes)

    def _given_up(
        self, state: MembershipState, away: Collection[str], timeout_s: float
    ) -> list[str]:
        """Return those of `away` whose node the launcher gave up: they cannot come any more."""
        came = {each.id for each in state.came}
        if not (missing := [each for each in away if each not in came]):
            return []
        ranks, hosts = self.document.gone(timeout_s)
        gone = {founder(self.world, rank) for rank in ranks}
        gone |= {each for each, user in _users(state) if host_of(user) in hosts}
        return [each for each in missing if each in gone]

    def _drop_dead_newcomers(self, timeout_s: float) -> None:
        """Remove the newcomers that ended, so that no generation is formed with them."""
        state = self.document.read(timeout_s)
        dead = tuple(each.id for each in state.waiting if is_dead(each.member.user))
        if dead:
            self.document.change(MembersLost(dead, state.generation))

    def _withdraw(self) -> None:
        """Report that this process does not wait any more, and is in no new generation."""
        with contextlib.suppress(UnisonoError):
            state = self.document.read(_ANSWER_S)
            while True:
                number = state.generation
                state = self.document.change(MembersLost((self.me.id,), number), _ANSWER_S)
                if state.generation == number or self.me.id not in state.ids:
                    return

    def _takes_part(self, state: MembershipState) -> bool:
        """Whether this process waits in the meeting, or is a member of a new generation."""
        there = {each.id for each in (*state.came, *state.waiting)}
        moved = (state.world, state.generation) != (self.world, self.generation)
        return self.me.id in there or (moved and bool(self.generation or self.me.id in state.ids))

    def _connect(
        self, state: MembershipState, timeout_s: float, backend: str | None
    ) -> ProcessGroup | None:
        """Return the group of a generation, or None if one of its members is lost already."""

        def check() -> None:
            now = self.document.read(_CONNECT_S)
            moved = (now.world, now.generation) != (state.world, state.generation)
            if moved or now.came or now.lost:
                raise _SupersededError
            if any(is_dead(user) for each, user in _users(now) if each in state.ids):
                raise _SupersededError

        rank, size = state.ids.index(self.me.id), len(state.ids)
        store = WatchedStore(self.document.part(state), check)
        spec = GroupSpec(
            store=store,
            rank=rank,
            size=size,
            ranks=tuple(range(size)),
            name=f"default:generation-{state.generation}",
            key=f"generation/{state.world}.{state.generation}",
            timeout_s=_CONNECT_S,
            options=self._options,
        )
        try:
            group = ProcessGroup.from_spec(spec, backend)
        except _SupersededError:
            return None
        except (RendezvousError, StoreTimeoutError) as error:
            # Some members published no address, or stopped after that. The others come again.
            peers = error.context.peers or range(size)
            self._blamed = tuple(state.ids[peer] for peer in peers)
            return None
        store.check_members = None
        group.set_timeout(timeout_s)
        if rank == 0:
            self.document.change(Connected(state.generation), _CONNECT_S)
            # A store of the user may have no list of keys.
            with contextlib.suppress(StoreError, UnsupportedError):
                self.document.clear_before(state)
        return group

    # ---- errors ---------------------------------------------------------------------------

    def _succeeded_by(self, state: MembershipState) -> RendezvousError:
        rank = self._rank
        first = state.members[0] if state.members else None
        where = f" (rank 0 is {describe(first.user)})" if first and first.user else ""
        return RendezvousError(
            f"rank {rank} of generation {self.generation} came too late: generation "
            f"{state.generation} succeeded it with {_ranks(len(state.members))}{where}, and this "
            "process is none of them",
            context=Context(rank=rank, world_size=len(self.members)),
            hint="end this process; a new one joins with UNISONO_JOIN=1",
        )

    def _gave_up(self, state: MembershipState, wishes: Wishes) -> RendezvousError:
        waited = f"waited {wishes.deadline.timeout_s:g} s"
        if not self.generation:
            return RendezvousError(
                f"this process {waited} to join, but the ranks of the job have not called "
                "reconfigure()",
                hint="let all ranks call it when membership_changed() is true",
            )
        rank, missing = self._rank, state.missing()
        context = Context(rank=rank, world_size=len(self.members), peers=missing)
        quorum = "more than half of its agreed ranks, or half with the lowest one"
        if not state.is_possible():
            lost = tuple(r for r, each in enumerate(state.ids) if each in state.lost)
            return RendezvousError(
                f"rank {rank} cannot go on after generation {self.generation} of "
                f"{_ranks(len(self.members))}: {_named(lost)} lost, and that needs {quorum}",
                context=replace(context, peers=lost),
                hint="start the job again",
            )
        came = len(state.came)
        need = f"{_named(missing)} not come" if missing else f"only {_ranks(came)} came"
        return RendezvousError(
            f"rank {rank} {waited} for generation {self.generation + 1}: {need}, and it needs "
            f"{quorum}, and at least {_ranks(wishes.min_size)}",
            context=context,
        )

    @property
    def _rank(self) -> int:
        return [each.id for each in self.members].index(self.me.id)


def _users(state: MembershipState) -> list[tuple[str, str]]:
    """Return the id and the process of all members that are known."""
    members = {each.id: each.user for each in state.members}
    members |= {each.id: each.member.user for each in (*state.came, *state.waiting)}
    return [(each, user) for each, user in members.items() if user]


def _ended(state: MembershipState, group: ProcessGroup | None, ids: Sequence[str]) -> list[str]:
    """Return the ids of processes that have certainly ended; `ids` are those of the group."""
    came = {each.id for each in state.came}
    gone = {ids[rank] for rank, backend in _links(group) if backend.has_ended(rank)}
    return [*(gone - came)] + [each for each, user in _users(state) if is_dead(user)]


def _patience(wishes: Wishes) -> float:
    """Return how long a call may wait for an answer of the store."""
    return max(_ANSWER_S, wishes.deadline.remaining())


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _named(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks))
    return f"rank {listed} is" if len(ranks) == 1 else f"ranks {listed} are"


def _unreachable(group: ProcessGroup | None) -> dict[int, str]:
    """Return the ranks to which a backend has no link any more, and why."""
    return {
        rank: reason
        for rank, backend in _links(group)
        if (reason := backend.lost(rank)) is not None
    }


def _links(group: ProcessGroup | None) -> list[tuple[int, DeviceBackend]]:
    """Return each other rank with each backend."""
    if group is None:
        return []
    ranks = [rank for rank in range(group.size()) if rank != group.rank()]
    return [(rank, backend) for rank in ranks for backend in group.backends.values()]


def _broken(group: ProcessGroup) -> bool:
    return any(each.broken() is not None for each in group.backends.values())
