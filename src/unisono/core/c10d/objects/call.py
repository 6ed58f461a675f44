"""One object call: packets moved between the ranks of a group under one name and deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.host import reason_of
from unisono.core.base.threads.streams import on_host
from unisono.core.c10d.arguments import reporting_bad_arguments
from unisono.core.c10d.objects.packet import FIRST_BYTES, Packet
from unisono.core.c10d.objects.serializer import PickleSerializer, Serializer
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.operations.hooks import Hooks, PreHookArgs
from unisono.core.operations.work import Work
from unisono.errors import (
    ArgumentTypeError,
    CollectiveError,
    CollectiveMismatchError,
    Context,
    UnisonoError,
)


class ObjectCall:
    """One object call: a name, a deadline, and packets moved between the ranks of a group.

    Attributes:
        label: Text that must be equal on all ranks of a collective; shown in errors.
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
        self._error: BaseException | None = None
        self._caller = 0
        self._is_collective = False
        self._hooks: Hooks | None = None
        self._seen: PreHookArgs | None = None

    def __enter__(self) -> ObjectCall:
        # All messages of a call have one tag, so the messages of two calls could be mixed up.
        self._caller = self._group.take_guard(self._name)
        self._since = self._group.place()
        try:
            self.check(self._begin_whole)
        except BaseException:
            self._group.release_guard(self._caller)
            raise
        self._is_collective = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._leave_whole(error)
        finally:
            self._group.release_guard(self._caller)
        known = error is None or error is self._error or isinstance(error, UnisonoError)
        if not known and error is not None and not self._group.is_known_to_all(error, self._since):
            # The other ranks wait for a later part of this call.
            self._group.abort(f"{type(error).__name__} in {self._name}")

    def check(self, check: Callable[..., object], *arguments: Any) -> None:
        """Check arguments of a collective before its first message; report a failure."""
        with reporting_bad_arguments(self._group, self._name):
            check(*arguments)

    def begin(self) -> ObjectCall:
        """Check the serializer, and start the time of the call."""
        if (block := self._group._block_here()) is not None and block.takes_all:
            block.refuse(self._name)
        self._deadline = Deadline(self._timeout)
        if not isinstance(self._serializer, Serializer):
            raise ArgumentTypeError(
                f"serializer must have name, dumps and loads, got {self._serializer!r}"
            )
        return self

    @contextmanager
    def messages(self, peer: int | None) -> Iterator[ObjectCall]:
        """Begin a call of two ranks, whose parts are messages."""
        self._begin_whole(-1 if peer is None else peer)
        try:
            yield self
        except BaseException as error:
            self._leave_whole(error)
            raise
        self._leave_whole(None)

    def _begin_whole(self, peer: int | None = None) -> None:
        self.begin()
        self._hooks = self._group._hooks
        if self._hooks is not None:
            self._seen = self._hooks.begin_whole(self._group, self._name, peer)

    def _leave_whole(self, error: BaseException | None) -> None:
        if self._hooks is not None and self._seen is not None:
            self._hooks.leave_whole()
            if error is None:
                self._hooks.end(self._seen, None)

    @property
    def remaining_s(self) -> float:
        return self._deadline.remaining()

    # ---- between objects and packets ------------------------------------------------------

    def pack(self, obj: Callable[[], Any]) -> Packet:
        """Return the packet of an object, or a packet with the error that prevented it."""
        with self._reporting():
            try:
                return Packet.of(obj(), self._serializer)
            except BaseException as error:
                if self._is_collective and not isinstance(error, Exception):
                    raise
                self._error = error
                return Packet.refusal(error)

    def pack_each(self, objects: Sequence[Any]) -> list[Packet]:
        """Return one packet per rank; if an object cannot be packed, all packets hold the error."""
        with self._reporting():
            try:
                return [Packet.of(obj, self._serializer) for obj in objects]
            except Exception as error:
                self._error = error
                return [Packet.refusal(error)] * self._group.size()

    def _reporting(self) -> AbstractContextManager[None]:
        """Return a block whose end by an interrupt, such as Ctrl-C, ends the call on all ranks."""
        if not self._is_collective:
            return nullcontext()
        return reporting_bad_arguments(self._group, self._name)

    def end(self) -> None:
        """Raise the error that kept this rank from sending an object; the other ranks have it."""
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

    def on_all(self, get: Callable[[], object], failed: str, hint: str = "") -> list[Any]:
        """Return the results of `get` on all ranks; if one raises an error, raise on all ranks.

        Args:
            get: Called here, before the ranks compare their results.
            failed: The meaning of a failure, for the error.
            hint: For the error.

        Raises:
            CollectiveError: It names the ranks, each with its reason.
        """
        with self._reporting():
            try:
                mine = get(), ""
            except Exception as error:
                # Otherwise the other ranks would wait for this rank.
                mine = None, reason_of(error) if isinstance(error, OSError) else repr(error)
        results = self.loads_all(self.all_gather(self.pack(lambda: mine)))
        reasons = {rank: why for rank, (_, why) in enumerate(results) if why}
        if reasons:
            ranks = self._group.ranks
            texts = ", ".join(f"rank {ranks[rank]}: {why}" for rank, why in reasons.items())
            raise CollectiveError(
                f"{self}: {failed} on {texts}",
                context=replace(self.context(0), peers=tuple(ranks[rank] for rank in reasons)),
                hint=hint,
            )
        return [result for result, _ in results]

    def arriving(self, first: Any, source: int) -> Packet:
        """Return the packet that begins with a rank's first message, which has arrived."""
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
        """Return the context of an error that rank `source` of the group has caused."""
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
        """Return the packets of all ranks on `root`, an empty list elsewhere."""
        packets = self._gather_first(mine, root)
        if self._group.rank() != root:
            self.wait(self.send_parts(mine, root))
        for peer, packet in enumerate(packets):
            if peer != root:
                self.recv_parts(packet, peer)
        return packets

    @on_host
    def scatter(self, packets: list[Packet] | None, root: int) -> Packet:
        """Return root's packet for this rank."""
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
        """Return packets with the first message of each rank, on root or (None) on all ranks."""
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
        """Start sending the parts of a packet that follow `first`."""
        parts = [packet.rest] if packet.rest.size else []
        return [self.send(part, peer, packet.tag) for part in [*parts, *packet.large]]

    def recv_parts(self, packet: Packet, peer: int) -> None:
        """Receive the parts of a packet that follow `first`."""
        if packet.rest.size:
            self._group.recv(packet.rest, peer, packet.tag, timeout=self.remaining_s)
        packet.open_rest()
        for part in packet.large:
            self._group.recv(part, peer, packet.tag, timeout=self.remaining_s)

    @on_host
    def wait(self, works: list[Work]) -> None:
        """Wait until messages are sent."""
        for work in works:
            work.wait()
