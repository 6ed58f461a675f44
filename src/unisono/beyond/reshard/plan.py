"""The plan of a reshard: which rank sends which box to which rank, in which order; no I/O.

    cover     layouts -> transfers; replicas share the sending
    check     proves that transfers write each element of the targets once, from the right box
    packets   transfers -> packets of bounded size, in one order for all ranks
    schedule  transfers -> a schedule, to draw, count and simulate

A layout is a list of boxes for each rank. A rank handles its packets in the order of all packets,
so none waits for a later one: no order of arrival deadlocks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono.beyond.boxes import IndexBox
from unisono.core.schedules.ir import Buf, IntArray, Schedule, recv, send
from unisono.errors import ScheduleError

BoxLists = Sequence[Sequence[IndexBox]]

# Replicas share what is larger; smaller shares cost more messages than they save.
_SHARE_BYTES = 1 << 18
# A cache line, so that every element in a packet is aligned.
_ALIGNED = 64


class BoxTransfer(NamedTuple):
    """One box that moves.

    Attributes:
        source: The rank in the group that has it.
        target: The rank that gets it; the same for a copy.
        box: Its indices.
        relayed: The source has it from another host, and sends what its target array has got.
    """

    source: int
    target: int
    box: IndexBox
    relayed: bool = False


class Gap(NamedTuple):
    """A box of a target that no source has."""

    rank: int
    box: IndexBox


class _OwnedBoxes(NamedTuple):
    """A box that some ranks have.

    Attributes:
        begins: [n, dims] of all such boxes.
        ends: Likewise.
        boxes: The same.
        owners: The ranks that have each.
    """

    begins: IntArray
    ends: IntArray
    boxes: list[IndexBox]
    owners: list[list[int]]

    @classmethod
    def of(cls, layout: BoxLists, ndim: int) -> _OwnedBoxes:
        owners: dict[IndexBox, list[int]] = defaultdict(list)
        for rank, boxes in enumerate(layout):
            for box in boxes:
                if box.size:
                    owners[box].append(rank)
        table = np.array([(b.begins, b.ends) for b in owners], np.int64).reshape(
            len(owners), 2, ndim
        )
        return cls(table[:, 0], table[:, 1], list(owners), list(owners.values()))

    def hits(self, box: IndexBox) -> list[int]:
        """Return the numbers of the boxes that have an element of `box`."""
        begins, ends = np.maximum(self.begins, box.begins), np.minimum(self.ends, box.ends)
        return np.flatnonzero((begins < ends).all(axis=1)).tolist()


def cover(
    sources: BoxLists,
    targets: BoxLists,
    hosts: Sequence[Any],
    load: list[int],
    itemsize: int = 1,
    share_bytes: int = _SHARE_BYTES,
) -> list[BoxTransfer] | Gap:
    """Return the transfers of one array.

    A rank takes what it has itself, then what a rank of its host has or gets from another host. The
    rest comes from any rank. So each byte comes to a host once.

    Args:
        sources: The boxes that each rank has; several ranks may have the same elements.
        targets: The boxes that each rank wants.
        hosts: The host of each rank.
        load: Bytes that each rank sends already; grows by those of this array.
        itemsize: Bytes of an element.
        share_bytes: Least size of the shares of replicas.
    """
    ndim = next((len(box.begins) for boxes in (*sources, *targets) for box in boxes), 0)
    found = _OwnedBoxes.of(sources, ndim)
    arrived: dict[Any, list[tuple[IndexBox, int]]] = defaultdict(list)
    transfers: list[BoxTransfer] = []

    def take(part: IndexBox, owners: Sequence[int], target: int, relayed: bool) -> None:
        shares = min(len(owners), max(1, part.size * itemsize // share_bytes))
        for share in part.cut(-(-part.size // shares)):
            source = min(owners, key=lambda rank: (load[rank], (rank - target) % len(load)))
            load[source] += share.size * itemsize
            transfers.append(BoxTransfer(source, target, share, relayed))

    for target, boxes in enumerate(targets):
        host, came = hosts[target], []
        for box in boxes:
            rest = [box] if box.size else []
            for owned, owners, relayed in _candidates(found, box, target, hosts, arrived[host]):
                left = []
                for piece in rest:
                    part = piece.common(owned)
                    if part is None:
                        left.append(piece)
                        continue
                    left += piece.without(part)
                    if owners == [target]:
                        transfers.append(BoxTransfer(target, target, part))
                    else:
                        take(part, owners, target, relayed)
                    if not relayed and all(hosts[owner] != host for owner in owners):
                        came.append((part, target))
                if not (rest := left):
                    break
            if rest:
                return Gap(target, rest[0])
        # Only now, because a rank need not send to itself.
        arrived[host] += came
    return transfers


def _candidates(
    found: _OwnedBoxes,
    box: IndexBox,
    target: int,
    hosts: Sequence[Any],
    arrived: Sequence[tuple[IndexBox, int]],
) -> Iterable[tuple[IndexBox, Sequence[int], bool]]:
    """Yield boxes with the ranks that have them, the nearest first, and whether they get them."""
    hits = found.hits(box)
    own = [at for at in hits if target in found.owners[at]]
    yield from ((found.boxes[at], [target], False) for at in own)
    for at in hits:
        near = [rank for rank in found.owners[at] if hosts[rank] == hosts[target]]
        if near:
            yield found.boxes[at], near, False
    yield from ((each, [rank], True) for each, rank in arrived)
    yield from ((found.boxes[at], found.owners[at], False) for at in hits)


def first_overlap(boxes: Sequence[IndexBox]) -> tuple[IndexBox, IndexBox] | None:
    """Return two boxes of a list that have an element in common."""
    if len(boxes) < 2:
        return None
    found = _OwnedBoxes.of([[box] for box in dict.fromkeys(boxes)], len(boxes[0].begins))
    for at, box in enumerate(found.boxes):
        other = next((hit for hit in found.hits(box) if hit > at), None)
        if other is not None:
            return box, found.boxes[other]
    twice = [box for box in found.boxes if list(boxes).count(box) > 1]
    return (twice[0], twice[0]) if twice else None


def check(sources: BoxLists, targets: BoxLists, transfers: Sequence[BoxTransfer]) -> None:
    """Prove that each element of each target is written once, by a rank that has it.

    What a rank relays must have come to it from a rank that has it in its source.

    Raises:
        ScheduleError: The transfers are wrong. The text names the ranks and the box.
    """
    into: dict[int, list[BoxTransfer]] = defaultdict(list)
    for each in transfers:
        into[each.target].append(each)
    for each in transfers:
        if each.relayed:
            came = [t.box.common(each.box) for t in into[each.source] if not t.relayed]
            is_known = sum(part.size for part in came if part) == each.box.size
        else:
            is_known = each.box in [each.box.common(box) for box in sources[each.source]]
        if not is_known:
            raise ScheduleError(
                f"reshard: rank {each.source} sends {each.box} to rank {each.target}, but does "
                "not have it"
            )
    for rank, boxes in enumerate(targets):
        got = [each.box for each in into[rank]]
        if (pair := first_overlap(got)) is not None:
            raise ScheduleError(f"reshard: rank {rank} gets {pair[0]} and {pair[1]}, which overlap")
        parts = [part for box in boxes for each in got if (part := each.common(box))]
        wanted, written, sent = (sum(box.size for box in each) for each in (boxes, parts, got))
        if not wanted == written == sent:
            raise ScheduleError(f"reshard: rank {rank} gets {sent} of {wanted} elements")


class PacketPiece(NamedTuple):
    """A box in a packet.

    Attributes:
        array: Number of the array.
        box: Its indices.
        offset: Where its bytes begin in the packet.
    """

    array: int
    box: IndexBox
    offset: int


class BoxPacket(NamedTuple):
    """What one rank sends to another at once.

    Attributes:
        source: The rank in the group that sends it.
        target: The rank that gets it.
        relayed: As of a `BoxTransfer`.
        pieces: Its boxes.
        nbytes: Its size.
    """

    source: int
    target: int
    relayed: bool
    pieces: list[PacketPiece]
    nbytes: int


def packet_bytes(transfers: Iterable[tuple[BoxTransfer, int]], least: int, most: int) -> int:
    """Return the size of packets with which the slots of each rank are small beside its arrays.

    Args:
        transfers: Of all arrays, each with its size in bytes.
        least: The smallest result.
        most: The largest result.
    """
    into: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for each, nbytes in transfers:
        if each.source != each.target:
            into[each.target].append((each.source, nbytes))
    sizes = [
        sum(nbytes for _, nbytes in each) // (48 * len({source for source, _ in each}))
        for each in into.values()
    ]
    wanted = max(least, min([most, *sizes]))
    return -(-wanted // _ALIGNED) * _ALIGNED


def packets(
    transfers: Iterable[tuple[int, BoxTransfer]],
    nbytes_of: Callable[[int, IndexBox, bool], int],
    most: int,
) -> list[BoxPacket]:
    """Return the packets of all transfers but copies, in the order of all ranks.

    Args:
        transfers: Each with the number of its array.
        nbytes_of: Returns the bytes of a box of an array, as it is sent or as it is relayed.
        most: Bytes of a packet.
    """
    pairs: dict[tuple[bool, int, int], list[BoxPacket]] = defaultdict(list)
    for array, each in transfers:
        if each.source == each.target:
            continue
        row = pairs[each.relayed, each.source, each.target]
        count = most * each.box.size // nbytes_of(array, each.box, each.relayed)
        # Blocks that are cut need a little more.
        while True:
            cut = [(box, nbytes_of(array, box, each.relayed)) for box in each.box.cut(count)]
            if max(nbytes for _, nbytes in cut) <= most:
                break
            count -= -(-count // 16)
        for box, nbytes in cut:
            begin = -(-row[-1].nbytes // _ALIGNED) * _ALIGNED if row else most
            if begin + nbytes > most:
                row.append(BoxPacket(each.source, each.target, each.relayed, [], 0))
                begin = 0
            row[-1].pieces.append(PacketPiece(array, box, begin))
            row[-1] = row[-1]._replace(nbytes=begin + nbytes)
    ranks = 1 + max((max(pair[1:]) for pair in pairs), default=0)
    # The n-th packet of each pair after the packets before; first what no rank must relay.
    keys = [
        (relayed, number, (target - source) % ranks, source, target)
        for (relayed, source, target), row in pairs.items()
        for number in range(len(row))
    ]
    return [pairs[relayed, a, b][number] for relayed, number, _, a, b in sorted(keys)]


def schedule(sends: Sequence[tuple[int, int, int]], ranks: int) -> tuple[Schedule, int]:
    """Return a schedule of messages (source, target, bytes); each begins a round when it can.

    A chunk is the greatest common divisor of the sizes, so the rows are exact.

    Returns:
        The schedule, and the bytes of its INPUT and OUTPUT: of ranks blocks, of which no rank uses
        more than it sends or gets.
    """
    unit = math.gcd(*(nbytes for _, _, nbytes in sends)) or 1
    at = np.zeros((2, ranks), np.int64)
    free = [0] * ranks
    rounds: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for source, target, nbytes in sends:
        k, n = max(free[source], free[target]), nbytes // unit
        free[source] = free[target] = k + 1
        rounds[k].append((source, target, int(at[0, source]), int(at[1, target]), n))
        at[0, source] += n
        at[1, target] += n

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        rows = np.array(rounds[k], np.int64).reshape(-1, 5)
        source, target, out, into, n = rows[np.isin(rows[:, 0], r)].T
        yield send(source, target, Buf.INPUT, out, n)
        source, target, out, into, n = rows[np.isin(rows[:, 1], r)].T
        yield recv(target, source, Buf.OUTPUT, into, n)

    chunks = -(-max(int(at.max()), 1) // ranks) * ranks
    made = Schedule("reshard", "direct", ranks, len(rounds), exchange, -1, chunks, chunks)
    return made, chunks * unit
