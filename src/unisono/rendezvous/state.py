"""What the agents of a job share: the document that says which nodes form the current world.

The rules by which it changes are in `unisono.rendezvous.transitions`. Nothing here reads a clock
or does I/O.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from unisono.errors import RendezvousError

__all__ = [
    "Cause",
    "Event",
    "Failed",
    "Join",
    "LastCall",
    "Left",
    "Limits",
    "Lost",
    "Node",
    "Phase",
    "State",
    "Succeeded",
    "dumps",
    "loads",
    "rank_taken",
    "rival_of",
]


class Phase(StrEnum):
    """What the job as a whole is doing."""

    JOINING = "joining"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


class Cause(StrEnum):
    """Why the last world ended."""

    NONE = ""
    FAILURE = "failure"
    CONSEQUENCE = "consequence"
    MEMBERSHIP = "membership"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What all agents of a job must have been told alike."""

    min_nodes: int
    max_nodes: int
    max_restarts: int


@dataclass(frozen=True, kw_only=True)
class Node:
    """One agent.

    Attributes:
        id: Never used twice.
        host: Name shown to people.
        address: Where the other nodes reach it.
        nprocs: Number of its workers.
        role: Their role, as of `--role`.
        wish: Group rank that it must get (`--node-rank`), or None.
    """

    id: str
    host: str
    address: str
    nprocs: int
    role: str = "default"
    wish: int | None = None


@dataclass(frozen=True, kw_only=True)
class State:
    """The shared document.

    Attributes:
        limits: Of the first node; others must agree. None before.
        epoch: Number of the current or last world; the first is 1.
        phase: What the job is doing.
        members: RUNNING: the world, by group rank. JOINING: who has come so far.
        expected: JOINING: members of the last world that are still to come; their places
            are kept.
        waiting: Nodes for which there is no place now.
        succeeded: Members whose workers have all ended well.
        order: Members of the last world, by group rank.
        restarts: Worlds that were lost to a failing worker.
        cause: Why the last world ended.
        blamed: The node that reported it.
        reason: The same in words.
    """

    limits: Limits | None = None
    epoch: int = 0
    phase: Phase = Phase.JOINING
    members: tuple[Node, ...] = ()
    expected: tuple[str, ...] = ()
    waiting: tuple[Node, ...] = ()
    succeeded: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    restarts: int = 0
    cause: Cause = Cause.NONE
    blamed: str = ""
    reason: str = ""

    @property
    def over(self) -> bool:
        """Whether there will be no further world."""
        return self.phase in (Phase.FINISHED, Phase.FAILED)

    @property
    def present(self) -> tuple[str, ...]:
        """The ids of all nodes that take part in any way."""
        return (*(node.id for node in (*self.members, *self.waiting)), *self.expected)

    def is_member(self, node_id: str) -> bool:
        """Whether a node belongs to the current world, or to the one that is forming."""
        return any(node.id == node_id for node in self.members)


@dataclass(frozen=True)
class Join:
    """A node without running workers wants to be part of the next world."""

    node: Node
    limits: Limits


@dataclass(frozen=True)
class LastCall:
    """Nobody came for a while: form the world from the nodes that are there."""

    epoch: int


@dataclass(frozen=True)
class Failed:
    """Workers of a member failed; `original` if not only because a peer was lost."""

    node_id: str
    epoch: int
    original: bool
    reason: str


@dataclass(frozen=True)
class Succeeded:
    """All workers of a member ended with exit code 0."""

    node_id: str
    epoch: int


@dataclass(frozen=True)
class Left:
    """A node goes, by its own decision."""

    node_id: str
    reason: str


@dataclass(frozen=True)
class Lost:
    """A node shows no sign of life."""

    node_id: str
    reason: str


Event = Join | LastCall | Failed | Succeeded | Left | Lost


def rival_of(node: Node, state: State) -> Node | None:
    """Return the other node of the world that has the group rank which a node must get."""
    others = (n for n in state.members if n.id != node.id and n.wish == node.wish)
    return None if node.wish is None else next(others, None)


def rank_taken(node: Node, rival: Node) -> RendezvousError:
    """Return the error of a node whose rank belongs to another one."""
    return RendezvousError(
        f"--node-rank {node.wish} of host {node.host} is taken by host {rival.host}",
        hint="give each node a different --node-rank, 0 to nnodes - 1",
    )


def dumps(state: State) -> bytes:
    """Return the document's text for the store."""
    return json.dumps(asdict(state), separators=(",", ":"), sort_keys=True).encode()


def loads(text: bytes) -> State:
    """Return the state that `dumps` wrote; an empty text is the state before the first node.

    Raises:
        RendezvousError: The text is none of ours.
    """
    if not text:
        return State()
    try:
        fields: dict[str, Any] = json.loads(text)
        for name in ("members", "waiting"):
            fields[name] = tuple(Node(**node) for node in fields[name])
        for name in ("expected", "succeeded", "order"):
            fields[name] = tuple(fields[name])
        limits = fields["limits"]
        fields["limits"] = None if limits is None else Limits(**limits)
        fields["phase"] = Phase(fields["phase"])
        fields["cause"] = Cause(fields["cause"])
        return State(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RendezvousError(
            f"the rendezvous document is not one of this version of unisono: {error!r}",
            hint="another program uses the same store and --rdzv-id",
        ) from error
