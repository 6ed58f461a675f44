"""Calls for objects: pickled, and moved by unisono's calls for objects or as messages."""

from __future__ import annotations

import pickle as _pickle
import threading
import warnings
from collections.abc import Sequence
from functools import partial
from functools import reduce as _fold
from typing import Any

import numpy as np

from unisono.adapters.mpi4py import collectives
from unisono.adapters.mpi4py.buffers import Bytes, memory_of
from unisono.adapters.mpi4py.errors import (
    ANY_SOURCE,
    ANY_TAG,
    PROC_NULL,
    ROOT,
    exception_of,
    fail,
    translated,
)
from unisono.adapters.mpi4py.handles import Status
from unisono.adapters.mpi4py.ops import SUM
from unisono.adapters.mpi4py.requests import Ongoing, Request
from unisono.core.c10d.collectives import all_gather_into_tensor as _all_gather
from unisono.core.c10d.objects import functions as objects
from unisono.errors import UnisonoError


class Pickle:
    """Makes bytes of objects."""

    PROTOCOL: int | None = _pickle.HIGHEST_PROTOCOL
    THRESHOLD = 1 << 18

    def __init__(self, dumps: Any = None, loads: Any = None, protocol: Any = None) -> None:
        self._dumps, self._loads = dumps or _pickle.dumps, loads or _pickle.loads
        self.PROTOCOL = protocol if dumps or protocol else _pickle.HIGHEST_PROTOCOL

    def dumps(self, obj: Any) -> bytes:
        """Return the bytes of an object."""
        protocol = () if self.PROTOCOL is None else (self.PROTOCOL,)
        made: bytes = self._dumps(obj, *protocol)
        return made

    def loads(self, data: Any) -> Any:
        """Return the object of bytes."""
        return self._loads(data)

    def dumps_oob(self, obj: Any) -> tuple[bytes, list[Any]]:
        """Return the bytes of an object, and its large buffers."""
        buffers: list[Any] = []

        def keep(buffer: Any) -> bool:
            raw = buffer.raw()
            if raw.nbytes >= self.THRESHOLD:
                buffers.append(raw)
                return False
            return True

        made: bytes = self._dumps(obj, max(self.PROTOCOL or 5, 5), buffer_callback=keep)
        return made, buffers

    def loads_oob(self, data: Any, buffers: Any) -> Any:
        """Return the object of bytes and buffers."""
        return self._loads(data, buffers=buffers)


pickle = Pickle()


class ProgramPickle:
    """The program's pickle, for unisono's calls for objects."""

    name = "mpi4py"

    def dumps(self, obj: Any) -> tuple[bytes, Sequence[memoryview]]:
        """Return the bytes of an object."""
        return pickle.dumps(obj), ()

    def loads(self, header: bytes, buffers: Sequence[Any]) -> Any:
        """Return the object of bytes."""
        return pickle.loads(header)


_own_serializer: Any = ProgramPickle()


def _serializer() -> Any:
    """Return the program's pickle if it has changed it; None: unisono's, which copies no array."""
    is_usual = pickle._dumps is _pickle.dumps and pickle._loads is _pickle.loads
    return None if is_usual and pickle.PROTOCOL == _pickle.HIGHEST_PROTOCOL else _own_serializer


def _bytes(obj: Any) -> Bytes:
    return np.frombuffer(pickle.dumps(obj), np.uint8)


def _take_object(call: Ongoing, data: Bytes) -> None:
    call.value = pickle.loads(data) if len(data) else None


