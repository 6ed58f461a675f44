"""Messages between two ranks of a communicator, and its state.

A message is bytes. Its dtype tells its mode: int8 asks for an answer when a receive has taken it
(`Ssend`), uint8 does not. A receive takes both, and its answer has a tag that no receive of the
program takes. Messages with one tag are taken in their order, so that the sender need not know
which of them an answer is about.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import numpy as np

from unisono.adapters.mpi4py.buffers import Bytes
from unisono.adapters.mpi4py.errors import (
    ANY_SOURCE,
    ANY_TAG,
    ERR_LASTCODE,
    NUMBERS,
    PROC_NULL,
    TAG_UB_VALUE,
    require,
    translated,
)
from unisono.adapters.mpi4py.handles import Described, default_group
from unisono.adapters.mpi4py.packing import Run, simple
from unisono.adapters.mpi4py.requests import Ongoing
from unisono.core.base.types import PARTIAL, code_of, dtype_named
from unisono.core.c10d.new_groups import _make_group, _Settings
from unisono.core.c10d.p2p import send as _send
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import current
from unisono.core.operations.work import Work
from unisono.core.transports.messages import ANY_TAG as ANY
from unisono.errors import CollectiveTimeoutError, PeerLostError

_SYNC = code_of(dtype_named("int8"))
_ABSENT = LookupError("no message has come")
_NOTHING: tuple[int, int, int] = (PROC_NULL, ANY_TAG, 0)
_ANSWERS = 2**62 + 2**60
"""Added to a message's tag, of its answer: windows (from 2**62) do not come to these tags."""


