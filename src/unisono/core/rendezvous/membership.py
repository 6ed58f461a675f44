"""The members of a job whose ranks come and go: one document, and the rules by which it changes.

    FORMED  generation g has members; each of them computes, or has yet to read the document
       │    Come, Lost, Silent, Join
       ▼
    MEETING some members have come for generation g + 1
       │    every other member is lost or silent, or the deadline of a waiting rank has passed;
       ▼    and the members that came have the quorum
    FORMED  generation g + 1

A generation is formed by one change of the document, so there is one world of each generation. Each
world needs the quorum of the members of the world before. The two then share a rank, which has left
the world before. That world cannot complete a collective call any more.

Nothing here reads a clock or does I/O. Times are of each rank's own monotonic clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from unisono.core.rendezvous.agents.state import loads_of

SILENT_S = 1.0
"""How long a meeting waits for a rank that a time-out blames; its time-out has passed already.

A larger value delays the survivors of a stopped rank. A smaller value excludes a rank that is busy.
"""

BROKEN_S = 0.2
"""How long a meeting waits for a rank on another host whose link broke: it may be alive.

A larger value delays the survivors of a rank that ended. A smaller value excludes living ranks.
"""

AWAY_S = 30.0
"""How long a meeting waits for ranks on other hosts without which it has no quorum.

The links to them broke, but they may be alive. A larger value delays the error of a job whose other
hosts ended. A smaller value ends a job whose links broke while ranks were computing.
"""

VANISHED_S = 5.0
"""AWAY_S if there is no quorum without ranks on hosts that have acknowledged nothing for long.

A smaller value ends a job whose network failed, because its ranks detect that at different times.
"""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One process of the job.

    Attributes:
        id: Unique id, never used again.
        user: Name of the process for `process_identity.life_of`; "" until it comes to a meeting.
        current: Whether it holds the state of the job, see `sync_state`.
    """

    id: str
    user: str = ""
    current: bool = True


@dataclass(frozen=True, kw_only=True)
class WaitingMember:
    """A member that waits for the next generation.

    Attributes:
        member: The process.
        min_size: Least size of the world that it accepts.
        max_size: Size from which on no newcomer is admitted; 0: no limit.
    """

    member: Member
    min_size: int = 1
    max_size: int = 0

    @property
    def id(self) -> str:
        """The id of the member."""
        return self.member.id


