"""Collective calls on arrays: each returns an `Ongoing`, for its blocking, started and planned form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono.adapters.mpi4py.buffers import IN_PLACE, Bytes, Run, simple, vector, vector_w
from unisono.adapters.mpi4py.constants import PROC_NULL, ROOT
from unisono.adapters.mpi4py.errors import require
from unisono.adapters.mpi4py.messages import CommState, raise_first
from unisono.adapters.mpi4py.ops import SUM, Op
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


def exchange(state: CommState, sends: dict[int, list[Run]], recvs: dict[int, list[Run]]) -> Ongoing:
    """Messages inside a collective call of an inter-communicator, by rank of the other side."""
    number = state.group.counts["mpi"]
    state.group.counts["mpi"] += 1
    # Not a tag of the program.
    tag = 1 << 40 | number
    works, stores = [], []
    for peer, parts in recvs.items():
        for part in parts:
            data = part.target()
            stores.append((part, data))
            at = state.peers[peer]
            works.append(state.inner.recv(data, at, tag, async_op=True))
    for peer, parts in sends.items():
        for part in parts:
            at = state.peers[peer]
            works.append(state.inner.send(part.pack(), at, tag, async_op=True))
    return _call(works, _store([p for p, _ in stores], [d for _, d in stores]))


def _gather(state: CommState, parse: Parse, sendbuf: Any, recvbuf: Any, root: int) -> Ongoing:
    check_root(state, root)
    if state.is_inter:
        if root == PROC_NULL:
            return Ongoing()
        if root != ROOT:
            return exchange(state, {root: [simple(sendbuf, False)]}, {})
        parts = parse(recvbuf, True, len(state.peers))
        return exchange(state, {}, {peer: [part] for peer, part in enumerate(parts)})
    if state.rank != root:
        return _call(
            [state.group.gather(simple(sendbuf, False).pack(), None, root, async_op=state.is_async)]
        )
    parts = parse(recvbuf, True, state.size)
    outputs = [part.target() for part in parts]
    mine = outputs[root].copy() if _is_in_place(sendbuf) else simple(sendbuf, False).pack()
    work = state.group.gather(mine, outputs, root, async_op=state.is_async)
    return _call([work], _store(parts, outputs))


def gather(state: CommState, sendbuf: Any, recvbuf: Any, root: int = 0) -> Ongoing:
    """All ranks' data on the root."""
    return _gather(state, _blocks, sendbuf, recvbuf, root)


def gatherv(state: CommState, sendbuf: Any, recvbuf: Any, root: int = 0) -> Ongoing:
    """As gather, with different sizes."""
    return _gather(state, vector, sendbuf, recvbuf, root)


def _scatter(state: CommState, parse: Parse, sendbuf: Any, recvbuf: Any, root: int) -> Ongoing:
    check_root(state, root)
    if state.is_inter:
        if root == PROC_NULL:
            return Ongoing()
        if root != ROOT:
            return exchange(state, {}, {root: [simple(recvbuf, True)]})
        parts = parse(sendbuf, False, len(state.peers))
        return exchange(state, {peer: [part] for peer, part in enumerate(parts)}, {})
    if state.rank != root:
        part = simple(recvbuf, True)
        output = part.target()
        work = state.group.scatter(output, None, root, async_op=state.is_async)
        return _call([work], _store([part], [output]))
    inputs = [part.pack() for part in parse(sendbuf, False, state.size)]
    if _is_in_place(recvbuf):
        return _call(
            [state.group.scatter(inputs[root].copy(), inputs, root, async_op=state.is_async)]
        )
    part = simple(recvbuf, True)
    output = part.target()
    work = state.group.scatter(output, inputs, root, async_op=state.is_async)
    return _call([work], _store([part], [output]))


def scatter(state: CommState, sendbuf: Any, recvbuf: Any, root: int = 0) -> Ongoing:
    """Move a part of the root's data on each rank."""
    return _scatter(state, _blocks, sendbuf, recvbuf, root)


def scatterv(state: CommState, sendbuf: Any, recvbuf: Any, root: int = 0) -> Ongoing:
    """As scatter, with different sizes."""
    return _scatter(state, vector, sendbuf, recvbuf, root)


