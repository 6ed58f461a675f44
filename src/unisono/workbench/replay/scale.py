"""Another number of ranks: replicas of the data-parallel job are added or taken away."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from unisono.errors import InvalidArgumentError
from unisono.workbench.replay.job import MESSAGE, Job, JobCall, JobGroup

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
                "replay: --ranks: nothing says which group has a rank of each data-parallel "
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
        InvalidArgumentError: It cannot be told how a group is to change.
    """
    seen: Counter[int] = Counter()
    copies = []
    for data in chosen:
        copies.append(seen[data])
        seen[data] += 1
    places = {(data, copy): at for at, (data, copy) in enumerate(zip(chosen, copies, strict=True))}
    count = len(chosen)
    groups, calls = list[JobGroup](), list[JobCall]()
    # The new groups of an old one, by copy; 0 only: it grows.
    new_groups: list[dict[int, int]] = []
    for group in job.groups:
        kept: dict[int, int] = {}
        held = sorted({replicas.data(rank) for rank in group.ranks})
        grows = len(held) == replicas.number or group.name in names
        # A single copy of a growing group has the ranks of all copies.
        for copy in [0] if grows else range(max(copies, default=0) + 1):
            ranks = [
                replicas.moved(rank, at, count)
                for rank in group.ranks
                for (of, by), at in places.items()
                if of == replicas.data(rank) and (grows or by == copy)
            ]
            if not grows and ranks and len(ranks) != len(group.ranks):
                raise _unclear(group, f"{count} replicas cut it")
            if ranks:
                kept[copy] = len(groups)
                groups.append(JobGroup(group.name, tuple(sorted(ranks) if grows else ranks)))
        if not grows and held != list(range(held[0], held[-1] + 1)):
            raise _unclear(group, "its replicas are not neighbours")
        new_groups.append(kept)
    new_calls: list[dict[int, int]] = []
    for call in job.calls:
        kept = {}
        old = job.groups[call.group]
        numbers = new_groups[call.group]
        for copy, number in sorted(numbers.items()) if call.op != MESSAGE else ():
            kept[copy] = len(calls)
            calls.append(_resized(call, number, old, groups[number], blocks=blocks))
        ends = [(replicas.data(rank), rank) for rank in call.members]
        for copy in sorted(set(copies)) if call.op == MESSAGE else ():
            if all((data, copy) in places for data, _ in ends):
                moved = [replicas.moved(r, places[data, copy], count) for data, r in ends]
                kept[copy] = len(calls)
                number = numbers.get(copy, numbers.get(0, 0))
                calls.append(replace(call, group=number, members=tuple(moved)))
        new_calls.append(kept)
    origins = _origins(job, chosen, replicas)
    steps = []
    for rank, origin in enumerate(origins):
        copy = copies[Replicas(count, replicas.stride).data(rank)]
        mine = []
        for step in job.steps[origin]:
            if step.call >= 0:
                like = new_calls[step.call]
                call = job.calls[step.call]
                by = copy if copy in like and rank in calls[like[copy]].members else 0
                if by not in like or rank not in calls[like[by]].members:
                    raise InvalidArgumentError(
                        f"replay: --ranks: {call.name} between ranks "
                        f"{call.members[0]} and {call.members[-1]} has no like in {count} replicas"
                    )
                step = step._replace(call=like[by])
            mine.append(step)
        steps.append(mine)
    starts = [job.start_ps[origin] for origin in origins]
    marks = job.marks if origins and origins[0] == 0 else []
    return Job(groups, calls, steps, starts, marks, job.notes), origins


def _origins(job: Job, chosen: Sequence[int], replicas: Replicas) -> list[int]:
    found = {}
    for rank in range(len(job.steps)):
        for at, data in enumerate(chosen):
            if replicas.data(rank) == data:
                found[replicas.moved(rank, at, len(chosen))] = rank
    return [found[rank] for rank in range(len(found))]


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
        f"replay: --ranks: it cannot be told how group '{group.name}' (ranks {ranks}) changes: "
        f"{why}",
        hint="name the groups that grow with --grow NAME,NAME",
    )
