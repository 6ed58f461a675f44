"""Sizes of the blocks of one call: from rows to elements, and the checks that all sizes fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from unisono.core.backends.flat import FlatMemory
from unisono.core.base.buffers import Array
from unisono.core.engines import Call, Communicator
from unisono.errors import CollectiveMismatchError, InvalidArgumentError


class Splits(NamedTuple):
    """Elements to each rank and from each rank of an all_to_all."""

    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def even(self) -> bool:
        """Whether all parts are equal."""
        return len({*self.sent, *self.received}) <= 1


class Blocks(NamedTuple):
    """Elements of each rank's block; 0 for blocks whose size this rank does not know."""

    sizes: tuple[int, ...]
    even: bool

    @classmethod
    def listed(cls, sizes: tuple[int, ...]) -> Blocks:
        """Return the blocks of a list, which has all sizes."""
        return cls(sizes, len(set(sizes)) <= 1)

    @classmethod
    def own(cls, size: int, rank: int, world_size: int) -> Blocks:
        """Return the blocks of a rank that knows only its own size."""
        return cls(tuple([size if r == rank else 0 for r in range(world_size)]), True)


def split_sizes(
    shape: tuple[int, ...], rows: Sequence[int] | None, size: int, name: str
) -> tuple[int, ...]:
    """Return the number of elements to, or from, each of `size` ranks.

    Args:
        shape: Shape of the tensor; dimension 0 is split.
        rows: Rows for each rank; None or empty for equal parts.
        size: Number of ranks.
        name: Of the tensor, for errors.

    Raises:
        InvalidArgumentError: Wrong number of entries, a negative entry, a wrong sum, or a
            dimension that does not divide. (Gloo leaves uninitialised memory in the output then.)
    """
    first = shape[0] if shape else 1
    row = math.prod(shape[1:])
    if not rows:
        if first % size:
            raise InvalidArgumentError(
                f"{name}: dimension 0 has {first} rows, which {size} ranks cannot share equally",
                hint="pass split sizes",
            )
        return (first // size * row,) * size
    if len(rows) != size or any(n < 0 for n in rows):
        raise InvalidArgumentError(
            f"{name}: split sizes {list(rows)}; expected {size} numbers, none negative"
        )
    if sum(rows) != first:
        raise InvalidArgumentError(
            f"{name}: split sizes {list(rows)} add up to {sum(rows)}, but dimension 0 has "
            f"{first} rows"
        )
    return tuple([n * row for n in rows])


def require_blocks(sizes: tuple[int, ...], rank: int, count: int, name: str) -> Blocks | None:
    """Return the sizes of a list's blocks if they differ, None if all are `count`.

    Args:
        sizes: Elements of the arrays of the list, one for each rank.
        rank: This rank.
        count: Elements of its own array.
        name: Of the list, for errors.

    Raises:
        InvalidArgumentError: This rank's entry and its array differ in size.
    """
    if sizes[rank] != count:
        raise InvalidArgumentError(
            f"{name}[{rank}] has {sizes[rank]} elements, this rank's own array {count}"
        )
    blocks = Blocks.listed(sizes)
    return None if blocks.even else blocks


def require_total(
    world_size: int, whole: FlatMemory, part: int, whole_name: str, part_name: str
) -> None:
    """Check that `whole` has one part for each rank.

    Raises:
        InvalidArgumentError: It has more or fewer elements.
    """
    if whole.count != world_size * part:
        raise InvalidArgumentError(
            f"{whole_name} has {whole.count} elements, expected {world_size * part}: "
            f"{world_size} ranks x {part} of {part_name}"
        )


def require_stripes(
    world_size: int, whole: FlatMemory, part: FlatMemory, whole_name: str, part_name: str
) -> None:
    """Check that every array of `whole` has one part for each rank.

    Raises:
        InvalidArgumentError: An array has more or fewer elements.
    """
    if whole.sizes != tuple([n * world_size for n in part.sizes]):
        raise InvalidArgumentError(
            f"{whole_name} hold {list(whole.sizes)} elements and {part_name} "
            f"{list(part.sizes)}; expected {world_size} times as many in {whole_name}"
        )


def check_splits(comm: Communicator, call: Call, table: Array) -> None:
    """Check for an all_to_all that each rank sends what the receiver expects.

    Args:
        comm: The group.
        call: The call, for the error.
        table: [p, 2p]: for each rank, elements to each rank, then elements from each rank.

    Raises:
        CollectiveMismatchError: Names the first pairs that disagree; equal on every rank.
    """
    p = comm.size
    hint = "input_split_sizes[j] on rank i must equal output_split_sizes[i] on rank j"
    _require_same(comm, call, table[:, :p], table[:, p:].T, hint)


def check_blocks(comm: Communicator, call: Call, table: Array, root: int, collective: str) -> None:
    """Check for a gather or scatter that the root's list has every rank's size.

    Args:
        comm: The group.
        call: The call, for the error.
        table: [p, p]: the root's row holds the sizes of its list; place i of row i holds the size
            of rank i.
        root: The root's rank in the group.
        collective: "gather" or "scatter".

    Raises:
        CollectiveMismatchError: Names the first ranks whose sizes differ.
    """
    own, listed = np.diagonal(table), table[root]
    sent = _between(own if collective == "gather" else listed, root, collective)
    expected = _between(listed if collective == "gather" else own, root, collective)
    hint = f"the arrays of the root's {collective}_list must be as large as those of the ranks"
    _require_same(comm, call, sent, expected, hint)


def sent_splits(table: Array) -> Array:
    """Return [p, p], the elements from each rank to each rank, for the table of an all_to_all."""
    return table[:, : len(table)]


def sent_blocks(table: Array, root: int, collective: str) -> Array:
    """Return [p, p], the elements from each rank to each rank, for a gather or scatter."""
    return _between(np.diagonal(table), root, collective)


def _between(sizes: Array, root: int, collective: str) -> Array:
    """Return [p, p], the elements that move between the root and each rank."""
    moved = np.zeros((len(sizes), len(sizes)), np.int64)
    if collective == "gather":
        moved[:, root] = sizes
    else:
        moved[root] = sizes
    return moved


def _require_same(comm: Communicator, call: Call, sent: Array, expected: Array, hint: str) -> None:
    """Check two tables [sender, receiver] of elements."""
    wrong = np.argwhere(sent != expected).tolist()
    if wrong:
        pairs = [(a, f"{sent[a, b]} elements", b, str(expected[a, b])) for a, b in wrong]
        raise mismatch(comm, call, pairs, hint)


def mismatch(
    comm: Communicator, call: Call, pairs: Sequence[tuple[int, str, int, str]], hint: str
) -> CollectiveMismatchError:
    """Return the error of a call in which ranks send what the receivers do not expect.

    Args:
        comm: The group.
        call: The call.
        pairs: (sender, what it sends, receiver, what it expects); ranks in the group.
        hint: For the error.
    """
    texts = [
        f"rank {comm.ranks[a]} sends {sent} to rank {comm.ranks[b]}, which expects {expected}"
        for a, sent, b, expected in pairs[:3]
    ]
    more = f" (and {len(pairs) - 3} more pairs)" if len(pairs) > 3 else ""
    return CollectiveMismatchError(
        f"{call.op} #{call.seq} in group '{comm.name}' does not match on {comm.here}: "
        f"{'; '.join(texts)}{more}",
        context=comm.where(
            op=call.op,
            seq=call.seq,
            peers=tuple(sorted({comm.ranks[r] for a, _, b, _ in pairs for r in (a, b)})),
            usable=True,
        ),
        hint=hint,
    )
