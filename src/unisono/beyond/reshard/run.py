"""`reshard`: move arrays from one sharding to another, as often as wanted."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from unisono.beyond.boxes import IndexBox
from unisono.beyond.reshard.parts import ArrayParts, Memory, dtype_from, named_parts
from unisono.beyond.reshard.plan import BoxPacket, packet_bytes, packets, schedule
from unisono.beyond.reshard.planned import PlannedArray, PlannedCopy, is_same, planned
from unisono.beyond.shared_arrays import host_of
from unisono.beyond.windows.window import Window, new_window
from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.threads.streams import on_host
from unisono.core.base.types import DType
from unisono.core.c10d.objects.call import ObjectCall
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import Group, require_group
from unisono.core.operations.work import Work
from unisono.core.schedules import Schedule
from unisono.errors import (
    ClosedError,
    CollectiveTimeoutError,
    CommunicationError,
    InvalidArgumentError,
    PeerLostError,
)

# Bytes of a packet. Larger: the slots of a rank cost memory, and do not fit into its caches.
# Smaller: the Python code for each packet takes a larger part of the time.
_LEAST_BYTES, _MOST_BYTES = 1 << 16, 2 << 20
# Packets of a pair under way, and of a rank to other hosts. One: a rank waits while another copies;
# but of several sources on its host a target takes one packet each, because slots that do not stay
# in the last cache cost a third of the time.
_SLOTS = 2
# Tags of the library that windows (below) and objects (from 2**62 + 2**61 on) do not come to.
_FIRST_TAG = 2**62 + 2**61 + 2**60
# How long a wait lasts before it looks whether its peer lives; as in windows.
_SLICE_S = 0.02
_LINES = 40
# Plans that this process has made; a plan has the number of its first rank.
_numbers = itertools.count(1)


class _PacketStep(NamedTuple):
    """A packet that this rank sends or gets.

    Attributes:
        number: In the order of all ranks.
        sends: Whether this rank sends it.
        peer: The other rank.
        copies: For each slot, the copies into it or out of it.
        far: For each slot, the message to or from another host: the slot, or the memory of the
            array if that is contiguous and has the dtype that is sent.
        straight: Whether that is so for the receiver. It expects all such messages before it
            signals for the first time, so their sender waits for no slot.
        slots: Of its pair of ranks.
    """

    number: int
    sends: bool
    peer: int
    copies: list[list[PlannedCopy]]
    far: list[Memory]
    straight: bool
    slots: int


class _Packets(NamedTuple):
    """What this rank sends and gets.

    Attributes:
        windows: The slots, and the signals that a slot is free.
        steps: Its packets in the order of all ranks.
        arriving: The messages from each rank of another host: those into slots, and the others.
        tag: Of the messages; those into the memory of an array have the next one.
    """

    windows: list[Window]
    steps: list[_PacketStep]
    arriving: dict[tuple[int, bool], list[_PacketStep]]
    tag: int


class ReshardPlan:
    """The transfers between the ranks; made by `reshard`. `run` moves the arrays.

    `str(plan)` has a line for each pair of ranks and array.

    Attributes:
        schedule: The messages as a schedule, to count, draw and simulate.
        schedule_nbytes: Its size of data, for `cost` and `simulate`.
        moved_bytes: Bytes that all ranks send.
        slot_bytes: Memory of this rank that the plan keeps besides the arrays, with the copies of
            sources that targets overwrite.
    """

    schedule: Schedule
    schedule_nbytes: int

    def __init__(
        self,
        group: ProcessGroup,
        arrays: Sequence[PlannedArray],
        source: dict[str, ArrayParts],
        target: dict[str, ArrayParts],
        number: int,
        hosts: Sequence[str],
    ) -> None:
        self._group, self._arrays = group, arrays
        rows = [(number, each) for number, a in enumerate(arrays) for each in a.transfers]
        nbytes = [(each, arrays[at].nbytes(each.box, each.relayed)) for at, each in rows]
        slot = packet_bytes(nbytes, _LEAST_BYTES, _MOST_BYTES)
        order = packets(rows, lambda at, box, relayed: arrays[at].nbytes(box, relayed), slot)
        self.moved_bytes = sum(packet.nbytes for packet in order)
        # What the ranks compare before a run; "" of a closed plan.
        self._text = f"ReshardPlan.run(plan {number}, {self.moved_bytes} bytes)"
        self._describe(order)
        self._origins = [
            (name, origin)
            for side in (source, target)
            for name, parts in side.items()
            for origin in parts.origins
        ]
        saved, source = _apart(source, target)
        self._local: list[PlannedCopy] = [(np.copyto, copied, memory) for memory, copied in saved]
        for at, each in rows:
            if each.source == each.target == group.rank():
                sides = source[arrays[at].name], target[arrays[at].name]
                self._local += arrays[at].copies(each.box, *sides)
        self._packets = _Packets([], [], defaultdict(list), _FIRST_TAG + 2 * number)
        senders = _slots_of(order, hosts)
        part = np.zeros(max(slot * sum(senders[group.rank()].values()), 1), np.uint8)
        self.slot_bytes = part.nbytes + sum(copied.nbytes for _, copied in saved)
        self._unopened: Any = order, slot, senders, part, source, target

    def _describe(self, order: Sequence[BoxPacket]) -> None:
        pairs: Counter[tuple[int, int]] = Counter()
        for packet in order:
            pairs[packet.source, packet.target] += packet.nbytes
        sends = [(a, b, nbytes) for (a, b), nbytes in pairs.items()]
        self.schedule, self.schedule_nbytes = schedule(sends, self._group.size())

    def _open(self, deadline: Deadline) -> None:
        """Make the slots, and the steps of this rank; collective."""
        order, slot, senders, memory, source, target = self._unopened
        self._unopened = None
        if not order:
            return
        windows, steps, arriving, _ = self._packets
        for part in (memory, memory[:1]):
            windows.append(new_window(part, self._group, timeout=deadline.remaining()))
        del part, memory
        with ObjectCall(self._group, "reshard", deadline.remaining(), None) as call:
            make = self._make_steps
            rows = call.on_all(lambda: make(order, slot, senders, source, target), "no plan")
        straight = set().union(*rows)
        steps[:] = [each._replace(straight=each.number in straight) for each in steps]
        for each in steps:
            if each.far and not each.sends:
                arriving[each.peer, each.straight].append(each)

    def _make_steps(
        self,
        order: Sequence[BoxPacket],
        size: int,
        senders: dict[int, dict[int, int]],
        source: dict[str, ArrayParts],
        target: dict[str, ArrayParts],
    ) -> list[int]:
        """Make the steps of this rank; return the packets that need no slot here."""
        me = self._group.rank()
        shared = self._packets.windows[0].memory
        assert shared is not None
        staging: list[Memory] = []
        straight: list[int] = []
        for number, packet in enumerate(order):
            if me not in (packet.source, packet.target):
                continue
            sends = packet.source == me
            peer = packet.target if sends else packet.source
            is_near = peer in shared.data
            row = senders[packet.target]
            count = row[packet.source]
            if is_near or not sends:
                before = itertools.takewhile(packet.source.__ne__, row)
                first = sum(row[each] for each in before)
                memory = shared.data[packet.target]
                slots = [memory[(first + at) * size :] for at in range(count)]
            else:
                if not staging:
                    staging = list(np.empty((_SLOTS, size), np.uint8))
                    self.slot_bytes += _SLOTS * size
                slots = staging
            given = source if sends and not packet.relayed else target
            copies = [self._copies(packet, slot, given, receives=not sends) for slot in slots]
            far = [] if is_near else [slot[: packet.nbytes] for slot in slots]
            if far and len(copies[0]) == 1:
                _, into, out = copies[0][0]
                array = out if sends else into
                if into.dtype == out.dtype and array.flags.c_contiguous:
                    far, copies = [array.reshape(-1).view(np.uint8)] * _SLOTS, [[]] * _SLOTS
                    straight += [] if sends else [number]
            made = _PacketStep(number, sends, peer, copies, far, False, count)
            self._packets.steps.append(made)
        return straight

    def _copies(
        self, packet: BoxPacket, slot: Any, given: dict[str, ArrayParts], *, receives: bool
    ) -> list[PlannedCopy]:
        copies: list[PlannedCopy] = []
        for number, box, offset in packet.pieces:
            array, relayed = self._arrays[number], packet.relayed
            inside, parts = array.packed(box, relayed, slot, offset), given[array.name]
            if receives:
                copies.append((array.unpack(box, relayed), parts.memory_of(box), inside))
            else:
                convert, memory = array.pack(box, relayed, parts)
                copies.append((convert, inside, memory))
        return copies

    @on_host
    def run(self, *, timeout: Timeout | None = None) -> None:
        """Move the arrays; a collective call of all ranks of the group.

        On return the targets of this rank are complete, and its sources have come to the others.

        Args:
            timeout: Of the whole call; the group's if None.

        Raises:
            ClosedError: The plan was closed.
            UsageError: A tensor has other memory than when the plan was made.
            CollectiveMismatchError: A rank makes another call; no array is changed.
            CollectiveTimeoutError, PeerLostError, CollectiveAbortedError: A rank did not take part
                until the end. The targets are undefined, and the group is broken.
        """
        group = self._group
        deadline = Deadline(group.timeout_s if timeout is None else timeout)
        try:
            if not self._text:
                raise ClosedError("ReshardPlan.run of a plan that was closed")
            for name, origin in self._origins:
                origin.renew(name)
        except Exception as error:
            group.refuse("ReshardPlan.run", error)
            raise
        group.agree(self._text, timeout=deadline.remaining())
        try:
            for convert, into, out in self._local:
                convert(into, out)
            _PacketMoves(group, self._packets, deadline).run()
        except BaseException as error:
            self._report(error, deadline)
            raise

    def _report(self, error: BaseException, deadline: Deadline) -> None:
        """End the call on the other ranks, which wait for packets, by the cause of this error."""
        backend: Any = self._group.backends.get("cpu")
        if backend is None or backend.broken():
            return
        kinds = {PeerLostError: "lost", CollectiveTimeoutError: "timeout"}
        kind = next((kinds[each] for each in kinds if isinstance(error, each)), None)
        if kind is None or not isinstance(error, CommunicationError) or error.context is None:
            self._group.abort(f"{type(error).__name__} in ReshardPlan.run")
            return
        error.context = replace(error.context, usable=False)
        reason = error.what.splitlines()[0].partition(": ")[2]
        if kind == "timeout":
            reason = f"timed out after {deadline}: {reason}"
        backend.fail(kind, f"{reason} (in ReshardPlan.run)", error.context.peers)

    def close(self) -> None:
        """Give the memory of the slots back; not a collective call. The arrays stay."""
        self._text = ""
        for window in self._packets.windows:
            window.close()

    def __str__(self) -> str:
        ranks, lines = self._group.ranks, []
        for array in self._arrays:
            pairs: dict[tuple[int, int, bool], list[IndexBox]] = defaultdict(list)
            for each in array.transfers:
                pairs[each.source, each.target, each.relayed].append(each.box)
            for (source, target, relayed), boxes in pairs.items():
                nbytes = sum(array.nbytes(box, relayed) for box in boxes)
                more = f" and {len(boxes) - 1} more" if len(boxes) > 1 else ""
                way = "copies" if source == target else f"-> rank {ranks[target]}"
                relay = ", relayed" if relayed else ""
                name = f"{array.name} " if array.name else ""
                lines.append(
                    f"rank {ranks[source]} {way}: {name}{boxes[0]}{more}, {nbytes:,} bytes{relay}"
                )
        if len(lines) > _LINES:
            lines[_LINES:] = [f"... and {len(lines) - _LINES} lines more"]
        return "\n".join([f"{self!r}:", *lines])

    def __repr__(self) -> str:
        return (
            f"<ReshardPlan of {len(self._arrays)} arrays in group '{self._group.name}', "
            f"{self.moved_bytes:,} bytes between ranks>"
        )


class _PacketMoves:
    """One run of the packets of a rank."""

    def __init__(self, group: ProcessGroup, packets: _Packets, deadline: Deadline) -> None:
        self._group, self._packets, self._deadline = group, packets, deadline
        # By peer: packets that took a slot, of those sent and of those that came.
        self._sent: Counter[int] = Counter()
        self._slots: dict[int, int] = {}
        self._taken: Counter[int] = Counter()
        # By peer and way: messages to expect, receives under way.
        self._later = {key: iter(its) for key, its in packets.arriving.items()}
        self._arriving: dict[tuple[int, bool], deque[Work]] = defaultdict(deque)
        # Messages to other hosts: their number, and those under way.
        self._far = 0
        self._leaving: deque[Work] = deque()
        # The ranks that signal before the first packet, and after all that came straight into their
        # arrays: a message that nobody expects needs memory.
        straight = (each.peer for each in packets.steps if each.sends and each.straight)
        self._ends = dict.fromkeys(straight)
        self._not_ready = set(self._ends)

    def run(self) -> None:
        """Send and take all packets."""
        for (peer, straight), its in self._later.items():
            slots = self._packets.arriving[peer, straight][0].slots
            for step in list(itertools.islice(its, None if straight else slots)):
                self._expect(step, len(self._arriving[peer, straight]))
            if straight:
                self._packets.windows[1].signal(peer)
        for step in self._packets.steps:
            if step.sends:
                self._send(step)
            else:
                self._receive(step)
        for work in self._leaving:
            work.wait()
        for peer in self._ends | dict(self._sent):
            # Until its packets were taken this rank must not leave.
            for _ in range(min(self._sent[peer], self._slots.get(peer, 0)) + (peer in self._ends)):
                self._wait(1, peer)

    def _send(self, step: _PacketStep) -> None:
        peer, number = step.peer, self._sent[step.peer]
        if peer in self._not_ready:
            self._not_ready.remove(peer)
            self._wait(1, peer)
        if not step.straight and number >= step.slots:
            self._wait(1, peer)
        if step.far and len(self._leaving) == _SLOTS:
            self._leaving.popleft().wait()
        # The slots of one peer, or those that all messages of this rank take in turn.
        slot = self._far % _SLOTS if step.far else number % step.slots
        for convert, into, out in step.copies[slot]:
            convert(into, out)
        if step.far:
            self._leaving.append(self._message("send", step, slot))
            self._far += 1
        else:
            self._packets.windows[0].signal(peer)
        if not step.straight:
            self._sent[peer], self._slots[peer] = number + 1, step.slots

    def _receive(self, step: _PacketStep) -> None:
        peer, key = step.peer, (step.peer, step.straight)
        if step.far:
            self._arriving[key].popleft().wait()
        else:
            self._wait(0, peer)
        if step.straight:
            if not self._arriving[key]:
                self._packets.windows[1].signal(peer)
            return
        slot = self._taken[peer] % step.slots
        for convert, into, out in step.copies[slot]:
            convert(into, out)
        for later in itertools.islice(self._later.get(key, ()), 1):
            # Before its sender may send it.
            self._expect(later, slot)
        self._packets.windows[1].signal(peer)
        self._taken[peer] += 1

    def _expect(self, step: _PacketStep, slot: int) -> None:
        self._arriving[step.peer, step.straight].append(
            self._message("recv", step, 0 if step.straight else slot)
        )

    def _message(self, call: str, step: _PacketStep, slot: int) -> Work:
        words: Any = step.far[slot], step.peer, self._packets.tag + step.straight
        limit_s = self._deadline.remaining()
        started: Work = getattr(self._group, call)(*words, async_op=True, timeout=limit_s)
        return started

    def _wait(self, at: int, peer: int) -> None:
        window, limit_s = self._packets.windows[at], self._deadline.remaining()
        if not window.take_signal(peer, min(_SLICE_S, limit_s)):
            window.wait_signal(peer, timeout=self._deadline.remaining())


def _slots_of(order: Sequence[BoxPacket], hosts: Sequence[str]) -> dict[int, dict[int, int]]:
    """Return for each target the slots of its sources, in the order of their memory."""
    rows: dict[int, dict[int, int]] = defaultdict(dict)
    for packet in order:
        rows[packet.target][packet.source] = _SLOTS
    for target, row in rows.items():
        near = [source for source in row if hosts[source] == hosts[target]]
        if len(near) > 1:
            row |= dict.fromkeys(near, 1)
    return rows


def _apart(
    source: dict[str, ArrayParts], target: dict[str, ArrayParts]
) -> tuple[list[tuple[Memory, Memory]], dict[str, ArrayParts]]:
    """Return each source that a target would overwrite, with a copy; and the sources with these."""
    # By their first bytes; `reach` has the last byte of each and all before.
    written = sorted(
        [
            (*_bounds(view), name, box, view)
            for name, parts in target.items()
            for box, view in zip(parts.boxes, parts.views, strict=True)
            if view.size
        ],
        key=lambda row: row[0],
    )
    lows = [row[0] for row in written]
    reach = list(itertools.accumulate([row[1] for row in written], max))
    saved: list[tuple[Memory, Memory]] = []
    made = {}
    for name, parts in source.items():
        views = list(parts.views)
        for at, (box, view) in enumerate(zip(parts.boxes, parts.views, strict=True)):
            low, high = _bounds(view)
            last = bisect.bisect_left(lows, high) if view.size else 0
            first = bisect.bisect_right(reach, low, 0, last)
            # What stays in its place keeps its values.
            if any(
                np.may_share_memory(view, into)
                and not ((name, box) == (other, its) and is_same(into, view))
                for _, _, other, its, into in written[first:last]
            ):
                views[at] = np.empty(view.shape, view.dtype)
                saved.append((view, views[at]))
        made[name] = parts._replace(views=views)
    return saved, made


def _bounds(view: Memory) -> tuple[int, int]:
    """Return the address of the first byte of a view, and that behind the last one."""
    spans = [stride * (n - 1) for stride, n in zip(view.strides, view.shape, strict=True)]
    at = view.__array_interface__["data"][0]
    low = at + sum(span for span in spans if span < 0)
    return low, at + sum(span for span in spans if span > 0) + view.itemsize


def reshard(
    src: Any,
    dst: Any,
    group: Group = None,
    *,
    dtype: Any = None,
    timeout: Timeout | None = None,
) -> ReshardPlan:
    """Plan how arrays move from one sharding to another; a collective call.

        plan = dist.reshard(rows, columns)      # all ranks of the group
        plan.run()                              # as often as wanted

    A rank takes what it has itself, then what ranks of its host have. Ranks that have the same
    elements share the sending. A byte comes to a host once. Sources and targets may overlap; that
    costs a copy of these sources. If the dtypes differ, elements are converted, and the smaller
    dtype is sent.

    Args:
        src: What this rank has: a `Sharded`, a DTensor of torch, an array (the whole array is on
            this rank), or None. Or a dict of these by name; a rank may have some names only.
        dst: What this rank wants, likewise; written by `ReshardPlan.run`.
        group: All ranks of both sides; the default group if None. Two jobs make a group over a
            common store.
        dtype: How floating arrays are sent, such as "bfloat16". "int8": in blocks of up to 128
            elements of the last dimension, each with a scale. An element is then off by at most
            1/252 of the largest of its block, or 2^-127, before it is rounded to the target's
            dtype. What float32 cannot hold becomes infinite. All targets get the same values,
            but what stays in its memory keeps its own.
        timeout: Of the call; the group's if None.

    Raises:
        CollectiveMismatchError: Ranks disagree about the shape or dtype of an array, or a rank's
            arguments are wrong.
        CollectiveError: Nobody has what a rank wants, or a rank wants an element twice. The text
            has the rank, the array and the indices.
        CollectiveTimeoutError, PeerLostError: See `unisono.errors`.

    Examples: On rank 1 of 2
        >>> row, column = np.array([[2 * rank, 2 * rank + 1]]), np.zeros((2, 1), int)
        >>> plan = dist.reshard(
        ...     dist.Sharded(row, (2, 2), mesh=[0, 1], placements=[0]),
        ...     dist.Sharded(column, (2, 2), mesh=[0, 1], placements=[1]),
        ... )
        >>> plan.run()
        >>> column.tolist()
        [[1], [3]]
    """
    pg = require_group(group)
    with ObjectCall(pg, "reshard", timeout, None) as call:
        own: list[dict[str, ArrayParts]] = []
        way: list[DType] = []

        def describe() -> None:
            rank = pg.ranks[pg.rank()]
            if dtype is not None:
                way.append(dtype_from(dtype))
                call.label += f"(dtype={way[0]})"
                if way[0].kind != "f" and way[0].name != "int8":
                    raise InvalidArgumentError(
                        f"reshard: dtype {way[0]}: expected a floating one, or int8"
                    )
            own.append(named_parts("reshard", src, rank, write=False))
            own.append(named_parts("reshard", dst, rank, write=True))

        call.check(describe)
        plain = [{name: parts.described() for name, parts in side.items()} for side in own]
        mine = call.pack(lambda: (*plain, host_of(pg), next(_numbers)))
        rows = call.loads_all(call.all_gather(mine))
        arrays = planned(call, pg, rows, *way)
        made: list[ReshardPlan] = []
        call.on_all(
            lambda: made.append(
                ReshardPlan(pg, arrays, own[0], own[1], rows[0][3], [row[2] for row in rows])
            ),
            "no plan",
        )
        deadline = Deadline(call.remaining_s)
    made[0]._open(deadline)
    return made[0]