@dataclass(frozen=True, kw_only=True)
class MembershipState:
    """The shared document.

    Attributes:
        world: Number of the world that founded the membership; 0 before the first meeting.
        generation: Number of the last generation that was formed; the founders are 1.
        members: Its members, by rank.
        agreed: Ids of the members that count for the quorum, by rank: the survivors, and the
            newcomers, too, when all members are connected.
        came: Members that have come to the meeting.
        waiting: Newcomers.
        lost: Members that ended or cannot be reached, and have not come.
        silent: Members that a time-out blames, and that have not come.
        max_size: Size from which on the members admit no newcomer; 0: no limit.
    """

    world: int = 0
    generation: int = 0
    members: tuple[Member, ...] = ()
    agreed: tuple[str, ...] = ()
    came: tuple[WaitingMember, ...] = ()
    waiting: tuple[WaitingMember, ...] = ()
    lost: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    max_size: int = 0

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the members, by rank."""
        return tuple(member.id for member in self.members)

    def has_quorum(self, ids: Collection[str]) -> bool:
        """Return whether these members may go on without the others.

        More than half of the agreed members may, and exactly half with the lowest rank.
        """
        there = [each for each in self.agreed if each in ids]
        twice = 2 * len(there)
        return twice > len(self.agreed) or (
            twice == len(self.agreed) and self.agreed[:1] == tuple(there[:1])
        )

    def is_possible(self) -> bool:
        """Return whether the members that are not lost have the quorum."""
        return self.has_quorum(set(self.agreed) - set(self.lost))

    def missing(self) -> tuple[int, ...]:
        """Return the ranks of the members that have not come."""
        came = _ids(self.came)
        return tuple(rank for rank, each in enumerate(self.ids) if each not in came)


@dataclass(frozen=True)
class Come:
    """Event: a member of a generation comes to the meeting for the next one.

    Attributes:
        world: Number of the world of its `init_process_group`.
        generation: The generation to which it belongs.
        founders: Number of ranks of generation 1, if the member is one of them.
    """

    arrival: WaitingMember
    world: int
    generation: int
    founders: int = 0


@dataclass(frozen=True)
class JoinRequest:
    """Event: a newcomer waits for the next generation."""

    arrival: WaitingMember


@dataclass(frozen=True)
class MembersLost:
    """Event: processes ended or cannot be reached."""

    ids: tuple[str, ...]
    generation: int


@dataclass(frozen=True)
class Silent:
    """Event: a time-out blames members."""

    ids: tuple[str, ...]
    generation: int


@dataclass(frozen=True)
class Expired:
    """Event: the deadline of a waiting rank has passed; it leaves unless a generation is formed."""

    id: str
    generation: int


@dataclass(frozen=True)
class Connected:
    """Event: all members of a generation are connected."""

    generation: int


MembershipEvent = Come | JoinRequest | MembersLost | Silent | Expired | Connected


def founder(world: int, rank: int) -> str:
    """Return the id of a rank of the first generation."""
    return f"{world}.{rank}"


def apply(state: MembershipState, event: MembershipEvent) -> MembershipState:
    """Return the state after an event; an event of another generation changes nothing."""
    match event:
        case Come():
            return _come(state, event)
        case JoinRequest(arrival):
            if arrival.id in (*state.ids, *_ids(state.waiting)):
                return state
            return _close(replace(state, waiting=(*state.waiting, arrival)))
        case Expired(member_id) if member_id in _ids(state.waiting):
            return _without(state, (member_id,))
    if event.generation != state.generation:
        return state
    match event:
        case MembersLost(ids):
            gone = set(state.lost) | (set(ids) & set(state.ids))
            return _close(replace(_without(state, ids), lost=_sorted(gone)))
        case Silent(ids):
            gone = (set(ids) & set(state.ids)) - _ids(state.came)
            return _close(replace(state, silent=_sorted(gone | set(state.silent))))
        case Expired(member_id):
            formed = _close(state, late=True)
            return _without(state, (member_id,)) if formed is state else formed
        case Connected():
            return replace(state, agreed=state.ids)


def _come(state: MembershipState, event: Come) -> MembershipState:
    if event.founders and event.world > state.world:
        ids = tuple(founder(event.world, rank) for rank in range(event.founders))
        members = tuple(Member(id=each) for each in ids)
        state = MembershipState(
            world=event.world, generation=1, members=members, agreed=ids, waiting=state.waiting
        )
    mine = (event.world, event.generation) == (state.world, state.generation)
    member_id = event.arrival.id
    if not mine or member_id not in state.ids or member_id in _ids(state.came):
        return state
    return _close(
        replace(
            state,
            came=(*state.came, event.arrival),
            lost=tuple(each for each in state.lost if each != member_id),
            silent=tuple(each for each in state.silent if each != member_id),
        )
    )


def _close(state: MembershipState, *, late: bool = False) -> MembershipState:
    """Form the next generation if it may be formed now; `late`: if a deadline has passed."""
    came = _ids(state.came)
    complete = set(state.ids) <= came | {*state.lost, *state.silent}
    if not came or not (complete or late) or not state.has_quorum(came):
        return state
    order = {each: rank for rank, each in enumerate(state.ids)}
    survivors = sorted(state.came, key=lambda arrival: order[arrival.id])
    most = min((each.max_size for each in state.came if each.max_size), default=0)
    room = max(0, most - len(survivors)) if most else None
    admitted = state.waiting[:room]
    if len(survivors) + len(admitted) < max(each.min_size for each in state.came):
        return state
    return MembershipState(
        world=state.world,
        generation=state.generation + 1,
        members=tuple(each.member for each in (*survivors, *admitted)),
        agreed=tuple(each.id for each in survivors),
        waiting=state.waiting[len(admitted) :],
        max_size=most,
    )


def _without(state: MembershipState, ids: Iterable[str]) -> MembershipState:
    came = tuple(each for each in state.came if each.id not in ids)
    waiting = tuple(each for each in state.waiting if each.id not in ids)
    return replace(state, came=came, waiting=waiting)


def _ids(arrivals: Iterable[WaitingMember]) -> set[str]:
    return {each.id for each in arrivals}


def _sorted(ids: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(ids))


@dataclass(frozen=True, kw_only=True)
class Attendance:
    """The knowledge of a rank that waits in a meeting, besides the document.

    Attributes:
        id: Its id.
        generation: The generation to which it belongs; 0 for a newcomer.
        began_s: When it came.
        timeout_s: How long it waits.
    """

    id: str
    generation: int
    began_s: float
    timeout_s: float


def next_event(
    mine: Attendance,
    state: MembershipState,
    now_s: float,
    *,
    ended: Collection[str] = (),
    unreachable: Collection[str] = (),
    vanished: Collection[str] = (),
    blamed: Collection[str] = (),
) -> MembershipEvent | None:
    """Return the event that a waiting rank has to report now, or None.

    Args:
        mine: The rank.
        state: The document.
        now_s: The time.
        ended: Ids of processes that have certainly ended.
        unreachable: Ids of members to which the rank has no link any more. A member that has come
            is alive nevertheless. The others may be alive, too. So the rank waits BROKEN_S, or
            SILENT_S if it has no link at all, or AWAY_S if the quorum needs them.
        vanished: Those of `unreachable` whose hosts acknowledge nothing. If the quorum needs them,
            the rank waits VANISHED_S.
        blamed: Ids of members that a time-out blames.
    """
    came, members = _ids(state.came), set(state.ids)
    lost = set(ended) & {*members, *came, *_ids(state.waiting)}
    away = (set(unreachable) & members) - came - lost
    linked = members - {mine.id, *ended, *unreachable}
    # If this rank has no link any more, its own host may be the cause.
    patience_s = BROKEN_S if linked else SILENT_S
    there = members - lost - set(state.lost)
    if not state.has_quorum(there - away):
        patience_s = AWAY_S if state.has_quorum(there - (away & set(vanished))) else VANISHED_S
    if now_s - mine.began_s >= patience_s:
        lost |= away
    if mine.generation and (new := lost - set(state.lost)):
        return MembersLost(_sorted(new), state.generation)
    if mine.generation and now_s - mine.began_s >= SILENT_S:
        known = {*came, *state.lost, *state.silent}
        if new := (set(blamed) & set(state.ids)) - known:
            return Silent(_sorted(new), state.generation)
    if now_s - mine.began_s >= mine.timeout_s:
        return Expired(mine.id, state.generation)
    return None


def loads(text: bytes) -> MembershipState:
    """Return the state that `dumps` wrote; an empty text is the state before the first event.

    Raises:
        RendezvousError: The text was not written by this version of unisono.
    """
    return loads_of(MembershipState, text, "membership", "the same store")
