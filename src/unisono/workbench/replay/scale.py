"""Another number of ranks: replicas of the data-parallel job are added or taken away."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from unisono.errors import InvalidArgumentError
from unisono.workbench.replay.job import MESSAGE, Job, JobCall, JobGroup, JobStep

# In names of groups over which gradients are reduced.
_DATA = re.compile(r"(^|[^a-z])(dp|ddp|fsdp|hsdp|data|replicate|batch)([^a-z]|$)", re.IGNORECASE)
# Their data is that of all ranks together, and each rank has a part (FSDP, ZeRO).
_SHARDED = ("all_gather", "reduce_scatter")


class Replicas(NamedTuple):
    """The data-parallel replicas of a job, each with one rank of each data group.

    Attributes:
        number: Ranks of each data group.
        stride: From one rank of a data group to the next.
    """

    number: int
    stride: int

    def data(self, rank: int) -> int:
        """Return the replica of a rank."""
        return rank // self.stride % self.number

    def moved(self, rank: int, data: int, count: int) -> int:
        """Return the number of a rank in replica `data`, if there are `count` replicas."""
        block = rank // (self.stride * self.number)
        return rank % self.stride + self.stride * (data + count * block)


def replicas_of(job: Job, names: Sequence[str]) -> Replicas:
    """Return the replicas of a job.

    They are the ranks of a data group: that of the first name, or the one whose name says so, or
    all ranks if there are no other groups.

    Raises:
        InvalidArgumentError: There is no such group, its ranks are not evenly spaced, or nothing
            says which group it is.
    """
    n, families = len(job.steps), defaultdict[tuple[int, int], list[JobGroup]](list)
    uneven = []
    for group in job.groups:
        if len(group.ranks) < 2:
            continue
        gaps = {b - a for a, b in zip(group.ranks, group.ranks[1:], strict=False)}
        if len(gaps) == 1 and min(gaps) > 0:
            families[len(group.ranks), min(gaps)].append(group)
        else:
            uneven.append(group)
    if names:
        chosen = [key for key, found in families.items() if any(g.name == names[0] for g in found)]
        if not chosen:
            raise InvalidArgumentError(
                f"replay: --grow {names[0]}: there is no group of that name with evenly spaced "
                f"ranks (groups: {_listed(job.groups)})"
            )
    else:
        named = {key for key, found in families.items() if any(_DATA.search(g.name) for g in found)}
        chosen = sorted(named) or ([(n, 1)] if set(families) <= {(n, 1)} and not uneven else [])
        if len(chosen) != 1:
            raise InvalidArgumentError(
                "replay: --ranks: it is not known which group has a rank of each data-parallel "
                f"replica (groups: {_listed(job.groups)})",
                hint="name it with --grow NAME",
            )
    found = Replicas(*chosen[0])
    if n % (found.number * found.stride):
        raise InvalidArgumentError(
            f"replay: data groups of {found.number} ranks, {found.stride} apart, do not fill the "
            f"{n} ranks of the job"
        )
    return found


def _listed(groups: Sequence[JobGroup]) -> str:
    texts = [f"'{g.name}' of ranks {', '.join(map(str, g.ranks[:4]))}" for g in groups[:8]]
    texts = [
        text + (", ..." if len(group.ranks) > 4 else "")
        for text, group in zip(texts, groups, strict=False)
    ]
    return "; ".join(texts) + ("; ..." if len(groups) > 8 else "")


def resized(
    job: Job, chosen: Sequence[int], replicas: Replicas, names: Sequence[str], *, blocks: bool
) -> tuple[Job, list[int]]:
    """Return a job of some replicas, and the rank of the old job that each rank repeats.

    A group with ranks of all replicas, or with a name of `names`, gets those of the new ones. A
    group inside a replica, or inside a block of neighbouring replicas, is there once per copy.

    Args:
        job: The job.
        chosen: The replicas; one that comes again is a copy.
        replicas: How the ranks form replicas.
        names: Names of groups that grow.
        blocks: Whether blocks of all_gather and reduce_scatter keep their size. Otherwise all
            blocks together do, as shards.

    Raises:
        InvalidArgumentError: It is not clear how a group changes.
    """
    resizer = _Resizer(job, chosen, replicas, names)
    for number in range(len(job.groups)):
        resizer.add_group(number)
    for call in job.calls:
        resizer.add_call(call, blocks=blocks)
    origins = resizer.origins()
    steps = [list(resizer.steps(rank, origin)) for rank, origin in enumerate(origins)]
    starts = [job.start_ps[origin] for origin in origins]
    marks = job.marks if origins[0] == 0 else []
    return Job(resizer.groups, resizer.calls, steps, starts, marks, job.notes), origins


class _Resizer:
    """The new groups and calls of old ones, by copy; those of a group that grows are copy 0."""

    def __init__(
        self, job: Job, chosen: Sequence[int], replicas: Replicas, names: Sequence[str]
    ) -> None:
        self._job, self._replicas, self._names = job, replicas, names
        seen: Counter[int] = Counter()
        # The new place of each replica and copy of it.
        self._places: dict[tuple[int, int], int] = {}
        for at, data in enumerate(chosen):
            self._places[data, seen[data]] = at
            seen[data] += 1
        self._copies = range(max(seen.values()))
        self.groups: list[JobGroup] = []
        self.calls: list[JobCall] = []
        self._groups_of: list[dict[int, int]] = []
        self._calls_of: list[dict[int, int]] = []
        # A set per tuple of ranks: calls have few different ones.
        self._sets: dict[tuple[int, ...], frozenset[int]] = {}

    def _moved(self, rank: int, at: int) -> int:
        return self._replicas.moved(rank, at, len(self._places))

    def _set(self, ranks: tuple[int, ...]) -> frozenset[int]:
        if ranks not in self._sets:
            self._sets[ranks] = frozenset(ranks)
        return self._sets[ranks]

    def add_group(self, number: int) -> None:
        group, data = self._job.groups[number], self._replicas.data
        held = sorted({data(rank) for rank in group.ranks})
        grows = len(held) == self._replicas.number or group.name in self._names
        if not grows and held != list(range(held[0], held[-1] + 1)):
            raise _unclear(group, "its replicas are not neighbours")
        kept: dict[int, int] = {}
        for copy in [0] if grows else self._copies:
            ranks = [
                self._moved(rank, at)
                for rank in group.ranks
                for (of, by), at in self._places.items()
                if of == data(rank) and (grows or by == copy)
            ]
            if not grows and ranks and len(ranks) != len(group.ranks):
                raise _unclear(group, f"{len(self._places)} replicas cut it")
            if ranks:
                kept[copy] = len(self.groups)
                self.groups.append(JobGroup(group.name, tuple(sorted(ranks) if grows else ranks)))
        self._groups_of.append(kept)

    def add_call(self, call: JobCall, *, blocks: bool) -> None:
        kept: dict[int, int] = {}
        groups, old = self._groups_of[call.group], self._job.groups[call.group]
        for copy in self._copies if call.op == MESSAGE else groups:
            number = groups.get(copy, groups.get(0, 0))
            if call.op == MESSAGE:
                ends = [(self._places.get((self._replicas.data(r), copy)), r) for r in call.members]
                moved = [self._moved(rank, at) for at, rank in ends if at is not None]
                new = replace(call, group=number, members=tuple(moved))
            else:
                new = _resized(call, number, old, self.groups[number], blocks=blocks)
            if call.op != MESSAGE or len(new.members) == 2:
                kept[copy] = len(self.calls)
                self.calls.append(new)
        self._calls_of.append(kept)

    def origins(self) -> list[int]:
        """Return the old rank of each new one."""
        found = {
            self._moved(rank, at): rank
            for rank in range(len(self._job.steps))
            for (data, _), at in self._places.items()
            if data == self._replicas.data(rank)
        }
        return [found[rank] for rank in range(len(found))]

    def steps(self, rank: int, origin: int) -> Iterator[JobStep]:
        """Yield the steps of a new rank, those of an old one with the new calls."""
        place = Replicas(len(self._places), self._replicas.stride).data(rank)
        copy = next(by for (_, by), at in self._places.items() if at == place)
        for step in self._job.steps[origin]:
            if step.call < 0:
                yield step
                continue
            kept = self._calls_of[step.call]
            new = [kept[by] for by in (copy, 0) if by in kept]
            mine = [each for each in new if rank in self._set(self.calls[each].members)]
            if not mine:
                call = self._job.calls[step.call]
                raise InvalidArgumentError(
                    f"replay: --ranks: {call.name} between ranks {call.members[0]} and "
                    f"{call.members[-1]} has no like in {len(self._places)} replicas"
                )
            yield step._replace(call=mine[0])


def _resized(call: JobCall, number: int, old: JobGroup, new: JobGroup, *, blocks: bool) -> JobCall:
    if len(old.ranks) == len(new.ranks):
        return replace(call, group=number, members=new.ranks, begins_ps={}, ends_ps={})
    nbytes = call.nbytes
    if call.op in ("gather", "scatter") or (call.op in _SHARDED and blocks):
        nbytes = nbytes // len(old.ranks) * len(new.ranks)
    return replace(
        call, group=number, members=new.ranks, nbytes=nbytes, algorithm="", begins_ps={},
        ends_ps={},
    )  # fmt: skip


def _unclear(group: JobGroup, why: str) -> InvalidArgumentError:
    ranks = ", ".join(map(str, group.ranks[:8]))
    return InvalidArgumentError(
        f"replay: --ranks: it is not clear how group '{group.name}' (ranks {ranks}) changes: {why}",
        hint="name the groups that grow with --grow NAME,NAME",
    )