class CommState(Described):
    """The object of a communicator.

    Attributes:
        group: Makes the collective calls.
        channel: Carries the messages; of an inter-communicator a group of both sides.
        peers: The ranks in the channel of those that messages go to.
        topology: Of a Cartesian grid or a graph.
    """

    rehearses = False

    def __init__(
        self, group: ProcessGroup, channel: ProcessGroup | None = None, peers: Sequence[int] = ()
    ) -> None:
        self.group, self.channel = group, channel or group
        self.is_inter = channel is not None
        self.peers = tuple(peers) if self.is_inter else tuple(range(group.size()))
        self.rank, self.size = group.rank(), group.size()
        super().__init__()
        self.topology: Any = None
        ranks = self.channel.ranks
        self.place = {ranks[peer]: place for place, peer in enumerate(self.peers)}
        self.turn = threading.RLock()  # `now` shares it
        self.is_async = True
        self.locks: dict[Any, threading.Lock] = {}  # of mpi4py's own modules

    @property
    def remote(self) -> tuple[int, ...]:
        """Global ranks of those that messages go to."""
        return tuple(self.channel.ranks[peer] for peer in self.peers)

    @functools.cached_property
    def now(self) -> Self:
        """The state for calls that wait: their thread moves the data."""
        made = copy.copy(self)
        made.is_async = False
        return made

    @functools.cached_property
    def rehearsal(self) -> Self:
        """The state that only checks the arguments of a call: its groups move nothing."""
        made = copy.copy(self)
        made.group = made.channel = _Still()  # type: ignore[assignment]
        made.rehearses = True
        return made

    def close(self) -> None:
        """End the groups."""
        for group in {id(g): g for g in (self.group, self.channel)}.values():
            if group.backends:
                destroy(group)

    # ---- send -----------------------------------------------------------------------------

    def check(self, peer: int, tag: int, receives: bool = False) -> None:
        """Check a rank and a tag."""
        low = ANY_SOURCE if receives else 0
        ok = 0 <= peer < len(self.peers) or peer == PROC_NULL or (receives and peer == low)
        require(ok, "ERR_RANK", f"rank {peer} is not in 0..{len(self.peers) - 1}")
        ok = 0 <= tag <= TAG_UB_VALUE or (receives and tag == ANY_TAG)
        require(ok, "ERR_TAG", f"tag {tag} is not in 0..{TAG_UB_VALUE}")

    def send(self, data: Bytes, dest: int, tag: int, mode: str = "") -> Ongoing:
        """Send; the mode is the letter in the call's name: b, s, or i, which does not wait."""
        self.check(dest, tag)
        if dest == PROC_NULL or self.rehearses:
            return Ongoing()
        with translated():
            peer = self.peers[dest]
            if not mode and not self.is_async and (self.is_inter or dest != self.rank):
                _send(data, None, self.channel, tag, peer)
                return Ongoing()
            if mode == "s":
                return self._send_synchronously(data, peer, tag)
            if mode == "b":
                data = data.copy()
            work = self.channel.send(data, peer, tag, async_op=True)
        return Ongoing() if mode == "b" else Ongoing([work])

    def _send_synchronously(self, data: Bytes, peer: int, tag: int) -> Ongoing:
        nothing = np.empty(0, np.uint8)
        with self.turn:  # the answers come in the order of the messages
            answered = self.channel.recv(nothing, peer, _ANSWERS + tag, async_op=True)
            sent = self.channel.send(data.view(np.int8), peer, tag, async_op=True)
        call = Ongoing([sent, answered])
        call.is_own = not self.is_inter and peer == self.rank
        return call

    # ---- receive --------------------------------------------------------------------------

    def _from(self, source: int) -> int | None:
        if source == ANY_SOURCE:
            # Nobody but this rank can send; the engine would say that the others have left.
            return self.peers[0] if len(self.peers) == 1 else None
        return self.peers[source]

    def recv(
        self,
        source: int,
        tag: int,
        take: Callable[[Ongoing, Bytes], object],
        part: Run | None = None,
    ) -> Ongoing:
        """Start receiving into memory, or a message of any size; `take` gets its bytes."""
        self.check(source, tag, receives=True)
        if source == PROC_NULL or self.rehearses:
            return _from_nowhere()
        place = self._from(source), ANY if tag == ANY_TAG else tag
        with translated():
            if part is None:
                into, work = None, self.channel.recv_array(*place, async_op=True)
            else:
                into = part.pack()
                work = self.channel.recv(into, *place, async_op=True, _partial="raw")
        call = Receipt(self, work, into, take)
        if self.is_async:
            # The sender may wait for the answer while this program does something else.
            work.on_end(call.answer)
        return call

    def both(
        self,
        data: Bytes,
        dest: int,
        tag: int,
        receive: Callable[[], Ongoing],
        status: Any = None,
    ) -> Ongoing:
        """Start a receive and a send; of a send that is refused no receive stays."""
        self.check(dest, tag)
        received = receive()
        try:
            received.works += self.send(data, dest, tag, "i").works
        except BaseException:
            received.cancel()
            raise
        received.status = status
        return received

    def probe(self, source: int, tag: int, waits: bool) -> tuple[int, int, int] | None:
        """Return source, tag and bytes of a message, or None if none has come."""
        self.check(source, tag, receives=True)
        if source == PROC_NULL:
            return _NOTHING
        wanted = ANY if tag == ANY_TAG else tag
        with translated():
            work = self.channel.probe(self._from(source), wanted, async_op=not waits)
            if not waits and is_absent(work):
                return None
            raise_first([work])
        found = work.result()[0]
        return self.place[found.source], found.tag, found.nbytes


def _own_group() -> ProcessGroup:
    """Return the group of this rank alone."""
    default = default_group()
    settings = _Settings(None, None, None, "MPI self")
    return _make_group(default, (default.ranks[default.rank()],), "MPI/self", settings)


class Predefined:
    """The object of COMM_WORLD or COMM_SELF: at each use that of the calling thread's world."""

    # A program may compare, copy and keep the handles when the world does not exist yet.
    is_inter, topology = False, None

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.find(), name)

    def find(self) -> CommState:
        """Return the communicator's state in this world."""
        found: CommState | None = current().kept.get(self.name)  # it ends with the world's groups
        return self._make() if found is None else found

    def _make(self) -> CommState:
        world, kept = default_group(), current().kept
        with kept.setdefault("MPI lock", threading.RLock()):
            if self.name not in kept:
                alone = self.name == "MPI_COMM_SELF"
                state = CommState(_own_group() if alone else world)
                state.name = self.name
                state.attributes |= {
                    NUMBERS["TAG_UB"]: TAG_UB_VALUE,
                    NUMBERS["IO"]: ANY_SOURCE,
                    NUMBERS["WTIME_IS_GLOBAL"]: 0,
                    NUMBERS["UNIVERSE_SIZE"]: world.size(),
                    NUMBERS["LASTUSEDCODE"]: ERR_LASTCODE,
                }
                kept[self.name] = state
            return cast("CommState", kept[self.name])


