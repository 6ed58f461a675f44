"""Calls for objects: pickled, and moved by unisono's calls for objects or as messages."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from functools import reduce as _fold
from typing import Any

import numpy as np

from unisono.adapters.mpi4py import collectives
from unisono.adapters.mpi4py.buffers import Bytes, bytes_of, memory_of, pickle, serializer
from unisono.adapters.mpi4py.collectives import _raw
from unisono.adapters.mpi4py.errors import (
    ANY_SOURCE,
    ANY_TAG,
    PROC_NULL,
    ROOT,
    fail,
)
from unisono.adapters.mpi4py.ops import SUM, Op
from unisono.adapters.mpi4py.requests import Ongoing
from unisono.core.c10d.collectives import all_gather_into_tensor as _all_gather
from unisono.core.c10d.objects import functions as objects

# ---- messages of objects ----


def sender(mode: str) -> Callable[..., Ongoing]:
    """Return the function that sends in a mode, that of the letter in the call's name."""

    def send(state: Any, obj: Any, dest: int, tag: int = 0) -> Ongoing:
        """Send an object."""
        call: Ongoing = state.send(bytes_of(obj), dest, tag, mode)
        return call

    return send


def recv(
    state: Any, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None
) -> Ongoing:
    """Receive an object; `buf` limits its bytes, or has their number."""
    if buf is not None and not state.is_async:
        warnings.warn("the buf argument is deprecated", UserWarning, stacklevel=3)
    call = _received(state, buf, source, tag)
    call.status = status
    return call


def _received(state: Any, buf: Any, source: int, tag: int) -> Ongoing:
    most = -1 if buf is None else buf if isinstance(buf, int) else len(memory_of(buf, True)[0])

    def take(call: Ongoing, data: Bytes) -> None:
        if 0 <= most < len(data):
            fail("ERR_TRUNCATE", f"{len(data)} bytes for {most}")
        call.value = pickle.loads(data) if len(data) else None

    call: Ongoing = state.recv(source, tag, take)
    return call


def sendrecv(
    state: Any,
    sendobj: Any,
    dest: int,
    sendtag: int = 0,
    recvbuf: Any = None,
    source: int = ANY_SOURCE,
    recvtag: int = ANY_TAG,
    status: Any = None,
) -> Ongoing:
    """Send and receive an object."""
    receive = partial(_received, state, recvbuf, source, recvtag)
    call: Ongoing = state.both(bytes_of(sendobj), dest, sendtag, receive, status)
    return call


# ---- collective calls of objects ----


def _folded(op: Any, values: Sequence[Any]) -> Ongoing:
    """Return the reduction, without a call of the handle for each pair."""
    return Ongoing.of(_fold(getattr(op.ob, "of_objects", op) if isinstance(op, Op) else op, values))


def _items(given: Any, count: int) -> list[Any]:
    items = [None] * count if given is None else list(given)
    if len(items) != count:
        raise ValueError(f"expecting {count} items, got {len(items)}")
    return items


def bcast(state: Any, obj: Any, root: int = 0) -> Ongoing:
    """Return the root's object."""
    collectives.check_root(state, root)
    if state.is_inter:
        to = dict.fromkeys(range(len(state.peers)), obj) if root == ROOT else {}
        found = _move_across(state, to, [root] if root >= 0 else [])
        return Ongoing.of(found[0] if found else None)
    box = [obj]
    state.locks.setdefault("bcast", threading.Lock())  # mpi4py's own modules look for it
    objects.broadcast_object_list(box, None, state.group, None, root, serializer=serializer())
    return Ongoing.of(box[0])


def gather(state: Any, sendobj: Any, root: int = 0) -> Ongoing:
    """Return all objects on the root."""
    collectives.check_root(state, root)
    if state.is_inter:
        if root == PROC_NULL:
            return Ongoing.of(None)
        is_root = root == ROOT
        sources = range(len(state.peers)) if is_root else ()
        found = _move_across(state, {} if is_root else {root: sendobj}, sources)
        return Ongoing.of(found if is_root else None)
    out = [None] * state.size if state.rank == root else None
    objects.gather_object(sendobj, out, None, state.group, root, serializer=serializer())
    return Ongoing.of(out)


def scatter(state: Any, sendobj: Sequence[Any] | None, root: int = 0) -> Ongoing:
    """Return one of the root's objects."""
    collectives.check_root(state, root)
    is_root = root == (ROOT if state.is_inter else state.rank)
    given = _items(sendobj, len(state.peers)) if is_root else None
    if state.is_inter:
        found = _move_across(state, dict(enumerate(given or ())), [root] if root >= 0 else [])
        return Ongoing.of(found[0] if found else None)
    out: list[Any] = [None]
    objects.scatter_object_list(*(out, given, None, state.group, root), serializer=serializer())
    return Ongoing.of(out[0])