class ObjectCalls:
    """The calls for objects of a communicator."""

    live: Any
    Barrier: Any

    # ---- messages of objects --------------------------------------------------------------

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object."""
        self.live.send(_bytes(obj), dest, tag).wait()

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object without waiting."""
        self.live.send(_bytes(obj), dest, tag, "b")

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object, and wait until it was received."""
        self.live.send(_bytes(obj), dest, tag, "s").wait()

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Start sending an object."""
        return Request.of(self.live.send(_bytes(obj), dest, tag))

    def ibsend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Start sending an object."""
        return Request.of(self.live.send(_bytes(obj), dest, tag, "b"))

    def issend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """As ssend, without waiting."""
        return Request.of(self.live.send(_bytes(obj), dest, tag, "s"))

    def _recv(self, buf: Any, source: int, tag: int, waits: bool) -> Ongoing:
        most = (
            None if buf is None else buf if isinstance(buf, int) else len(memory_of(buf, True)[0])
        )

        def take(call: Ongoing, data: Bytes) -> None:
            if most is not None and most >= 0 and len(data) > most:
                fail("ERR_TRUNCATE", f"{len(data)} bytes for {most}")
            _take_object(call, data)

        call: Ongoing = self.live.recv_any(source, tag, take, waits)
        return call

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Start receiving an object; `buf` limits its bytes, or has their number."""
        return Request.of(self._recv(buf, source, tag, False))

    def recv(
        self,
        buf: Any = None,
        source: int = ANY_SOURCE,
        tag: int = ANY_TAG,
        status: Status | None = None,
    ) -> Any:
        """Receive an object."""
        if buf is not None:
            warnings.warn("the buf argument is deprecated", UserWarning, stacklevel=2)
        call = self._recv(buf, source, tag, True)
        call.wait()
        if status is not None:
            status.set(*call.found)
        return call.value

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> Any:
        """Send and receive an object."""
        received = partial(self._recv, recvbuf, source, recvtag, True)
        call = self.live.both(_bytes(sendobj), dest, sendtag, received)
        return Request.of(call).wait(status)

    # ---- collective calls of objects ------------------------------------------------------

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.Barrier()

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the root's object."""
        state = self.live
        collectives.check_root(state, root)
        if state.is_inter:
            return _across(
                state,
                {root: None} if root >= 0 else {},
                obj if root == ROOT else None,
                root == ROOT,
            )
        box = [obj]
        # mpi4py's own modules look for it.
        state.__dict__.setdefault("locks", {}).setdefault("bcast", threading.Lock())
        with translated():
            objects.broadcast_object_list(
                box, None, state.group, None, root, serializer=_serializer()
            )
        return box[0]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return all objects on the root."""
        state = self.live
        collectives.check_root(state, root)
        if state.is_inter:
            return _gather_across(state, sendobj, root)
        out = [None] * state.size if state.rank == root else None
        with translated():
            objects.gather_object(sendobj, out, None, state.group, root, serializer=_serializer())
        return out

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Return one of the root's objects."""
        state = self.live
        collectives.check_root(state, root)
        if state.is_inter:
            return _scatter_across(state, sendobj, root)
        given: Any = None
        if state.rank == root:
            given = [None] * state.size if sendobj is None else list(sendobj)
            if len(given) != state.size:
                raise ValueError(f"expecting {state.size} items, got {len(given)}")
        out: list[Any] = [None]
        with translated():
            objects.scatter_object_list(
                *(out, given, None, state.group, root), serializer=_serializer()
            )
        return out[0]

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return all objects."""
        state = self.live
        if state.is_inter:
            return list(_all_across(state, [sendobj] * len(state.peers)))
        return _gathered(state, sendobj)

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Return one object of each rank."""
        state = self.live
        count = len(state.peers)
        given = [None] * count if sendobj is None else list(sendobj)
        if len(given) != count:
            raise ValueError(f"expecting {count} items, got {len(given)}")
        if state.is_inter:
            return list(_all_across(state, given))
        packets = [_bytes(each) for each in given]
        sizes, mine = np.empty(count, np.int64), np.array([len(p) for p in packets], np.int64)
        with translated():
            state.group.all_to_all_single(sizes, mine)
            outs = [np.empty(n, np.uint8) for n in sizes]
            state.group.all_to_all(outs, packets)
        return [pickle.loads(out) for out in outs]

    def reduce(self, sendobj: Any, op: Any = SUM, root: int = 0) -> Any:
        """Return the reduction of all objects on the root."""
        state = self.live
        collectives.check_root(state, root)
        if state.is_inter:
            found = _gather_across(state, sendobj, root)
            return _fold(op, found) if found else None
        with translated():
            return objects.reduce_object(
                *(sendobj, op, None, state.group, root), serializer=_serializer()
            )

    def allreduce(self, sendobj: Any, op: Any = SUM) -> Any:
        """Return the reduction of all objects."""
        state = self.live
        if state.is_inter:
            return _fold(op, _all_across(state, [sendobj] * len(state.peers)))
        return _fold(op, _gathered(state, sendobj))


