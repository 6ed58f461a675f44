"""What each rank of a job does, for the engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from unisono.core.base.text import name_ranks
from unisono.errors import InvalidArgumentError

MESSAGE = "message"
"""The operation of a send with its receive."""

BLOCKS = ("all_gather", "gather", "reduce_scatter", "scatter", "all_to_all")
OPERATIONS = (*BLOCKS, "all_reduce", "broadcast", "reduce", "barrier", "scan", "exscan")
"""The operations that have schedules, first those with a block per rank."""


class JobGroup(NamedTuple):
    """A group: its name, and its ranks in group order."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class JobCall:
    """A call of a group, or a message.

    Attributes:
        name: As "all_reduce #8".
        op: An operation with schedules, another one, or `MESSAGE`, from members[0] to members[1].
        group: Number of the group.
        members: The ranks that make it.
        nbytes: Of the whole data: the vector, or all p blocks.
        itemsize: Bytes per element.
        algorithm: The recorded one; "" if it is not known, or not to be taken.
        begins_ps: When each member made it in the recording, by rank; empty: not recorded.
        ends_ps: When it ended there.
    """

    name: str
    op: str
    group: int
    members: tuple[int, ...]
    nbytes: int
    itemsize: int = 1
    algorithm: str = ""
    begins_ps: dict[int, int] = field(default_factory=dict)
    ends_ps: dict[int, int] = field(default_factory=dict)


class JobStep(NamedTuple):
    """A rank computes for `gap_ps`, then makes a call, waits for its end, or both.

    Attributes:
        gap_ps: Time of the rank before, without calls.
        call: Number of the call; -1: the rank ends.
        makes: Whether the rank makes the call.
        waits: Whether the rank waits for its end.
    """

    gap_ps: int
    call: int = -1
    makes: bool = False
    waits: bool = False


@dataclass(frozen=True)
class Job:
    """A job of ranks 0 to n-1.

    Attributes:
        groups: All groups.
        calls: All calls and messages; those of a group are in its order.
        steps: Of each rank, in the order of its thread.
        start_ps: When each rank begins.
        marks: Numbers of the steps of rank 0 that make the last call of a training step; empty:
            none is known.
        notes: What the reader of the result must know.
    """

    groups: list[JobGroup]
    calls: list[JobCall]
    steps: list[list[JobStep]]
    start_ps: list[int]
    marks: list[int]
    notes: list[str]


def check_ranks(ranks: Collection[int], named: Iterable[int] = ()) -> None:
    """Check that there are files of ranks 0 to n-1, and of all ranks that a file names.

    Raises:
        InvalidArgumentError: A rank has no file.
    """
    if missing := sorted({*named, *range(len(ranks))} - set(ranks)):
        raise InvalidArgumentError(
            f"replay: no file of {name_ranks(missing)}, or ranks are not numbered from 0",
            hint="give the files of all ranks",
        )


def find_marks(keys: Sequence[object]) -> list[int]:
    """Return the places at which training steps end.

    A step is the shortest part that, repeated at the end of the sequence, is more than half of it.
    """
    n = len(keys)
    for length in range(1, n // 2 + 1):
        first = n - length
        while first > 0 and keys[first - 1] == keys[first - 1 + length]:
            first -= 1
        if (n - first) * 2 > n and (repeats := (n - first) // length) > 1:
            return [n - 1 - k * length for k in range(repeats)][::-1]
    return []
