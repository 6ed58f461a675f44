"""Collective calls on arrays: each returns an `Ongoing`, for its three forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from unisono.adapters.mpi4py.buffers import IN_PLACE, Bytes
from unisono.adapters.mpi4py.errors import PROC_NULL, ROOT, require
from unisono.adapters.mpi4py.messages import CommState, raise_first
from unisono.adapters.mpi4py.packing import Run, simple, vector, vector_w
from unisono.adapters.mpi4py.requests import Ongoing
from unisono.core.operations.work import Work

Parse = Callable[[Any, bool, int], "list[Run]"]


def _is_in_place(message: Any) -> bool:
    return message is None or message is IN_PLACE


def _blocks(message: Any, writes: bool, blocks: int) -> list[Run]:
    """Return the equal blocks of a message for all ranks."""
    one = simple(message, writes, blocks=blocks)
    return [one.slice(k * one.count, one.count) for k in range(blocks)]


def _call(works: Sequence[Work], finish: Callable[[], object] | None = None) -> Ongoing:
    def end(call: Ongoing) -> None:
        raise_first(call.works)
        if finish is not None:
            finish()

    return Ongoing(works, end)


def _store(parts: Sequence[Run], data: Sequence[Bytes]) -> Callable[[], None] | None:
    """Return what writes received data to where it belongs, if it is not there."""
    if all(part.is_plain for part in parts):
        return None

    def store() -> None:
        for part, each in zip(parts, data, strict=True):
            part.store(each)

    return store


def check_root(state: CommState, root: int) -> None:
    """Check a root."""
    if not state.is_inter:
        require(0 <= root < state.size, "ERR_ROOT", f"root {root} is not in 0..{state.size - 1}")
    else:
        ok = root in (ROOT, PROC_NULL) or 0 <= root < len(state.peers)
        require(ok, "ERR_ROOT", f"root {root}")


def barrier(state: CommState) -> Ongoing:
    """All ranks have come."""
    if state.is_inter:
        return _call([state.channel.barrier(async_op=state.is_async)])
    return _call([state.group.barrier(async_op=state.is_async)])


def bcast(state: CommState, buf: Any, root: int = 0) -> Ongoing:
    """Copy the root's data to all ranks."""
    check_root(state, root)
    if state.is_inter:
        if root == PROC_NULL:
            return Ongoing()
        part = simple(buf, root != ROOT)
        sends = {peer: [part] for peer in range(len(state.peers))} if root == ROOT else {}
        return exchange(state, sends, {} if root == ROOT else {root: [part]})
    part = simple(buf, state.rank != root)
    data = part.pack()
    work = state.group.broadcast(data, root, async_op=state.is_async)
    return _call([work], _store([part], [data]) if state.rank != root else None)


def exchange(state: Any, sends: dict[int, list[Run]], recvs: dict[int, list[Run]]) -> Ongoing:
    """Messages inside a collective call of an inter-communicator, by rank of the other side."""
    if state.rehearses:
        return Ongoing()
    # Not a tag of the program; with the number of the call, of which another's data may be late.
    tag = (1 << 40) + state.calls[0]
    works, stores = [], []
    for peer, parts in recvs.items():
        for part in parts:
            data = part.pack()
            stores.append((part, data))
            at = state.peers[peer]
            works.append(state.inner.recv(data, at, tag, async_op=True))
    for peer, parts in sends.items():
        for part in parts:
            at = state.peers[peer]
            works.append(state.inner.send(part.pack(), at, tag, async_op=True))
    return _call(works, _store([p for p, _ in stores], [d for _, d in stores]))


def counted(function: Callable[..., Ongoing]) -> Callable[..., Ongoing]:
    """Return the call of an inter-communicator that counts itself, also if it is refused then."""

    def call(state: Any, *arguments: Any, **how: Any) -> Ongoing:
        state.calls[0] += 1
        return function(state, *arguments, **how)

    call.__doc__ = getattr(function, "func", function).__doc__
    setattr(call, "__wrapped__", function)  # noqa: B010  its signature
    return call


def gather(
    state: CommState, sendbuf: Any, recvbuf: Any, root: int = 0, parse: Parse = _blocks
) -> Ongoing:
    """All ranks' data on the root."""
    check_root(state, root)
    if state.is_inter:
        if root == PROC_NULL:
            return Ongoing()
        if root != ROOT:
            return exchange(state, {root: [simple(sendbuf, False)]}, {})
        parts = parse(recvbuf, True, len(state.peers))
        return exchange(state, {}, {peer: [part] for peer, part in enumerate(parts)})
    is_root = state.rank == root
    parts = parse(recvbuf, True, state.size) if is_root else []
    outputs = [part.pack() for part in parts]
    is_in_place = is_root and _is_in_place(sendbuf)
    mine = outputs[root].copy() if is_in_place else simple(sendbuf, False).pack()
    work = state.group.gather(mine, outputs if is_root else None, root, async_op=state.is_async)
    return _call([work], _store(parts, outputs))