# Bytes of an object that goes with its size in one call.
_SHORT = 248


def _gathered(state: Any, obj: Any) -> list[Any]:
    """Return the objects of all ranks: in one call of the engine if all are short."""
    if "rows" not in state.__dict__:
        state.rows = np.zeros((state.size, 8 + _SHORT), np.uint8)
        state.row = np.zeros(8 + _SHORT, np.uint8)
        state.lengths = state.rows[:, :8].view(np.int64)
    data = pickle.dumps(obj)
    size, row = len(data), memoryview(state.row)
    row[:8] = size.to_bytes(8, "little")
    if size <= _SHORT:
        row[8 : 8 + size] = data
    try:
        _all_gather(state.rows, state.row, state.group)
        lengths = state.lengths[:, 0].tolist()
        if max(lengths) <= _SHORT:
            return [pickle.loads(bytes(state.rows[r, 8 : 8 + n])) for r, n in enumerate(lengths)]
        outs = [np.empty(n, np.uint8) for n in lengths]
        state.group.all_gather(outs, np.frombuffer(data, np.uint8))
    except UnisonoError as error:
        raise exception_of(error) from error
    return [pickle.loads(out) for out in outs]


def _all_across(state: Any, given: Sequence[Any]) -> Sequence[Any]:
    """Return what each rank of the other side has sent; this rank sends to each."""
    count = len(given)
    packets = [_bytes(each) for each in given]
    sizes = np.empty(count, np.int64)
    mine = np.array([len(p) for p in packets], np.int64)
    collectives.alltoall(state, mine, sizes).wait()
    outs = [np.empty(n, np.uint8) for n in sizes]
    raw = collectives._raw
    sends = {k: [raw(p)] for k, p in enumerate(packets)}
    collectives.exchange(state, sends, {k: [raw(o)] for k, o in enumerate(outs)}).wait()
    return [pickle.loads(out) for out in outs]


def _across(state: Any, sources: dict[int, Any], obj: Any, sends: bool) -> Any:
    """Send an object to all ranks of the other side, or receive it from one."""
    to = dict.fromkeys(range(len(state.peers)), obj) if sends else {}
    found = _move_across(state, to, list(sources))
    return found[0] if found else None


def _move_across(state: Any, to: dict[int, Any], sources: Sequence[int]) -> list[Any]:
    raw = collectives._raw
    packets = {peer: _bytes(obj) for peer, obj in to.items()}
    sizes = {peer: np.array([len(p)], np.int64).view(np.uint8) for peer, p in packets.items()}
    got = {peer: np.zeros(8, np.uint8) for peer in sources}
    collectives.exchange(
        state, {k: [raw(s)] for k, s in sizes.items()}, {k: [raw(g)] for k, g in got.items()}
    ).wait()
    outs = {k: np.empty(int(g.view(np.int64)[0]), np.uint8) for k, g in got.items()}
    collectives.exchange(
        state, {k: [raw(p)] for k, p in packets.items()}, {k: [raw(o)] for k, o in outs.items()}
    ).wait()
    return [pickle.loads(outs[k]) for k in sources]


def _gather_across(state: Any, obj: Any, root: int) -> list[Any] | None:
    if root == PROC_NULL:
        return None
    if root == ROOT:
        return _move_across(state, {}, range(len(state.peers)))
    _move_across(state, {root: obj}, ())
    return None


def _scatter_across(state: Any, given: Any, root: int) -> Any:
    if root == PROC_NULL:
        return None
    if root == ROOT:
        count = len(state.peers)
        values = [None] * count if given is None else list(given)
        if len(values) != count:
            raise ValueError(f"expecting {count} items, got {len(values)}")
        _move_across(state, dict(enumerate(values)), ())
        return None
    return _move_across(state, {}, [root])[0]