class _Still:
    """A group whose calls do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **how: None


class Receipt(Ongoing):
    """A receive.

    Args:
        state: Of the communicator.
        work: The engine's receive.
        into: The memory; None: the engine makes it.
        take: Gets the bytes that were received.
    """

    is_answered = False

    def __init__(
        self,
        state: CommState,
        work: Work,
        into: Bytes | None,
        take: Callable[[Ongoing, Bytes], object],
    ) -> None:
        super().__init__([work], self._end)
        self._state, self._work, self._into, self._take = state, work, into, take

    def answer(self) -> None:
        """Tell the sender of a synchronous message, once, that this receive has taken it."""
        state, message = self._state, cast("Any", self._work._pending)
        with state.turn:  # a second thread waits until the answer is sent
            if message.info & ~PARTIAL == _SYNC and not self.is_answered:
                self.is_answered = True
                to, tag = state.peers[state.place[message.peer]], _ANSWERS + message.tag[1]
                state.channel.send(np.empty(0, np.uint8), to, tag, async_op=True)

    def cancel(self) -> None:
        """End a receive that has taken no message."""
        if not self.test():
            self._work.cancel()
            self.is_done = self.is_cancelled = isinstance(
                self._work.exception(), CollectiveTimeoutError
            )

    def _end(self, call: Ongoing) -> None:
        self.answer()
        work, into = self._work, self._into
        raise_first(call.works)
        data = work.result()[0].view(np.uint8) if into is None else into[: work._received()]
        self.found = self._state.place[work.source_rank()], work.tag(), len(data)
        self._take(call, data)


def is_absent(work: Work) -> bool:
    """Return whether there is no message for a receive or probe, which is then no more."""
    if work.is_completed():
        # A rank that has freed the communicator sends nothing more; a receive says so.
        return isinstance(work.exception(), PeerLostError)
    # With an error of its own: a time-out asks the other ranks what they do.
    pending: Any = work._pending
    pending._comm.transport.messages.cancel(pending, _ABSENT)
    work.cancel()
    return not work.is_success()


# ---- the calls for arrays ----


def sender(mode: str) -> Callable[..., Ongoing]:
    """Return the function that sends in a mode, that of the letter in the call's name."""

    def send(state: CommState, buf: Any, dest: int, tag: int = 0) -> Ongoing:
        """Send an array."""
        return state.send(simple(buf, False, dest).pack(), dest, tag, mode)

    return send


def recv(
    state: CommState,
    buf: Any,
    source: int = ANY_SOURCE,
    tag: int = ANY_TAG,
    status: Any = None,
) -> Ongoing:
    """Receive into an array."""
    call = _received(state, simple(buf, True, source), source, tag)
    call.status = status
    return call


def _received(state: CommState, part: Run, source: int, tag: int) -> Ongoing:
    return state.recv(source, tag, lambda call, data: part.store(data), part)


def sendrecv(
    state: CommState,
    sendbuf: Any,
    dest: int,
    sendtag: int = 0,
    recvbuf: Any = None,
    source: int = ANY_SOURCE,
    recvtag: int = ANY_TAG,
    status: Any = None,
) -> Ongoing:
    """Send and receive."""
    data, part = simple(sendbuf, False, dest).pack(), simple(recvbuf, True, source)
    return state.both(data, dest, sendtag, lambda: _received(state, part, source, recvtag), status)


def sendrecv_replace(
    state: CommState,
    buf: Any,
    dest: int,
    sendtag: int = 0,
    source: int = ANY_SOURCE,
    recvtag: int = ANY_TAG,
    status: Any = None,
) -> Ongoing:
    """Send an array, and receive into it."""
    data, part = simple(buf, False, dest).pack().copy(), simple(buf, True, source)
    return state.both(data, dest, sendtag, lambda: _received(state, part, source, recvtag), status)


def _from_nowhere() -> Ongoing:
    call = Ongoing()
    call.found = _NOTHING
    return call


def raise_first(works: Sequence[Work]) -> None:
    """Raise the first error of works that have ended."""
    for work in works:
        if (error := work.exception()) is not None:
            raise error


def destroy(group: ProcessGroup) -> None:
    """End a group."""
    from unisono.core.c10d.lifecycle import destroy_process_group

    destroy_process_group(group)
