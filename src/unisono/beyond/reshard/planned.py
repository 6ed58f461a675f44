"""What all ranks know of each array of a reshard: its dtypes, what moves, and how it is packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from unisono.beyond.boxes import IndexBox
from unisono.beyond.reshard.blocks import BlockedBox, borders_of
from unisono.beyond.reshard.parts import ArrayParts, Convert, Memory, converter
from unisono.beyond.reshard.plan import BoxTransfer, Gap, check, cover, first_overlap
from unisono.core.base.types import DType, dtype_named
from unisono.core.c10d.objects.call import ObjectCall
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.schedules.ir import IntArray
from unisono.errors import CollectiveError, CollectiveMismatchError

# Elements that one rank packs and unpacks at once; they stay in a cache.
_AT_ONCE = 1 << 16

PlannedCopy = tuple[Convert, Memory, Memory]


class PlannedArray(NamedTuple):
    """What all ranks know of one array.

    Attributes:
        name: Its key in the dict; "" of a single array.
        source: dtype of the sources.
        target: dtype of the targets.
        transfers: What moves.
        way: dtype in which it is sent if the caller has chosen one.
        borders: Of the blocks if that is int8.
    """

    name: str
    source: DType
    target: DType
    transfers: list[BoxTransfer]
    way: DType | None = None
    borders: IntArray | None = None

    def sent(self, relayed: bool) -> DType:
        """Return the dtype that is sent: the smaller one; that of the target if it is relayed."""
        is_smaller = self.source.itemsize <= self.target.itemsize
        return self.target if relayed else self.way or (self.source if is_smaller else self.target)

    def blocks(self, box: IndexBox, relayed: bool) -> BlockedBox | None:
        """Return the blocks of a box if they are sent."""
        if relayed or self.borders is None:
            return None
        return BlockedBox.of(box, self.borders)

    def nbytes(self, box: IndexBox, relayed: bool) -> int:
        """Return the size of a box as it is sent."""
        blocks = self.blocks(box, relayed)
        return blocks.nbytes if blocks else box.size * self.sent(relayed).itemsize

    def packed(self, box: IndexBox, relayed: bool, slot: Any, offset: int = 0) -> Memory:
        """Return the memory of a box in a slot."""
        if (blocks := self.blocks(box, relayed)) is not None:
            return np.ndarray(blocks.nbytes, np.uint8, slot, offset)
        return np.ndarray(box.shape, self.sent(relayed).storage, slot, offset)

    def pack(self, box: IndexBox, relayed: bool, parts: ArrayParts) -> tuple[Convert, Memory]:
        """Return a function (into, from) that packs a box, and the memory that it takes."""
        own = self.target if relayed else self.source
        if (blocks := self.blocks(box, relayed)) is not None:
            return partial(blocks.pack, own.name == "bfloat16"), parts.memory_of(blocks.wide)
        return _converter(own, self.sent(relayed)), parts.memory_of(box)

    def unpack(self, box: IndexBox, relayed: bool) -> Convert:
        """Return a function (into, from) that unpacks a box."""
        if (blocks := self.blocks(box, relayed)) is not None:
            return partial(blocks.unpack, _converter(dtype_named("float32"), self.target))
        return _converter(self.sent(relayed), self.target)

    def copies(self, box: IndexBox, source: ArrayParts, target: ArrayParts) -> list[PlannedCopy]:
        """Return the copies on one rank, with the values that other ranks get."""
        into, out = target.memory_of(box), source.memory_of(box)
        if is_same(into, out):
            return []
        if self.way is None:
            return [(_converter(self.source, self.target), into, out)]
        made: list[PlannedCopy] = []
        for part in box.cut(_AT_ONCE):
            convert, out = self.pack(part, False, source)
            through = partial(self._through, part, convert, self.unpack(part, False))
            made.append((through, target.memory_of(part), out))
        return made

    def _through(
        self, box: IndexBox, pack: Convert, unpack: Convert, into: Memory, out: Memory
    ) -> None:
        between = self.packed(box, False, np.empty(self.nbytes(box, False), np.uint8))
        pack(between, out)
        unpack(into, between)


def _converter(given: DType, wanted: DType) -> Convert:
    made = converter(given, wanted)
    assert made is not None  # the ranks have checked it
    return made


def is_same(into: Memory, out: Memory) -> bool:
    """Whether two views have the same elements, so that there is nothing to copy."""
    one, other = into.__array_interface__, out.__array_interface__
    return all(one[key] == other[key] for key in ("data", "shape", "strides", "typestr"))


def planned(
    call: ObjectCall, pg: ProcessGroup, rows: Sequence[Any], way: DType | None = None
) -> list[PlannedArray]:
    """Return the transfers of all arrays; raises the same error on every rank.

    Args:
        call: For errors.
        pg: The group.
        rows: For each rank its sources and targets by name, and its host. One more row may be that
            of a file.
        way: As `dtype` of `reshard`.
    """
    hosts, load = [row[2] for row in rows], [0] * len(rows)
    names = sorted({name for row in rows for name in row[1]})
    arrays = []
    for name in names:
        sides = [[row[side].get(name) for row in rows] for side in (0, 1)]
        sources, targets = ([each.boxes if each else [] for each in side] for side in sides)
        text = f"array {name!r}" if name else "the array"
        source, target = _dtypes(call, pg, text, sides)
        for rank, boxes in enumerate(targets):
            if (pair := first_overlap(boxes)) is not None:
                raise CollectiveError(
                    f"{call}: rank {pg.ranks[rank]} wants {pair[0]} and {pair[1]} of {text}, "
                    "which overlap",
                    context=call.context(rank),
                )
        if target is None:
            continue
        itemsize = min(target.itemsize, (source or target).itemsize)
        found = cover(sources, targets, hosts, load, itemsize)
        if isinstance(found, Gap) and found.rank == pg.size():
            raise CollectiveError(
                f"{call}: no rank has {found.box} of {text} for the file",
                context=call.context(pg.rank()),
            )
        if isinstance(found, Gap):
            raise CollectiveError(
                f"{call}: rank {pg.ranks[found.rank]} wants {found.box} of {text}, which no rank "
                "has",
                context=call.context(found.rank),
                hint="pass src on the ranks that have it",
            )
        check(sources, targets, found)
        made = PlannedArray(name, source or target, target, found)
        shape = next(each.shape for side in sides for each in side if each)
        if way is not None and shape and {made.source.kind, target.kind} == {"f"}:
            boxes = [box for each in sources for box in each]
            borders = borders_of(shape[-1], boxes) if way.name == "int8" else None
            made = made._replace(way=way, borders=borders)
        arrays.append(made)
    return arrays


def _dtypes(
    call: ObjectCall, pg: ProcessGroup, text: str, sides: Sequence[Sequence[ArrayParts | None]]
) -> list[DType | None]:
    """Return the dtypes of the sources and targets of an array; check them and the shapes."""
    found: list[DType | None] = [None, None]
    first: tuple[int, ArrayParts] | None = None
    owner = [0, 0]
    for side, parts in enumerate(sides):
        for rank, each in enumerate(parts):
            if each is None:
                continue
            first = first or (rank, each)
            known = found[side]
            if each.shape != first[1].shape:
                raise CollectiveMismatchError(
                    f"{call}: {text} has shape {list(first[1].shape)} on rank "
                    f"{pg.ranks[first[0]]}, but {list(each.shape)} on rank {pg.ranks[rank]}",
                    context=_blaming(call, pg, first[0], rank),
                )
            if known is not None and each.dtype is not None and each.dtype != known:
                raise CollectiveMismatchError(
                    f"{call}: {text} has dtype {known} on rank {pg.ranks[owner[side]]}, but "
                    f"{each.dtype} on rank {pg.ranks[rank]}",
                    context=_blaming(call, pg, owner[side], rank),
                )
            if known is None and each.dtype is not None:
                found[side], owner[side] = each.dtype, rank
    given, wanted = found
    if given is not None and wanted is not None and converter(given, wanted) is None:
        raise CollectiveMismatchError(
            f"{call}: {text} has dtype {given} on rank {pg.ranks[owner[0]]}, which does not become "
            f"{wanted} on rank {pg.ranks[owner[1]]}",
            context=_blaming(call, pg, *owner),
        )
    return found


def _blaming(call: ObjectCall, pg: ProcessGroup, *ranks: int) -> Any:
    return replace(call.context(ranks[0]), peers=tuple(pg.ranks[rank] for rank in ranks))
