"""torch.distributed's object collectives, over any serializer.

They take torch's arguments in torch's order, with `timeout` and `serializer` added as keywords,
and block. A rank whose object cannot be serialised, or whose arguments are wrong, takes part all
the same and says so: the ranks that would have got its object raise CollectiveError naming it,
itself raises its own error, and the group stays usable.

Source: torch.distributed.distributed_c10d (2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono.base.deadline import Deadline, Timeout
from unisono.base.streams import on_host
from unisono.errors import (
    ArgumentTypeError,
    CollectiveError,
    CollectiveMismatchError,
    Context,
    InvalidArgumentError,
)
from unisono.groups.checks import list_on_root, one_each
from unisono.groups.collectives import group_rank_of, root_of
from unisono.groups.packet import FIRST_BYTES, Packet
from unisono.groups.process_group import ProcessGroup
from unisono.groups.serializer import PickleSerializer, Serializer
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

# Of the messages inside gather_object and scatter_object_list; users' tags are usually small.
_TAG = 2**63 - 1


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
    length = _length(object_list, pg, "broadcast_object_list")
    with ObjectCall(pg, f"broadcast_object_list[{length}]", timeout, serializer) as call:
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
        CollectiveError: A rank's object cannot be serialised, or its list has a wrong length.
    """
    if (pg := member_group(group, "all_gather_object")) is None:
        return
    with ObjectCall(pg, "all_gather_object", timeout, serializer) as call:

        def mine() -> Any:
            one_each(pg, object_list, "object_list")
            return obj

        packets = call.all_gather(call.pack(mine))
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
        CollectiveError: On `dst`, if a rank's object cannot be serialised.
    """
    if (pg := member_group(group, "gather_object")) is None:
        return
    root = root_of(pg, "gather_object", dst, group_dst, default=0)
    with ObjectCall(pg, "gather_object", timeout, serializer) as call:

        def mine() -> Any:
            list_on_root(pg, object_gather_list, root, "object_gather_list")
            return obj

        packets = call.gather(call.pack(mine), root)
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
        InvalidArgumentError: The output list has no entry.
        CollectiveError: The root's objects cannot be serialised, or are not one per rank.
    """
    if (pg := member_group(group, "scatter_object_list")) is None:
        return
    root = root_of(pg, "scatter_object_list", src, group_src, default=0)
    with ObjectCall(pg, "scatter_object_list", timeout, serializer) as call:
        packets = call.pack_each(scatter_object_input_list) if pg.rank() == root else None
        packet = call.scatter(packets, root)
        call.end()
        if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
            raise InvalidArgumentError("scatter_object_output_list must be a list of at least one")
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

    Raises:
        InvalidArgumentError: The receiver is this rank.
    """
    if (pg := member_group(group, "send_object_list")) is None:
        return
    peer = group_rank_of(pg, dst, group_dst)
    if peer == pg.rank():
        raise InvalidArgumentError("send_object_list to this rank itself would wait for ever")
    call = ObjectCall(pg, "send_object_list", timeout, serializer)
    packet = call.pack(lambda: list(object_list))
    call.wait([call.send(packet.first, peer, 0), *call.send_parts(packet, peer, 0)])
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
        CollectiveError: The sender could not serialise its objects.
    """
    if (pg := member_group(group, "recv_object_list")) is None:
        return -1
    wanted = None if src is None and group_src is None else group_rank_of(pg, src, group_src)
    if wanted == pg.rank():
        raise InvalidArgumentError("recv_object_list from this rank itself would wait for ever")
    call = ObjectCall(pg, "recv_object_list", timeout, serializer)
    first = np.empty(FIRST_BYTES, np.uint8)
    source = pg.recv(first, wanted, 0, timeout=call.remaining_s).source_rank()
    peer = pg.group_rank(source)
    packet = Packet.arriving(first)
    call.recv_parts(packet, peer, 0)
    objects = call.loads(packet, peer)
    if len(objects) != _length(object_list):
        raise CollectiveMismatchError(
            f"recv_object_list: rank {source} sent {len(objects)} objects, this rank expected "
            f"{len(object_list)}",
            context=Context(group=pg.name, op="recv_object_list", peers=(source,), usable=True),
        )
    object_list[:] = objects
    return source


