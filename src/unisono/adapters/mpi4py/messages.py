"""Messages between two ranks of a communicator, and its state.

A message is bytes. Its dtype tells its mode: int8 asks for an answer when a receive has taken it
(`Ssend`), uint8 does not. A receive into memory posts uint8, so that the engine refuses a message
of int8 and drops its data. The receiver then asks the sender for them again.

Receives answer in the order in which they took the messages, so that the sender knows which message
an answer is about. An answer names the tag of the data that come again.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
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
    fail,
    require,
    translated,
)
from unisono.adapters.mpi4py.handles import Described, default_group
from unisono.adapters.mpi4py.packing import Run, simple
from unisono.adapters.mpi4py.requests import Both, Ongoing
from unisono.core.base.types import code_of, dtype_named
from unisono.core.c10d.new_groups import _make_group, _Settings
from unisono.core.c10d.p2p import send as _send
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import current
from unisono.core.operations.work import Work
from unisono.core.transports.messages import ANY_TAG as ANY
from unisono.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerLostError

_SYNC = code_of(dtype_named("int8"))
_ABSENT = LookupError("no message has come")
_NOTHING: tuple[int, int, int] = (PROC_NULL, ANY_TAG, 0)
_agains = itertools.count(1, 2)  # tags of data that come again; those of answers are even


class _Started(dict["Receipt", None]):
    """Receives that have not been taken, oldest first, and locks; the state `now` shares them."""

    def __init__(self) -> None:
        super().__init__()
        self.posting, self.taking = threading.Lock(), threading.RLock()


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
        self.started = _Started()
        self.is_async = True
        self.locks: dict[Any, threading.Lock] = {}  # of mpi4py's own modules

    @functools.cached_property
    def key(self) -> int:
        """What tells its answers from those of other communicators."""
        digest = hashlib.blake2b(self.channel.key.encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") >> 1 << 30

    @functools.cached_property
    def services(self) -> ProcessGroup:
        """The group that carries answers, for all communicators of the world."""
        return _kept_group("MPI services")

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
        services, to, key = self.services, self.channel.ranks[peer], self.key | tag
        answer = np.zeros(1, np.int64)
        with self.started.posting:  # the answers come in the order of the messages
            answered = services.recv(answer, to, key << 1, async_op=True)
            sent = self.channel.send(data.view(np.int8), peer, tag, async_op=True)

        lock, sent_again = threading.Lock(), []

        def again() -> None:
            with lock:
                if answered.is_success() and answer[0]:
                    sent_again.append(services.send(data, to, int(answer[0]), async_op=True))
                    answer[0] = 0

        def end(call: Ongoing) -> list[Work] | None:
            raise_first(call.works)
            again()
            return [sent_again.pop()] if sent_again else None

        # The receiver waits for the data while this program may do something else.
        answered.on_end(again)
        call = Ongoing([sent, answered], end)
        call.is_own = to == services.rank()
        return call

    # ---- receive --------------------------------------------------------------------------

    def _from(self, source: int) -> int | None:
        if source == ANY_SOURCE:
            # Nobody but this rank can send; the engine would say that the others have left.
            return self.peers[0] if len(self.peers) == 1 else None
        return self.peers[source]

    def recv(self, part: Run, source: int, tag: int) -> Ongoing:
        """Start receiving into memory."""
        self.check(source, tag, receives=True)
        if source == PROC_NULL or self.rehearses:
            return _from_nowhere()
        into = part.pack()
        return self._began(
            source,
            tag,
            functools.partial(self.channel.recv, into, _partial=True),
            lambda work: Receipt(self, work, into, part.store),
        )

    def recv_any(self, source: int, tag: int, take: Callable[[Ongoing, Bytes], None]) -> Ongoing:
        """Start receiving a message of any size; `take` gets its bytes at the end."""
        self.check(source, tag, receives=True)
        if source == PROC_NULL or self.rehearses:
            return _from_nowhere()

        def make(work: Work) -> Receipt:
            call = Receipt(self, work, None, lambda data: take(call, data))
            return call

        return self._began(source, tag, self.channel.recv_array, make)

    def _began(
        self, source: int, tag: int, start: Callable[..., Any], make: Callable[[Work], Receipt]
    ) -> Receipt:
        peer, wanted = self._from(source), ANY if tag == ANY_TAG else tag
        with translated(), self.started.posting:
            call = make(start(peer, wanted, async_op=True))
            call.asked = None if peer is None else self.channel.ranks[peer], wanted
            self.started[call] = None
        if self.is_async:
            # The sender may wait for the answer while this program does something else.
            call.works[0].on_end(call.take)
        return call

    def answer(self, source: int, tag: int, again: int) -> None:
        """Tell the sender of a synchronous message that a receive has taken it.

        Args:
            source: The sender.
            tag: Of the message.
            again: Tag for its data, which are to come again; 0 if they need not.
        """
        key = (self.key | tag) << 1
        self.services.send(np.array([again], np.int64), source, key, async_op=True)

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
            call = Both(received, self.send(data, dest, tag, "i"))
            call.status = status
            return call
        except BaseException:
            received.cancel()
            raise

    def probe(self, source: int, tag: int, waits: bool) -> tuple[int, int, int] | None:
        """Return source, tag and bytes of a message, or None if none has come."""
        self.check(source, tag, receives=True)
        if source == PROC_NULL:
            return _NOTHING
        wanted = ANY if tag == ANY_TAG else tag
        with translated():
            work = self.channel.probe(self._from(source), wanted, async_op=not waits)
            if not waits and not work.is_completed():
                # With an error of its own: a time-out asks the other ranks what they do.
                pending: Any = work._pending
                pending._comm.transport.messages.cancel(pending, _ABSENT)
                work.cancel()
                if not work.is_success():
                    return None
            if not waits and isinstance(work.exception(), PeerLostError):
                # A rank that has freed the communicator sends nothing more; a receive says so.
                return None
            raise_first([work])
        found = work.result()[0]
        return self.place[found.source], found.tag, found.nbytes


def _kept_group(name: str) -> ProcessGroup:
    """Return the group of a name, of all ranks or of this one; no rank waits for another."""
    default, kept = default_group(), current().kept
    with kept.setdefault("MPI lock", threading.RLock()):
        if name not in kept:
            ranks = default.ranks if name == "MPI services" else (default.ranks[default.rank()],)
            settings = _Settings(None, None, None, name)
            kept[name] = _make_group(default, tuple(ranks), name.replace(" ", "/"), settings)
        return cast("ProcessGroup", kept[name])


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
                state = CommState(_kept_group("MPI self") if alone else world)
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
        store: Gets the bytes that were received.
    """

    def __init__(
        self, state: CommState, work: Work, into: Bytes | None, store: Callable[[Bytes], None]
    ) -> None:
        super().__init__([work], self._end)
        self._state, self._into, self._store = state, into, store
        self._work = work
        self.asked: tuple[int | None, int] = None, ANY
        self.is_taken = False
        # Of a synchronous message that has to come again.
        self._again: tuple[Work, Bytes] | None = None

    def take(self) -> Work | None:
        """Answer a synchronous message, once; return what has to end before, or None.

        Called on the thread that ends the receive, and later if it could not answer there.
        """
        if self._work.is_completed():
            with self._state.started.taking:
                if not self.is_taken:
                    found = self._synchronous()
                    if found is not None and (earlier := self._earlier(*found)) is not None:
                        earlier.on_end(self.take)
                        return earlier
                    self._take(found)
        return None

    def _synchronous(self) -> tuple[int, int] | None:
        """Return source and tag of a synchronous message."""
        work = self._work
        if self._into is None:
            if work.is_success() and work.result()[0].dtype == np.int8:
                return work.source_rank(), work.tag()
        elif isinstance(work.exception(), CollectiveMismatchError):
            pending: Any = work._pending
            if pending.info & ~(1 << 31) == _SYNC:
                return pending.peer, pending.tag[1]
        return None

    def _earlier(self, source: int, tag: int) -> Work | None:
        """Return a receive that took an earlier such message, and whose end is not known yet."""
        for earlier in list(self._state.started):
            if earlier is self:
                break
            earlier.take()
            of, with_tag = earlier.asked
            if not earlier.is_taken and of in (None, source) and with_tag in (ANY, tag):
                return earlier._work
        return None

    def _take(self, found: tuple[int, int] | None) -> None:
        state = self._state
        self.is_taken = True
        state.started.pop(self, None)
        if found is None:
            return
        (source, tag), again = found, 0
        if self._into is not None:
            pending: Any = self._work._pending
            size, again = pending.nbytes, next(_agains)
            data = self._into[:size] if size <= len(self._into) else np.empty(size, np.uint8)
            self._again = state.services.recv(data, source, again, async_op=True), data
            self.found = state.place[source], tag, size
        state.answer(source, tag, again)

    def cancel(self) -> None:
        """End a receive that has taken no message."""
        if not self.test():
            self._work.cancel()
            if isinstance(self._work.exception(), CollectiveTimeoutError):
                self.take()
                self.is_done = self.is_cancelled = True

    def _end(self, call: Ongoing) -> list[Work] | None:
        if (earlier := self.take()) is not None:
            return [earlier]
        work, into = self._work, self._into
        if self._again is not None:
            work, data = self._again
            if work is not self.works[0]:
                return [work]
            raise_first([work])
            if into is not None and len(data) > len(into):
                fail("ERR_TRUNCATE", f"{len(data)} bytes for {len(into)}")
        else:
            raise_first([work])
            data = work.result()[0].view(np.uint8) if into is None else into[: work._received()]
            self.found = self._state.place[work.source_rank()], work.tag(), len(data)
        self._store(data)
        return None


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
    call = state.recv(simple(buf, True, source), source, tag)
    call.status = status
    return call


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
    return state.both(data, dest, sendtag, lambda: state.recv(part, source, recvtag), status)


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
    return state.both(data, dest, sendtag, lambda: state.recv(part, source, recvtag), status)


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
