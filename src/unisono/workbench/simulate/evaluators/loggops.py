"""LogGOPS in virtual time, event by event, exactly as LogGOPSim computes it.

A program is a graph of operations per rank: sends, receives and calculations. An operation begins
when the operations that it *requires* are done and all that it *irequires* have begun. There is
no contention in the network. The processor of a rank does one thing at a time:

    send      the processor is busy for o + (s-1)O, the interface for g + (s-1)G
    message   its head arrives o + L after the send began
    receive   the processor is busy for o + max((s-1)O, (s-1)G), the interface for g + (s-1)G;
              a message takes the processor when it arrives, posted or not
    above S   a send is done when the message is matched (rendezvous), otherwise when it begins

Events of equal time happen in the order in which they were created. LogGOPSim sorts the operations
of a rank that may begin at once. Above 16 operations their order there depends on the C++ library.
Here sends are first, and equal kinds keep the order in which they became free. All times are
integers of picoseconds.

Source: Hoefler, Schneider and Lumsdaine, "LogGOPSim: simulating large-scale applications in the
LogGOPS model", HPDC 2010; LogGOPSim 76451de, LogGOPSim.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from unisono.errors import InvalidArgumentError
from unisono.workbench.simulate.evaluators.agenda import Agenda
from unisono.workbench.simulate.evaluators.traffic import RECV, SEND, WORK, TrafficRows


@dataclass(frozen=True)
class LogGOPS:
    """The parameters of the model. The defaults are LogGOPSim's, which are in nanoseconds.

    Attributes:
        latency_ps: L, from the end of a send's overhead to the arrival of the first byte.
        overhead_ps: o, of the processor per message.
        gap_ps: g, of the interface per message.
        gap_per_byte_ps: G, of the interface per byte after the first.
        overhead_per_byte_ps: O, of the processor per byte after the first.
        eager_bytes: S, the largest message that is sent without a rendezvous.
    """

    latency_ps: int = 2_500_000
    overhead_ps: int = 1_500_000
    gap_ps: int = 1_000_000
    gap_per_byte_ps: int = 6_000
    overhead_per_byte_ps: int = 0
    eager_bytes: int = 65_535


@dataclass
class Program:
    """A graph of operations; an operation is an index into the lists.

    Attributes:
        ranks: Number of ranks.
        rank: The rank of each operation.
        kind: SEND, RECV or WORK.
        peer: The other rank of a message; -1 for WORK.
        size: Bytes of a message; picoseconds of WORK.
        tag: Messages match by (source, destination, tag), first in, first out.
        needs: Number of operations that an operation waits for.
        on_done: Per operation, the operations that require it.
        on_start: Per operation, the operations that irequire it.
    """

    ranks: int
    rank: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    peer: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    tag: list[int] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)
    on_done: list[tuple[int, ...]] = field(default_factory=list)
    on_start: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, rank: int, kind: int, size: int, peer: int = -1, tag: int = 0) -> int:
        """Add an operation that waits for none, and return its index."""
        columns = (self.rank, self.kind, self.peer, self.size, self.tag, self.needs)
        for column, value in zip(columns, (rank, kind, peer, size, tag, 0), strict=True):
            column.append(value)
        self.on_done.append(())
        self.on_start.append(())
        return len(self.rank) - 1

    def wait(self, later: int, earlier: int, *, started: bool = False) -> None:
        """Let operation `later` wait until `earlier` is done, or has begun if `started`."""
        edges = self.on_start if started else self.on_done
        edges[earlier] += (later,)
        self.needs[later] += 1


@dataclass(frozen=True)
class LogGOPSResult:
    """The end of a run.

    Attributes:
        finish_ps: Per rank, the time at which its processor becomes free for the last time.
        events: Number of events, as LogGOPSim counts them: operations and messages.
        messages: Number of messages.
    """

    finish_ps: list[int]
    events: int
    messages: int


def program_of(rows: TrafficRows, ranks: int, ps_per_byte: float = 0.0) -> Program:
    """Return the program in which each rank executes its rows in turn.

    A row after a send waits until the send has begun, any other row until the row is done. A
    message has 1 byte at least, because the model charges for the bytes after the first.

    Args:
        rows: The rows of all ranks, rank by rank.
        ranks: Number of ranks.
        ps_per_byte: Duration of local work.
    """
    # Ranks advance about stage by stage, so operations of one stage are near each other in memory.
    order = np.argsort(rows.stage, kind="stable")
    place = np.argsort(order)
    same = np.append(rows.rank[1:] == rows.rank[:-1], False)[: len(order)]
    after = np.where(same, np.append(place[1:], 0), -1)[order].tolist()
    needs = np.append(0, same[:-1])[order].tolist()
    rank, kind, peer, nbytes = (column[order].tolist() for column in rows[:4])
    size = [
        round(n * ps_per_byte) if k == WORK else max(1, n)
        for n, k in zip(nbytes, kind, strict=True)
    ]
    edges: list[tuple[int, ...]] = [(i,) if i >= 0 else () for i in after]
    on_done = [later if k != SEND else () for later, k in zip(edges, kind, strict=True)]
    on_start = [later if k == SEND else () for later, k in zip(edges, kind, strict=True)]
    return Program(ranks, rank, kind, peer, size, [0] * len(order), needs, on_done, on_start)


def _channels(program: Program) -> tuple[list[int], int]:
    """Return the number of each operation's triple (source, destination, tag), and their count."""
    rank, peer, tag = (np.array(column) for column in (program.rank, program.peer, program.tag))
    sends = np.array(program.kind) == SEND
    pair = np.where(sends, rank, peer) * program.ranks + np.where(sends, peer, rank)
    for column in (pair, tag):
        column[:] = np.unique(column, return_inverse=True)[1]
    found, channel = np.unique(pair * (tag.max(initial=0) + 1) + tag, return_inverse=True)
    return channel.tolist(), len(found)


