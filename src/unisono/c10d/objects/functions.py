"""torch.distributed's object collectives, over any serializer.

They take torch's arguments in torch's order, with `timeout` and `serializer` added as keywords,
and block. A rank whose arguments are wrong gets its own error, and all others
CollectiveMismatchError with its text. A rank whose object cannot be serialised takes part all the
same and says so: the ranks that would have got its object raise CollectiveError naming it, itself
raises its own error. The group stays usable either way.

Source: torch.distributed.distributed_c10d (2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono.base.deadline import Deadline, Timeout
from unisono.base.streams import on_host
from unisono.c10d.collectives import group_rank_of, root_of
from unisono.c10d.objects.packet import FIRST_BYTES, Packet
from unisono.c10d.objects.serializer import PickleSerializer, Serializer
from unisono.errors import (
    ArgumentTypeError,
    CollectiveError,
    CollectiveMismatchError,
    Context,
    InvalidArgumentError,
    UsageError,
)
from unisono.groups.operations import list_on_root, one_each
from unisono.groups.process_group import ProcessGroup
from unisono.groups.work import Work
from unisono.groups.world import member_group

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
]


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    *,
    timeout: Timeout | None = None,
    serializer: Serializer | None = None,
) -> None:
    """Copy the objects of rank `src` (global rank 0 by default) into everybody's list.

    Args:
        object_list: As many entries on every rank; replaced on all ranks but `src`.
        src: Global rank of the root.
        group: The default group if None.
        device: Accepted for torch's sake; objects travel through CPU memory.
        group_src: The root's rank in the group, instead of `src`.
        timeout: Of the whole call; the group's if None.
        serializer: Pickle if None.

    Raises:
        CollectiveMismatchError: Lists of different lengths, or another root.
        CollectiveError: The root's objects cannot be serialised.
    """
    if (pg := member_group(group, "broadcast_object_list")) is None:
        return
    root = root_of(pg, "broadcast_object_list", src, group_src, default=0)
    with ObjectCall(pg, "broadcast_object_list", timeout, serializer) as call:
        call.check(_require_list, object_list)
        call.label = f"broadcast_object_list[{len(object_list)}]"
        if pg.rank() == root:
            call.broadcast(call.pack(lambda: list(object_list)), root)
            call.end()
        else:
            object_list[:] = call.loads(call.broadcast(None, root), root)


def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: Any = None,
    *,
    timeout: Timeout | None = None,
    serializer: Serializer | None = None,
) -> None:
    """Copy the object of rank i into everybody's object_list[i]; one's own is a copy too.

    Args:
        object_list: One entry per rank, replaced.
        obj: This rank's object.
        group: The default group if None.
        timeout: Of the whole call; the group's if None.
        serializer: Pickle if None.

    Raises:
        CollectiveMismatchError: A rank's list has a wrong length.
        CollectiveError: A rank's object cannot be serialised.
    """
    if (pg := member_group(group, "all_gather_object")) is None:
        return
    with ObjectCall(pg, "all_gather_object", timeout, serializer) as call:
        call.check(one_each, pg, object_list, "object_list")
        packets = call.all_gather(call.pack(lambda: obj))
        call.end()
        object_list[:] = call.loads_all(packets)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
    *,
    timeout: Timeout | None = None,
    serializer: Serializer | None = None,
) -> None:
    """Copy the object of rank i into object_gather_list[i] on rank `dst` (global rank 0).

    `object_gather_list` has one entry per rank on `dst` and must be None elsewhere. `timeout` and
    `serializer` are as in all_gather_object.

    Raises:
        CollectiveMismatchError: The list is missing, in the wrong place or of a wrong length.
        CollectiveError: On `dst`, if a rank's object cannot be serialised.
    """
    if (pg := member_group(group, "gather_object")) is None:
        return
    root = root_of(pg, "gather_object", dst, group_dst, default=0)
    with ObjectCall(pg, "gather_object", timeout, serializer) as call:
        call.check(list_on_root, pg, object_gather_list, root, "object_gather_list")
        packets = call.gather(call.pack(lambda: obj), root)
        call.end()
        if object_gather_list is not None and pg.rank() == root:
            object_gather_list[:] = call.loads_all(packets)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
    *,
    timeout: Timeout | None = None,
    serializer: Serializer | None = None,
) -> None:
    """Copy scatter_object_input_list[i] of rank `src` into rank i's scatter_object_output_list[0].

    `src` is global rank 0 by default; the other ranks' input lists are ignored. `timeout` and
    `serializer` are as in all_gather_object.

    Raises:
        CollectiveMismatchError: The root's objects are not one per rank, or a rank has no place
            for its own.
        CollectiveError: The root's objects cannot be serialised.
    """
    if (pg := member_group(group, "scatter_object_list")) is None:
        return
    root = root_of(pg, "scatter_object_list", src, group_src, default=0)
    with ObjectCall(pg, "scatter_object_list", timeout, serializer) as call:
        call.check(_require_place, scatter_object_output_list)
        packets = None
        if pg.rank() == root:
            call.check(
                list_on_root, pg, scatter_object_input_list, root, "scatter_object_input_list"
            )
            packets = call.pack_each(scatter_object_input_list or ())
        packet = call.scatter(packets, root)
        call.end()
        scatter_object_output_list[0] = call.loads(packet, root)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Any = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    *,
    timeout: Timeout | None = None,
    serializer: Serializer | None = None,
) -> None:
    """Send objects to another rank, which calls recv_object_list; blocks until they are off.

    `device` and `use_batch` are accepted for torch's sake. `timeout` and `serializer` are as in
    all_gather_object.

    Several threads may send to one rank, and several may receive from one: each list arrives whole.

    Raises:
        InvalidArgumentError: The receiver is this rank.
    """
    if (pg := member_group(group, "send_object_list")) is None:
        return
    peer = group_rank_of(pg, "send_object_list", dst, group_dst)
    if peer == pg.rank():
        raise InvalidArgumentError("send_object_list to this rank itself would wait for ever")
    _require_list(object_list)
    call = ObjectCall(pg, "send_object_list", timeout, serializer).begin()
    packet = call.pack(lambda: object_list)
    call.wait([call.send(packet.first, peer, 0), *call.send_parts(packet, peer)])
    call.end()


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
    *,
    timeout: Timeout | None = None,
    serializer: Serializer | None = None,
) -> int:
    """Receive objects into a list; return the sender's global rank (-1: not a member).

    With neither `src` nor `group_src` from whichever rank sends first, as torch's text promises.
    `device` and `use_batch` are accepted for torch's sake. `timeout` and `serializer` are as in
    all_gather_object.

    Raises:
        CollectiveMismatchError: The sender's list has another length; this one keeps its entries.
        CollectiveError: The sender could not serialise its objects, or this rank cannot read them.
    """
    if (pg := member_group(group, "recv_object_list")) is None:
        return -1
    wanted = (
        None
        if src is None and group_src is None
        else group_rank_of(pg, "recv_object_list", src, group_src)
    )
    if wanted == pg.rank():
        raise InvalidArgumentError("recv_object_list from this rank itself would wait for ever")
    _require_list(object_list)
    call = ObjectCall(pg, "recv_object_list", timeout, serializer).begin()
    first = np.empty(FIRST_BYTES, np.uint8)
    source = pg.recv(first, wanted, 0, timeout=call.remaining_s).source_rank()
    peer = pg.group_rank(source)
    packet = call.arriving(first, peer)
    call.recv_parts(packet, peer)
    objects = call.loads(packet, peer)
    if len(objects) != len(object_list):
        raise CollectiveMismatchError(
            f"{call}: rank {source} sent {len(objects)} objects, expected {len(object_list)}",
            context=call.context(peer),
        )
    object_list[:] = objects
    return source


class ObjectCall:
    """One object call: a name, a deadline, and packets moved between the ranks of a group.

    Attributes:
        label: What the ranks of a collective must agree on besides its messages.
    """

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        timeout: Timeout | None,
        serializer: Serializer | None,
    ) -> None:
        self._group = group
        self._name = self.label = name
        self._timeout = group.timeout_s if timeout is None else timeout
        self._serializer = PickleSerializer() if serializer is None else serializer
        self._error: Exception | None = None
        self._caller = 0

    def __enter__(self) -> ObjectCall:
        # Its messages have one tag, and nobody could tell those of two calls apart.
        self._caller = self._group.enter(self._name)
        try:
            self.check(self.begin)
        except BaseException:
            self._group.leave(self._caller)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._group.leave(self._caller)

    def check(self, check: Callable[..., object], *arguments: Any) -> None:
        """Check arguments of a collective before its first message; the others hear if it fails."""
        try:
            check(*arguments)
        except UsageError as error:
            self._group.refuse(self._name, error)
            raise

    def begin(self) -> ObjectCall:
        """Check what the call was made with; its time runs from now on."""
        self._deadline = Deadline(self._timeout)
        if not isinstance(self._serializer, Serializer):
            raise ArgumentTypeError(
                f"serializer must have name, dumps and loads, got {self._serializer!r}"
            )
        return self

    @property
    def remaining_s(self) -> float:
        return self._deadline.remaining()

    # ---- between objects and packets ------------------------------------------------------

    def pack(self, obj: Callable[[], Any]) -> Packet:
        """Return the packet of an object, or one that says why there is none."""
        try:
            return Packet.of(obj(), self._serializer)
        except Exception as error:
            self._error = error
            return Packet.refusal(error)

    def pack_each(self, objects: Sequence[Any]) -> list[Packet]:
        """Return one packet per rank; if one cannot be made, all say so."""
        try:
            return [Packet.of(obj, self._serializer) for obj in objects]
        except Exception as error:
            self._error = error
            return [Packet.refusal(error)] * self._group.size()

    def end(self) -> None:
        """Raise what kept this rank from sending an object, now that the others know."""
        if self._error is not None:
            raise self._error

    def loads(self, packet: Packet, source: int) -> Any:
        """Return the object of a rank's packet."""
        blamed = self._group.ranks[source]
        if (reason := packet.refused()) is not None:
            raise CollectiveError(
                f"{self}: rank {blamed} had nothing to send: {reason}",
                context=self.context(source),
            )
        if not packet.is_by(self._serializer):
            name = self._serializer.name
            raise CollectiveMismatchError(
                f"{self}: rank {blamed} used another serializer, expected {name!r}",
                context=self.context(source),
            )
        try:
            return packet.loads(self._serializer, copy=source == self._group.rank())
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise CollectiveError(
                f"{self}: the object of rank {blamed} cannot be read here: {reason}",
                context=self.context(source),
            ) from error

    def loads_all(self, packets: Sequence[Packet]) -> list[Any]:
        """Return the objects of all ranks."""
        return [self.loads(packet, source) for source, packet in enumerate(packets)]

    def arriving(self, first: Any, source: int) -> Packet:
        """Return the packet of which a rank's first message has arrived."""
        packet = Packet.arriving(first)
        if packet is None:
            blamed = self._group.ranks[source]
            raise CollectiveMismatchError(
                f"{self}: rank {blamed} sent an array, expected objects",
                context=self.context(source),
                hint="every rank must use the object calls, with the same version of unisono",
            )
        return packet

    def __str__(self) -> str:
        group = self._group
        return f"{self._name} in group '{group.name}' failed on rank {group.ranks[group.rank()]}"

    def context(self, source: int) -> Context:
        """Return where an error is that a rank is to blame for."""
        group = self._group
        me, blamed = group.ranks[group.rank()], group.ranks[source]
        return Context(rank=me, group=group.name, op=self._name, peers=(blamed,), usable=True)

    # ---- collectives ----------------------------------------------------------------------

    @on_host
    def broadcast(self, packet: Packet | None, root: int) -> Packet:
        """Return root's packet."""
        first = np.empty(FIRST_BYTES, np.uint8) if packet is None else packet.first
        self._group.broadcast(first, root, **self._how)
        if packet is None:
            packet = self.arriving(first, root)
        self._broadcast_parts(packet, root)
        return packet

    @on_host
    def all_gather(self, mine: Packet) -> list[Packet]:
        """Return the packets of all ranks."""
        packets = self._gather_first(mine, None)
        for root, packet in enumerate(packets):
            self._broadcast_parts(packet, root)
        return packets

    @on_host
    def gather(self, mine: Packet, root: int) -> list[Packet]:
        """Return the packets of all ranks on `root`, nothing elsewhere."""
        packets = self._gather_first(mine, root)
        if self._group.rank() != root:
            self.wait(self.send_parts(mine, root))
        for peer, packet in enumerate(packets):
            if peer != root:
                self.recv_parts(packet, peer)
        return packets

    @on_host
    def scatter(self, packets: list[Packet] | None, root: int) -> Packet:
        """Return the packet that root has for this rank."""
        first = np.empty(FIRST_BYTES, np.uint8)
        firsts = None if packets is None else [packet.first for packet in packets]
        self._group.scatter(first, firsts, root, **self._how)
        if packets is None:
            packet = self.arriving(first, root)
            self.recv_parts(packet, root)
            return packet
        for peer, packet in enumerate(packets):
            if peer != root:
                self.wait(self.send_parts(packet, peer))
        return packets[root]

    def _gather_first(self, mine: Packet, root: int | None) -> list[Packet]:
        """Return the packets as far as the first messages say, on root or (None) on all ranks."""
        me, size = self._group.rank(), self._group.size()
        firsts = np.empty((size, FIRST_BYTES), np.uint8)
        if root is None:
            self._group.all_gather_into_tensor(firsts, mine.first, **self._how)
        else:
            outputs = list(firsts) if me == root else None
            self._group.gather(mine.first, outputs, root, **self._how)
            if outputs is None:
                return []
        return [mine if rank == me else self.arriving(firsts[rank], rank) for rank in range(size)]

    def _broadcast_parts(self, packet: Packet, root: int) -> None:
        if packet.rest.size:
            self._group.broadcast(packet.rest, root, **self._how)
        if self._group.rank() != root:
            packet.open_rest()
        for part in packet.large:
            self._group.broadcast(part, root, **self._how)

    @property
    def _how(self) -> dict[str, Any]:
        return {"timeout": self.remaining_s, "_label": self.label}

    # ---- messages -------------------------------------------------------------------------

    def send(self, data: Any, peer: int, tag: int) -> Work:
        """Start sending bytes to a rank."""
        return self._group.send(data, peer, tag, async_op=True, timeout=self.remaining_s)

    def send_parts(self, packet: Packet, peer: int) -> list[Work]:
        """Start sending what `first` had no room for."""
        parts = [packet.rest] if packet.rest.size else []
        return [self.send(part, peer, packet.tag) for part in [*parts, *packet.large]]

    def recv_parts(self, packet: Packet, peer: int) -> None:
        """Receive what `first` had no room for."""
        if packet.rest.size:
            self._group.recv(packet.rest, peer, packet.tag, timeout=self.remaining_s)
        packet.open_rest()
        for part in packet.large:
            self._group.recv(part, peer, packet.tag, timeout=self.remaining_s)

    @on_host
    def wait(self, works: list[Work]) -> None:
        """Wait for messages on their way."""
        for work in works:
            work.wait()


def _require_list(objects: Any) -> None:
    if not isinstance(objects, list):
        raise ArgumentTypeError(f"object_list must be a list, got {type(objects).__name__}")


def _require_place(objects: Any) -> None:
    if not isinstance(objects, list) or not objects:
        raise InvalidArgumentError("scatter_object_output_list must be a list of at least one")