def _allgather(state: CommState, parse: Parse, sendbuf: Any, recvbuf: Any) -> Ongoing:
    if state.is_inter:
        parts = parse(recvbuf, True, len(state.peers))
        mine = simple(sendbuf, False)
        sends = {peer: [mine] for peer in range(len(state.peers))}
        return exchange(state, sends, {peer: [part] for peer, part in enumerate(parts)})
    parts = parse(recvbuf, True, state.size)
    outputs = [part.target() for part in parts]
    is_in_place = _is_in_place(sendbuf)
    data = outputs[state.rank].copy() if is_in_place else simple(sendbuf, False).pack()
    return _call(
        [state.group.all_gather(outputs, data, async_op=state.is_async)], _store(parts, outputs)
    )


def allgather(state: CommState, sendbuf: Any, recvbuf: Any) -> Ongoing:
    """All ranks' data on all ranks."""
    return _allgather(state, _blocks, sendbuf, recvbuf)


def allgatherv(state: CommState, sendbuf: Any, recvbuf: Any) -> Ongoing:
    """As allgather, with different sizes."""
    return _allgather(state, vector, sendbuf, recvbuf)


def _alltoall(state: CommState, parse: Parse, sendbuf: Any, recvbuf: Any) -> Ongoing:
    if state.is_inter:
        outs, ins = (parse(b, w, len(state.peers)) for b, w in ((recvbuf, True), (sendbuf, False)))
        sends = {peer: [part] for peer, part in enumerate(ins)}
        return exchange(state, sends, {peer: [part] for peer, part in enumerate(outs)})
    parts = parse(recvbuf, True, state.size)
    outputs = [part.target() for part in parts]
    if _is_in_place(sendbuf):
        inputs = [each.copy() for each in outputs]
    else:
        inputs = [part.pack() for part in parse(sendbuf, False, state.size)]
    return _call(
        [state.group.all_to_all(outputs, inputs, async_op=state.is_async)], _store(parts, outputs)
    )


def alltoall(state: CommState, sendbuf: Any, recvbuf: Any) -> Ongoing:
    """Move a part of each rank's data on each rank."""
    return _alltoall(state, _blocks, sendbuf, recvbuf)


def alltoallv(state: CommState, sendbuf: Any, recvbuf: Any) -> Ongoing:
    """As alltoall, with different sizes."""
    return _alltoall(state, vector, sendbuf, recvbuf)


def alltoallw(state: CommState, sendbuf: Any, recvbuf: Any) -> Ongoing:
    """As alltoall, with different sizes and datatypes."""
    return _alltoall(state, vector_w, sendbuf, recvbuf)


# ---- reductions -------------------------------------------------------------------------------


def _reduced(state: CommState, mine: Run, output: Run | None, op: Op, last: int) -> Ongoing:
    """Gather all ranks' data, and reduce that of the ranks before `last`, for `output`."""
    data = mine.pack()
    rows = np.empty((state.size, len(data)), np.uint8)
    work = state.group.all_gather_into_tensor(rows, data, async_op=state.is_async)
    reduction = op.live

    def finish() -> None:
        if output is None or last == 0 or not len(data):
            return
        result = reduction.fold(list(rows[:last]), mine)
        _put(output, result)

    return _call([work], finish)


def _put(output: Run, data: Bytes) -> None:
    if output.is_plain:
        output.pack()[:] = data
    else:
        output.store(data)


def _pair(sendbuf: Any, recvbuf: Any, blocks: int = 1) -> tuple[Run, Run]:
    """Return input and output of a reduction; both may be one memory."""
    output = simple(recvbuf, True, blocks=blocks)
    if _is_in_place(sendbuf):
        return output, output
    mine = simple(sendbuf, False, blocks=blocks)
    if mine.kind is not output.kind:
        raise ValueError("mismatch in send and receive MPI datatypes")
    if mine.count != output.count:
        raise ValueError(f"mismatch in send count {mine.count} and receive count {output.count}")
    return mine, output


def _kernel(state: CommState, op: Op, part: Run, name: str, *settings: Any, into: Run) -> Ongoing:
    """Reduce in place of the output by a kernel of the engine."""
    reduce_op = op.live.kernel(part.kind)
    source, target = part.pack(), into.target()
    if part is not into:
        target[:] = source
    array = part.typed(target)
    work = getattr(state.group, name)(array, *settings, reduce_op, async_op=state.is_async)
    return _call([work], _store([into], [target]))