class _GraphRun:
    """The state of a run: what is free when, and what waits."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.needs = list(program.needs)
        self.cpu = [0] * program.ranks
        self.nic_out = [0] * program.ranks
        self.nic_in = [0] * program.ranks
        # Events are numbers in the order of creation; `made` has their operations.
        self.agenda = Agenda()
        self.made: list[int] = []
        self.freed = [i for i, needed in enumerate(self.needs) if not needed]
        # Messages that no receive has claimed, and receives without a message, by channel.
        # Lists, because most channels have one message at a time: a deque takes 600 bytes.
        self.channel, number = _channels(program)
        self.arrived: list[list[int]] = [[] for _ in range(number)]
        self.posted: list[list[int]] = [[] for _ in range(number)]

    def release(self, waiting: tuple[int, ...]) -> None:
        """Count down the operations that waited; collect the operations that may begin."""
        needs = self.needs
        for i in waiting:
            needs[i] -= 1
            if not needs[i]:
                self.freed.append(i)

    def starter(self) -> Callable[[], None]:
        """Return the function that creates the events of the operations that may begin."""
        rank_of, kind_of, freed = self.program.rank, self.program.kind, self.freed
        cpu, nic_out, made, put = self.cpu, self.nic_out, self.made, self.agenda.put

        def start() -> None:
            if len(freed) > 1:
                # Sends are the first of a rank.
                freed.sort(key=lambda i: (rank_of[i], kind_of[i]))
            for i in freed:
                rank = rank_of[i]
                time = cpu[rank]
                if kind_of[i] == SEND and nic_out[rank] > time:
                    time = nic_out[rank]
                put(time, len(made))
                made.append(i)
            freed.clear()

        return start

    def post(self, receive: int, time: int, *, large: bool) -> bool:
        """Match a receive with the first message; return whether there is one yet."""
        if waiting := self.program.on_start[receive]:
            self.release(waiting)
        channel = self.channel[receive]
        if not self.arrived[channel]:
            self.posted[channel].append(receive)
            return False
        message = self.arrived[channel].pop(0)
        if large:
            self.rendezvous(message, time)
        self.release(self.program.on_done[receive])
        return True

    def rendezvous(self, send: int, time: int) -> None:
        """End a send above the eager size: its rank goes on when the message is matched."""
        rank = self.program.rank[send]
        self.cpu[rank] = max(self.cpu[rank], time)
        self.nic_out[rank] = max(self.nic_out[rank], time)
        self.release(self.program.on_done[send])


def run(program: Program, model: LogGOPS) -> LogGOPSResult:
    """Execute a program.

    Raises:
        InvalidArgumentError: Some operations never end, because a message has no receiver, a
            receive has no message, or operations wait for each other.

    Cost: O(n log n) for n operations.
    """
    state = _GraphRun(program)
    rank_of, peer_of, kind_of, size_of = program.rank, program.peer, program.kind, program.size
    on_done, on_start, channel = program.on_done, program.on_start, state.channel
    cpu, nic_out, nic_in = state.cpu, state.nic_out, state.nic_in
    overhead, gap, eager = model.overhead_ps, model.gap_ps, model.eager_bytes
    per_byte, cpu_per_byte = model.gap_per_byte_ps, model.overhead_per_byte_ps
    travel, n, made = overhead + model.latency_ps, len(rank_of), state.made
    release, arrived, posted, put = state.release, state.arrived, state.posted, state.agenda.put
    cpu_in = max(per_byte, cpu_per_byte)
    freed, start, ended = state.freed, state.starter(), 0
    start()
    for time, order in state.agenda.in_order():
        i = made[order]
        if i >= n:  # the message of send i - n arrives
            i -= n
            rank, rest = peer_of[i], size_of[i] - 1
            if cpu[rank] > time or nic_in[rank] > time:
                put(max(cpu[rank], nic_in[rank]), order)
                continue
            cpu[rank] = time + overhead + rest * cpu_in
            nic_in[rank] = time + gap + rest * per_byte
            waiting = posted[channel[i]]
            if not waiting:
                arrived[channel[i]].append(i)
                continue
            if rest >= eager:
                state.rendezvous(i, time)
            if later := on_done[waiting.pop(0)]:
                release(later)
            ended += 1
        elif kind_of[i] == SEND:
            rank, rest = rank_of[i], size_of[i] - 1
            if cpu[rank] > time or nic_out[rank] > time:
                put(max(cpu[rank], nic_out[rank]), order)
                continue
            cpu[rank] = time + overhead + rest * cpu_per_byte
            nic_out[rank] = time + gap + rest * per_byte
            put(time + travel, len(made))
            made.append(i + n)
            if on_start[i]:
                release(on_start[i])
            if rest < eager and on_done[i]:
                release(on_done[i])
            ended += 1
        elif kind_of[i] == RECV:
            ended += state.post(i, time, large=size_of[i] > eager)
        elif cpu[rank_of[i]] > time:
            put(cpu[rank_of[i]], order)
            continue
        else:
            cpu[rank_of[i]] = time + size_of[i]
            release(on_start[i])
            release(on_done[i])
            ended += 1
        if freed:
            start()
    if ended < n or any(state.arrived):
        raise InvalidArgumentError(_stuck(state, n - ended))
    return LogGOPSResult(list(cpu), len(made), kind_of.count(SEND))


def _stuck(state: _GraphRun, missing: int) -> str:
    graph = state.program
    lost = [i for queue in state.arrived for i in queue]
    if lost:
        source, target = graph.rank[lost[0]], graph.peer[lost[0]]
        return (
            f"simulate: {len(lost)} messages are never received, the first from rank {source} to "
            f"rank {target}"
        )
    waits = [i for queue in state.posted for i in queue]
    if waits:
        target, source = graph.rank[waits[0]], graph.peer[waits[0]]
        return (
            f"simulate: {missing} operations never end; rank {target} waits for a message from "
            f"rank {source}"
        )
    return f"simulate: {missing} operations never end, because they wait for each other"