class ObjectCall:
    """One object call: a name, a deadline, and packets moved between the ranks of a group."""

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        timeout: Timeout | None,
        serializer: Serializer | None,
    ) -> None:
        self._group = group
        self._name = name
        self._deadline = Deadline(group.timeout_s if timeout is None else timeout)
        self._serializer = PickleSerializer() if serializer is None else serializer
        self._error: Exception | None = None
        self._caller = 0

    def __enter__(self) -> ObjectCall:
        # Its messages have one tag, and nobody could tell those of two calls apart.
        self._caller = self._group.enter(self._name.partition("[")[0])
        return self

    def __exit__(self, *error: object) -> None:
        self._group.leave(self._caller)

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

    def pack_each(self, objects: Sequence[Any] | None) -> list[Packet]:
        """Return one packet per rank; if one cannot be made, all say so."""
        try:
            list_on_root(self._group, objects, self._group.rank(), "scatter_object_input_list")
            assert objects is not None
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
            op = self._name.partition("[")[0]
            raise CollectiveError(
                f"{op} in group '{self._group.name}': rank {blamed} had nothing to send: {reason}",
                context=Context(group=self._group.name, op=op, peers=(blamed,), usable=True),
            )
        return packet.loads(self._serializer, copy=source == self._group.rank())

    def loads_all(self, packets: Sequence[Packet]) -> list[Any]:
        """Return the objects of all ranks."""
        return [self.loads(packet, source) for source, packet in enumerate(packets)]

    # ---- collectives ----------------------------------------------------------------------

    @on_host
    def broadcast(self, packet: Packet | None, root: int) -> Packet:
        """Return root's packet."""
        first = np.empty(FIRST_BYTES, np.uint8) if packet is None else packet.first
        self._group.broadcast(first, root, **self._how)
        if packet is None:
            packet = Packet.arriving(first)
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
            self.wait(self.send_parts(mine, root, _TAG))
        for peer, packet in enumerate(packets):
            if peer != root:
                self.recv_parts(packet, peer, _TAG)
        return packets

    @on_host
    def scatter(self, packets: list[Packet] | None, root: int) -> Packet:
        """Return the packet that root has for this rank."""
        first = np.empty(FIRST_BYTES, np.uint8)
        firsts = None if packets is None else [packet.first for packet in packets]
        self._group.scatter(first, firsts, root, **self._how)
        if packets is None:
            packet = Packet.arriving(first)
            self.recv_parts(packet, root, _TAG)
            return packet
        for peer, packet in enumerate(packets):
            if peer != root:
                self.wait(self.send_parts(packet, peer, _TAG))
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
        return [mine if rank == me else Packet.arriving(firsts[rank]) for rank in range(size)]

    def _broadcast_parts(self, packet: Packet, root: int) -> None:
        if packet.rest.size:
            self._group.broadcast(packet.rest, root, **self._how)
        if self._group.rank() != root:
            packet.open_rest()
        for part in packet.large:
            self._group.broadcast(part, root, **self._how)

    @property
    def _how(self) -> dict[str, Any]:
        return {"timeout": self.remaining_s, "_label": self._name}

    # ---- messages -------------------------------------------------------------------------

    def send(self, data: Any, peer: int, tag: int) -> Work:
        """Start sending bytes to a rank."""
        return self._group.send(data, peer, tag, async_op=True, timeout=self.remaining_s)

    def send_parts(self, packet: Packet, peer: int, tag: int) -> list[Work]:
        """Start sending what `first` had no room for."""
        parts = [packet.rest] if packet.rest.size else []
        return [self.send(part, peer, tag) for part in [*parts, *packet.large]]

    def recv_parts(self, packet: Packet, peer: int, tag: int) -> None:
        """Receive what `first` had no room for."""
        if packet.rest.size:
            self._group.recv(packet.rest, peer, tag, timeout=self.remaining_s)
        packet.open_rest()
        for part in packet.large:
            self._group.recv(part, peer, tag, timeout=self.remaining_s)

    @on_host
    def wait(self, works: list[Work]) -> None:
        """Wait for messages on their way."""
        for work in works:
            work.wait()


def _length(objects: Any, pg: ProcessGroup | None = None, call: str = "") -> int:
    """Return the length of a list; in a collective, the other ranks hear that it is none."""
    if isinstance(objects, list):
        return len(objects)
    error = ArgumentTypeError(f"object_list must be a list, got {type(objects).__name__}")
    if pg is not None:
        pg.refuse(call, error)
    raise error