def scatter(
    state: CommState, sendbuf: Any, recvbuf: Any, root: int = 0, parse: Parse = _blocks
) -> Ongoing:
    """Move a part of the root's data on each rank."""
    check_root(state, root)
    if state.is_inter:
        if root == PROC_NULL:
            return Ongoing()
        if root != ROOT:
            return exchange(state, {}, {root: [simple(recvbuf, True)]})
        parts = parse(sendbuf, False, len(state.peers))
        return exchange(state, {peer: [part] for peer, part in enumerate(parts)}, {})
    inputs = None
    if state.rank == root:
        inputs = [part.pack() for part in parse(sendbuf, False, state.size)]
    if inputs is not None and _is_in_place(recvbuf):
        output = inputs[root].copy()
        return _call([state.group.scatter(output, inputs, root, async_op=state.is_async)])
    part = simple(recvbuf, True)
    output = part.pack()
    work = state.group.scatter(output, inputs, root, async_op=state.is_async)
    return _call([work], _store([part], [output]))


def allgather(state: CommState, sendbuf: Any, recvbuf: Any, parse: Parse = _blocks) -> Ongoing:
    """All ranks' data on all ranks."""
    if state.is_inter:
        parts = parse(recvbuf, True, len(state.peers))
        mine = simple(sendbuf, False)
        sends = {peer: [mine] for peer in range(len(state.peers))}
        return exchange(state, sends, {peer: [part] for peer, part in enumerate(parts)})
    parts = parse(recvbuf, True, state.size)
    outputs = [part.pack() for part in parts]
    is_in_place = _is_in_place(sendbuf)
    data = outputs[state.rank].copy() if is_in_place else simple(sendbuf, False).pack()
    return _call(
        [state.group.all_gather(outputs, data, async_op=state.is_async)], _store(parts, outputs)
    )


def alltoall(state: CommState, sendbuf: Any, recvbuf: Any, parse: Parse = _blocks) -> Ongoing:
    """Move a part of each rank's data on each rank."""
    if state.is_inter:
        outs, ins = (parse(b, w, len(state.peers)) for b, w in ((recvbuf, True), (sendbuf, False)))
        sends = {peer: [part] for peer, part in enumerate(ins)}
        return exchange(state, sends, {peer: [part] for peer, part in enumerate(outs)})
    parts = parse(recvbuf, True, state.size)
    outputs = [part.pack() for part in parts]
    if _is_in_place(sendbuf):
        inputs = [each.copy() for each in outputs]
    else:
        inputs = [part.pack() for part in parse(sendbuf, False, state.size)]
    return _call(
        [state.group.all_to_all(outputs, inputs, async_op=state.is_async)], _store(parts, outputs)
    )


def _raw(data: Bytes) -> Run:
    from unisono.adapters.mpi4py.datatypes import named

    return Run(data, 0, len(data), named["BYTE"].ob)


def _neighbors(state: CommState, ins: list[Run], outs: list[Run]) -> Ongoing:
    links = state.topology.links
    used_in, used_out = links.linked
    inputs, parts = [ins[k].pack() for k in used_in], [outs[k] for k in used_out]
    outputs = [part.pack() for part in parts]
    work = state.group.neighbor_all_to_all(outputs, inputs, links, async_op=state.is_async)
    return _call([work], _store(parts, outputs))


def neighbor_allgather(
    state: CommState, sendbuf: Any, recvbuf: Any, parse: Parse = _blocks
) -> Ongoing:
    """Each rank's data on its neighbours."""
    sources, targets = (len(each) for each in state.topology.edges(state))
    mine = simple(sendbuf, False)
    return _neighbors(state, [mine] * targets, parse(recvbuf, True, sources))


def neighbor_alltoall(
    state: CommState, sendbuf: Any, recvbuf: Any, parse: Parse = _blocks
) -> Ongoing:
    """Move a part of each rank's data on each neighbour."""
    sources, targets = (len(each) for each in state.topology.edges(state))
    return _neighbors(state, parse(sendbuf, False, targets), parse(recvbuf, True, sources))


# The same, with different sizes, and with different sizes and datatypes.
gatherv, scatterv = partial(gather, parse=vector), partial(scatter, parse=vector)
allgatherv, alltoallv = partial(allgather, parse=vector), partial(alltoall, parse=vector)
alltoallw = partial(alltoall, parse=vector_w)
neighbor_allgatherv = partial(neighbor_allgather, parse=vector)
neighbor_alltoallv = partial(neighbor_alltoall, parse=vector)
neighbor_alltoallw = partial(neighbor_alltoall, parse=vector_w)
