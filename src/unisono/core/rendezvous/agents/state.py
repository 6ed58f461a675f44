"""The shared document of a job's agents, which lists the nodes of the current world.

`transitions.py` has the rules by which it changes. Nothing here reads a clock or
does I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from unisono.core.base import document
from unisono.errors import RendezvousError

T = TypeVar("T")


class Phase(StrEnum):
    """The phase of a job."""

    JOINING = "joining"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


class Cause(StrEnum):
    """The cause of the end of the last world."""

    NONE = ""
    FAILURE = "failure"
    CONSEQUENCE = "consequence"
    MEMBERSHIP = "membership"


@dataclass(frozen=True, kw_only=True)
class JobLimits:
    """Settings that must be equal on all agents of a job.

    Attributes:
        min_nodes: Least number of nodes of a world.
        max_nodes: Largest number of nodes of a world.
        max_restarts: Number of restarts that the job may have.
        replaces: Whether workers and nodes come and go while the others go on
            (`--restart worker`).
        durable: Whether the workers' store is in a service that outlives every node.
        min_nprocs: With `replaces`: number of workers of a node without which the job fails if no
            restart is left; 0: all of them.
    """

    min_nodes: int
    max_nodes: int
    max_restarts: int
    replaces: bool = False
    durable: bool = False
    min_nprocs: int = 0


@dataclass(frozen=True, kw_only=True)
class Node:
    """One agent.

    Attributes:
        id: Unique id, never used again.
        host: Name of the host for texts.
        address: Address under which the other nodes reach it.
        nprocs: Number of its workers.
        role: Role of its workers (`--role`).
        node_rank: Group rank that it must get (`--node-rank`), or None.
        serves: Whether its agent serves the store of the rendezvous.
        joined: Whether it joined a running world.
    """

    id: str
    host: str
    address: str
    nprocs: int
    role: str = "default"
    node_rank: int | None = None
    serves: bool = False
    joined: bool = False


@dataclass(frozen=True, kw_only=True)
class AgentsState:
    """The shared document.

    Attributes:
        limits: Limits of the first node, which all others must have; None before the first node.
        epoch: Number of the current or last world; the first is 1.
        phase: Phase of the job.
        members: RUNNING: nodes of the world, in the order of group ranks. JOINING: nodes that have
            joined.
        expected: JOINING: members of the last world that have not joined yet. Their places are
            kept.
        waiting: Nodes for which there is no place now.
        succeeded: Members whose workers have all ended with exit code 0.
        left: Members that have left, or were lost, after their workers had succeeded.
        order: Members of the last world, by group rank, with nodes that left while it ran.
        idle: Members no worker of which holds the state of the job: all wait for other ranks.
        restarts: Number of worlds that ended because a worker failed.
        replaced: Number of workers that were replaced while the others went on.
        cause: Cause of the end of the last world.
        blamed: The node that reported the cause.
        reason: The cause in words.
    """

    limits: JobLimits | None = None
    epoch: int = 0
    phase: Phase = Phase.JOINING
    members: tuple[Node, ...] = ()
    expected: tuple[str, ...] = ()
    waiting: tuple[Node, ...] = ()
    succeeded: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    order: tuple[Node, ...] = ()
    idle: tuple[str, ...] = ()
    restarts: int = 0
    replaced: int = 0
    cause: Cause = Cause.NONE
    blamed: str = ""
    reason: str = ""

    @property
    def over(self) -> bool:
        """Whether the job has ended, so that there is no further world."""
        return self.phase in (Phase.FINISHED, Phase.FAILED)

    @property
    def restart_left(self) -> bool:
        """Whether a failure may cause a further restart or replacement."""
        assert self.limits is not None
        return self.restarts + self.replaced < self.limits.max_restarts

    @property
    def enough(self) -> bool:
        """Whether enough nodes have joined for the next world."""
        if self.phase is not Phase.JOINING or self.limits is None:
            return False
        return len(self.members) >= self.limits.min_nodes

    @property
    def may_form(self) -> bool:
        """Whether the next world forms after the last call, even if nodes are still expected.

        The cause of the last end is known when each expected node has joined again or is lost, at
        the latest after `dead_after_s`.
        """
        return self.enough and not (self.cause is Cause.CONSEQUENCE and self.expected)

    @property
    def present(self) -> tuple[str, ...]:
        """The ids of all nodes that take part in any way."""
        nodes = (*(node.id for node in (*self.members, *self.waiting)), *self.expected)
        return tuple(node_id for node_id in nodes if node_id not in self.left)

    @property
    def gone(self) -> tuple[Node, ...]:
        """The nodes with which the running world began, and that are members no more."""
        founders = self.order if self.phase is Phase.RUNNING else ()
        return tuple(n for n in founders if not n.joined and not self.is_member(n.id))

    def is_member(self, node_id: str) -> bool:
        """Return whether a node belongs to the current world, or to the world that is forming."""
        return any(node.id == node_id for node in self.members)

    def holders(self, *, without: str = "") -> list[str]:
        """Return the members of a running world whose workers hold the state of the job."""
        others = {without, *self.idle, *self.succeeded}
        running = self.members if self.phase is Phase.RUNNING else ()
        return [node.id for node in running if node.id not in others]

    def rival_of(self, node: Node) -> Node | None:
        """Return the other node of the world whose fixed group rank is the same, or None."""
        others = (n for n in self.members if n.id != node.id and n.node_rank == node.node_rank)
        return None if node.node_rank is None else next(others, None)


@dataclass(frozen=True)
class Join:
    """Event: a node without running workers asks to be part of the next world."""

    node: Node
    limits: JobLimits


@dataclass(frozen=True)
class LastCallPassed:
    """Event: no node has joined for `last_call_s`, so the present nodes form the world."""

    epoch: int


@dataclass(frozen=True)
class MemberEvent:
    """An event of a member of a world."""

    node_id: str
    epoch: int


@dataclass(frozen=True)
class Failed(MemberEvent):
    """Event: workers of a member failed; not `original` if only because a peer was lost."""

    original: bool
    reason: str


class Replaced(MemberEvent):
    """Event: a member replaces a worker; void if no restart is left."""


@dataclass(frozen=True)
class Idle(MemberEvent):
    """Event: all workers of a member wait for other ranks, or (not `idle`) do so no longer."""

    idle: bool


class Unmet(MemberEvent):
    """Event: workers of a member wait for those of a node that left before all ranks met."""


@dataclass(frozen=True)
class Succeeded(MemberEvent):
    """Event: all workers of a member ended with exit code 0; `idle`: none ever held the state."""

    idle: bool = False


@dataclass(frozen=True)
class Departure:
    """A node takes part no longer."""

    node_id: str
    reason: str


class Left(Departure):
    """Event: a node left by its own decision."""


class NodeLost(Departure):
    """Event: a node was lost, because its heartbeat stopped or because of a fault."""


AgentEvent = Join | LastCallPassed | MemberEvent | Departure


def rank_taken(node: Node, rival: Node) -> RendezvousError:
    """Return the error of a node whose fixed group rank another node has."""
    return RendezvousError(
        f"--node-rank {node.node_rank} of host {node.host} is taken by host {rival.host}",
        hint="give each node a different --node-rank, 0 to nnodes - 1",
    )


def dumps(state: object) -> bytes:
    """Return the text of a document for the store: of `AgentsState` or `MembershipState`."""
    return document.dumps(state, separators=(",", ":"), sort_keys=True).encode()


def loads(text: bytes) -> AgentsState:
    """Return the state that `dumps` wrote; an empty text is the state before the first node.

    Raises:
        RendezvousError: The text was not written by this version of unisono.
    """
    return loads_of(AgentsState, text, "rendezvous", "the same store and --rdzv-id")


def loads_of(kind: type[T], text: bytes, what: str, place: str) -> T:
    """Return the shared document of some kind; `what` and `place` are for the error."""
    try:
        return document.loads(kind, text, exact=True) if text else kind()
    except ValueError as error:
        raise RendezvousError(
            f"the {what} document is not one of this version of unisono: {error!r}",
            hint=f"another program uses {place}",
        ) from error