def allgather(state: Any, sendobj: Any) -> Ongoing:
    """Return all objects, of an inter-communicator those of the other side."""
    if not state.is_inter:
        return Ongoing.of(gathered(state, sendobj))
    peers = range(len(state.peers))
    return Ongoing.of(_move_across(state, dict.fromkeys(peers, sendobj), peers))


def alltoall(state: Any, sendobj: Sequence[Any]) -> Ongoing:
    """Return one object of each rank."""
    given = _items(sendobj, len(state.peers))
    if state.is_inter:
        return Ongoing.of(_move_across(state, dict(enumerate(given)), range(len(given))))
    found = _moved(given, len(given), lambda ins, outs: state.group.all_to_all(outs, ins))
    return Ongoing.of(found)


def reduce(state: Any, sendobj: Any, op: Any = SUM, root: int = 0) -> Ongoing:
    """Return the reduction of all objects on the root."""
    if state.is_inter:
        call = gather(state, sendobj, root)
        call.value = _fold(op, call.value) if call.value else None
        return call
    collectives.check_root(state, root)
    found = objects.reduce_object(*(sendobj, op, None, state.group, root), serializer=serializer())
    return Ongoing.of(found)


def allreduce(state: Any, sendobj: Any, op: Any = SUM) -> Ongoing:
    """Return the reduction of all objects."""
    values = allgather(state, sendobj).value if state.is_inter else gathered(state, sendobj)
    return _folded(op, values)


def scan(state: Any, sendobj: Any, op: Any = SUM) -> Ongoing:
    """Return the reduction of the objects of the ranks up to this one."""
    return _folded(op, gathered(state, sendobj)[: state.rank + 1])


def exscan(state: Any, sendobj: Any, op: Any = SUM) -> Ongoing:
    """Return the reduction of the objects of the ranks before this one; None on rank 0."""
    before = gathered(state, sendobj)[: state.rank]
    return _folded(op, before) if before else Ongoing.of(None)


def neighbor_alltoall(state: Any, sendobj: Any) -> Ongoing:
    """Return one object of each neighbour."""
    sources, targets = (len(each) for each in state.topology.edges(state))
    given = _items(sendobj, targets)

    def move(ins: Sequence[Bytes], outs: Sequence[Bytes]) -> None:
        collectives._neighbors(state, [*map(_raw, ins)], [*map(_raw, outs)]).wait()

    return Ongoing.of(_moved(given, sources, move))


def neighbor_allgather(state: Any, sendobj: Any) -> Ongoing:
    """Return the neighbours' objects."""
    return neighbor_alltoall(state, [sendobj] * len(state.topology.edges(state)[1]))


# Bytes of an object that goes with its size in one call.
_SHORT = 248


def gathered(state: Any, obj: Any) -> list[Any]:
    """Return the objects of all ranks: in one call of the engine if all are short."""
    if "rows" not in state.__dict__:
        state.rows = np.zeros((state.size, 8 + _SHORT), np.uint8)
        state.row = np.zeros(8 + _SHORT, np.uint8)
        state.lengths = state.rows[:, :8].view(np.int64)[:, 0]
        state.memory = memoryview(state.row), memoryview(state.rows.reshape(-1))
    data, (row, memory) = pickle.dumps(obj), state.memory
    size = len(data)
    row[:8] = size.to_bytes(8, "little")
    if size <= _SHORT:
        row[8 : 8 + size] = data
    _all_gather(state.rows, state.row, state.group)
    lengths, at, loads = state.lengths.tolist(), 8, pickle.loads
    if max(lengths) <= _SHORT:
        found = []
        for n in lengths:
            found.append(loads(bytes(memory[at : at + n])))
            at += 8 + _SHORT
        return found
    outs = [np.empty(n, np.uint8) for n in lengths]
    state.group.all_gather(outs, np.frombuffer(data, np.uint8))
    return [pickle.loads(out) for out in outs]


def _moved(
    given: Sequence[Any], count: int, move: Callable[[list[Bytes], list[Bytes]], object]
) -> list[Any]:
    """Move objects, first their sizes; return those that come, None where none does."""
    packets = [bytes_of(each) for each in given]
    sizes = np.full((count, 1), -1)
    move([np.array([len(p)]).view(np.uint8) for p in packets], [*sizes.view(np.uint8)])
    outs = [np.empty(max(n, 0), np.uint8) for n in sizes[:, 0].tolist()]
    move(packets, outs)
    return [pickle.loads(out) if len(out) else None for out in outs]


def _move_across(state: Any, to: dict[int, Any], sources: Iterable[int]) -> list[Any]:
    """Send objects to ranks of the other side; return those that some of them send."""
    peers = list(sources)

    def move(ins: Sequence[Bytes], outs: Sequence[Bytes]) -> None:
        sends = {peer: [_raw(data)] for peer, data in zip(to, ins, strict=True)}
        recvs = {peer: [_raw(data)] for peer, data in zip(peers, outs, strict=True)}
        collectives.exchange(state, sends, recvs).wait()

    return _moved([*to.values()], len(peers), move)