def allreduce(state: CommState, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Ongoing:
    """Make the reduction of all ranks' data, on all ranks."""
    mine, output = _pair(sendbuf, recvbuf)
    if state.is_inter:
        return _reduced_across(state, mine, output, op)
    if op.live.kernel(mine.kind) is None:
        return _reduced(state, mine, output, op, state.size)
    return _kernel(state, op, mine, "all_reduce", into=output)


def _reduced_across(state: CommState, mine: Run, output: Run | None, op: Op) -> Ongoing:
    """Reduce the data of the other side, which it sends to this rank."""
    count = len(state.peers)
    data = mine.pack()
    rows = [np.empty(len(data), np.uint8) for _ in range(count)]
    wanted = {k: [_raw(rows[k])] for k in range(count)} if output is not None else {}
    call = exchange(state, {k: [_raw(data)] for k in range(count)}, wanted)
    inner = call._finish
    assert inner is not None
    reduction = op.live

    def finish(call: Ongoing) -> None:
        inner(call)
        if output is not None and len(data):
            _put(output, reduction.fold(rows, mine))

    call._finish = finish
    return call


def _raw(data: Bytes) -> Run:
    from unisono.adapters.mpi4py.datatypes import named

    return Run(data, 0, len(data), named["BYTE"].ob)


def reduce(state: CommState, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Ongoing:
    """Make the reduction of all ranks' data, on the root."""
    check_root(state, root)
    if state.is_inter:
        return _reduce_inter(state, sendbuf, recvbuf, op, root)
    if state.rank != root:
        mine = simple(sendbuf, False)
        if op.live.kernel(mine.kind) is None:
            return _reduced(state, mine, None, op, 0)
        array = mine.typed(mine.pack())
        work = state.group.reduce(array, root, op.live.kernel(mine.kind), async_op=state.is_async)
        return _call([work])
    mine, output = _pair(sendbuf, recvbuf)
    if op.live.kernel(mine.kind) is None:
        return _reduced(state, mine, output, op, state.size)
    return _kernel(state, op, mine, "reduce", root, into=output)


def _reduce_inter(state: CommState, sendbuf: Any, recvbuf: Any, op: Op, root: int) -> Ongoing:
    if root == PROC_NULL:
        return Ongoing()
    if root != ROOT:
        return exchange(state, {root: [simple(sendbuf, False)]}, {})
    output = simple(recvbuf, True)
    rows = [np.empty(output.nbytes, np.uint8) for _ in state.peers]
    call = exchange(state, {}, {k: [_raw(row)] for k, row in enumerate(rows)})
    inner = call._finish
    assert inner is not None

    def finish(call: Ongoing) -> None:
        inner(call)
        if output.nbytes:
            _put(output, op.live.fold(rows, output))

    call._finish = finish
    return call


def reduce_scatter(
    state: CommState, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Op = SUM
) -> Ongoing:
    """Make the reduction of all ranks' data, a part on each rank."""
    size = state.size
    if _is_in_place(sendbuf):
        mine = simple(recvbuf, True)
        if recvcounts is None:
            whole, rest = divmod(mine.count, size)
            counts = [whole + (k < rest) for k in range(size)]
        else:
            counts = [int(n) for n in recvcounts]
        if sum(counts) > mine.count:
            raise ValueError(f"mismatch in receive count {mine.count} and sum(counts)")
        output = mine.slice(0, counts[state.rank])
        mine = mine.slice(0, sum(counts))
    else:
        output = simple(recvbuf, True)
        mine = simple(sendbuf, False)
        if recvcounts is None:
            rows = np.empty((size, 1), np.int64)
            state.group.all_gather_into_tensor(rows, np.array([output.count]))
            counts = rows[:, 0].tolist()
        else:
            counts = [int(n) for n in recvcounts]
        if mine.kind is not output.kind:
            raise ValueError("mismatch in send and receive MPI datatypes")
        if mine.count != sum(counts):
            raise ValueError(f"mismatch in send count {mine.count} and sum(counts) {sum(counts)}")
        if output.count != counts[state.rank]:
            raise ValueError(f"mismatch in receive count {output.count}")
    return _scattered(state, mine, output, counts, op)


def _scattered(state: CommState, mine: Run, output: Run, counts: Sequence[int], op: Op) -> Ongoing:
    first = sum(counts[: state.rank])
    kernel = op.live.kernel(mine.kind)
    if state.is_inter or kernel is None:
        whole = np.empty(mine.nbytes, np.uint8)
        into = Run(whole, 0, mine.count, _packed(mine))
        if state.is_inter:
            call = _reduced_across(state, mine, into, op)
        else:
            call = _reduced(state, mine, into, op, state.size)
        inner = call._finish
        assert inner is not None
        size = mine.kind.size

        def finish(call: Ongoing) -> None:
            inner(call)
            _put(output, whole[first * size : (first + counts[state.rank]) * size])

        call._finish = finish
        return call
    data = mine.typed(mine.pack())
    target = np.empty(counts[state.rank] * mine.kind.size, np.uint8)
    per = len(data) // max(mine.count, 1)
    sizes = [n * per for n in counts]
    how: Any = {} if len(set(sizes)) == 1 else {"input_split_sizes": sizes}
    work = state.group.reduce_scatter_tensor(
        *(mine.typed(target), data, kernel),
        **how,
        async_op=state.is_async,
    )
    return _call([work], lambda: _put(output, target))


def _packed(part: Run) -> Any:
    from unisono.adapters.mpi4py.datatypes import named

    return part.kind if part.is_plain else named["BYTE"].Create_contiguous(part.kind.size).ob


def reduce_scatter_block(state: CommState, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Ongoing:
    """As reduce_scatter, with equal parts."""
    size = state.size
    if _is_in_place(sendbuf):
        block = simple(recvbuf, True, blocks=size)
        mine = block.slice(0, block.count * size)
        output = block
    else:
        output = simple(recvbuf, True)
        block = simple(sendbuf, False, blocks=size)
        mine = block.slice(0, block.count * size)
        if mine.kind is not output.kind:
            raise ValueError("mismatch in send and receive MPI datatypes")
        if block.count != output.count:
            raise ValueError(f"mismatch in send count {block.count} and count {output.count}")
    return _scattered(state, mine, output, [output.count] * size, op)


def scan(state: CommState, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Ongoing:
    """Make the reduction of the data of the ranks up to this one."""
    mine, output = _pair(sendbuf, recvbuf)
    if op.live.kernel(mine.kind) is None:
        return _reduced(state, mine, output, op, state.rank + 1)
    return _kernel(state, op, mine, "scan", into=output)


def exscan(state: CommState, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Ongoing:
    """Make the reduction of the data of the ranks before this one."""
    mine, output = _pair(sendbuf, recvbuf)
    # Rank 0 keeps its output, so the engine must not work in it.
    return _reduced(state, mine, output, op, state.rank)


# ---- neighbours -------------------------------------------------------------------------------


def _neighbors(state: CommState, ins: list[Run], outs: list[Run]) -> Ongoing:
    links = state.topology.links
    used_in, used_out = links.linked
    inputs, parts = [ins[k].pack() for k in used_in], [outs[k] for k in used_out]
    outputs = [part.target() for part in parts]
    work = state.group.neighbor_all_to_all(outputs, inputs, links, async_op=state.is_async)
    return _call([work], _store(parts, outputs))


def neighbor_allgather(state: CommState, sendbuf: Any, recvbuf: Any) -> Ongoing:
    """Each rank's data on its neighbours."""
    return _neighbor_allgather(state, _blocks, sendbuf, recvbuf)


def neighbor_allgatherv(state: CommState, sendbuf: Any, recvbuf: Any) -> Ongoing:
    """As neighbor_allgather, with different sizes."""
    return _neighbor_allgather(state, vector, sendbuf, recvbuf)


def _neighbor_allgather(state: CommState, parse: Parse, sendbuf: Any, recvbuf: Any) -> Ongoing:
    sources, targets = (len(each) for each in state.topology.edges(state))
    mine = simple(sendbuf, False)
    return _neighbors(state, [mine] * targets, parse(recvbuf, True, sources))


def _neighbor_alltoall(state: CommState, parse: Parse, sendbuf: Any, recvbuf: Any) -> Ongoing:
    sources, targets = (len(each) for each in state.topology.edges(state))
    return _neighbors(state, parse(sendbuf, False, targets), parse(recvbuf, True, sources))


def neighbor_alltoall(state: CommState, sendbuf: Any, recvbuf: Any) -> Ongoing:
    """Move a part of each rank's data on each neighbour."""
    return _neighbor_alltoall(state, _blocks, sendbuf, recvbuf)


def neighbor_alltoallv(state: CommState, sendbuf: Any, recvbuf: Any) -> Ongoing:
    """As neighbor_alltoall, with different sizes."""
    return _neighbor_alltoall(state, vector, sendbuf, recvbuf)


def neighbor_alltoallw(state: CommState, sendbuf: Any, recvbuf: Any) -> Ongoing:
    """As neighbor_alltoall, with different sizes and datatypes."""
    return _neighbor_alltoall(state, vector_w, sendbuf, recvbuf)
