"""Two levels: the ranks of a host share the work, and data passes only once between hosts.

Every host has L ranks, and ranks are numbered host by host: rank h*L + l is the l-th of L on host
h of H. Each rank moves its part of the data, one L-th, between the hosts. A host then sends and
receives no more bytes than a single rank would. The pipeline cuts the vector into m *slices*, which
pass through the stages of an algorithm one after another.

In the formulas n is the size of the whole data (the vector, or p blocks), p = H*L, m the pipeline
depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain

import numpy as np

from unisono.core.schedules import ir
from unisono.core.schedules.blocks import block_schedule
from unisono.core.schedules.ir import (
    BoolArray,
    Buf,
    IntArray,
    Op,
    Schedule,
    ceil_log2,
    copy,
    make_rows,
    recv,
    recv_reduce,
    send,
)

INPUT, OUTPUT, SCRATCH = Buf.INPUT, Buf.OUTPUT, Buf.SCRATCH
NAME = "two_level"

StageRows = list[IntArray]
Sides = tuple[StageRows, StageRows]
# The first stage (slice, ranks), the stages between (stages, slices, ranks), and the last stage
# (slice, ranks). Those between come for several slices at once, [slices, 1].
Stages = tuple[
    Callable[[int, IntArray], Sides],
    Callable[[IntArray, IntArray, IntArray], Sides],
    Callable[[int, IntArray], Sides],
]


def all_reduce(p: int, local: int, pipeline: int) -> Schedule:
    """Reduce-scatter inside the hosts, all-reduce the parts in rings, all-gather inside.

    Use: large data on hosts with several ranks and fast memory.
    Cost: 2H-1+m rounds; 2n(H-1)/p sent to other hosts, 2n(L-1)/L inside.
    Source: Open MPI's coll/han; NCCL's rings with one NIC per GPU.
    """
    hosts = p // local

    def exchange_inside(s: int, r: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        peers = _neighbours(r, local)
        mine, theirs = (s * local + place % local for place in (r[:, None], peers))
        return r[:, None], peers, mine * hosts, theirs * hosts

    def scatter(s: int, r: IntArray) -> Sides:
        column, peers, mine, theirs = exchange_inside(s, r)
        sends = [send(column, peers, OUTPUT, theirs, hosts)]
        return sends, [recv_reduce(column, peers, OUTPUT, mine, hosts)]

    def ring(t: IntArray, s: IntArray, r: IntArray) -> Sides:
        part = (s * local + r % local) * hosts
        given = r // local + np.where(t < hosts, 1 - t, 1 - t + hosts)
        taken = (OUTPUT, part + (given - 1) % hosts)
        step = np.where(t < hosts, Op.RECV_REDUCE, Op.RECV)
        return (
            [send(r, (r + local) % p, OUTPUT, part + given % hosts)],
            [make_rows(step, r, (r - local) % p, (-1, -1), taken, 1)],
        )

    def gather(s: int, r: IntArray) -> Sides:
        column, peers, mine, theirs = exchange_inside(s, r)
        sends = [send(column, peers, OUTPUT, mine, hosts)]
        return sends, [recv(column, peers, OUTPUT, theirs, hosts)]

    chunks = pipeline * local * hosts
    stages = (scatter, ring, gather)
    return _pipelined("all_reduce", p, 2 * hosts, pipeline, stages, chunks)


def broadcast(p: int, local: int, root: int, pipeline: int) -> Schedule:
    """Scatter inside the root's host, send the parts down binomial trees, all-gather inside.

    Cost: 1+ceil(lg H)+m rounds; at most n ceil(lg H)/L sent to other hosts.
    Source: Open MPI's coll/han, with van de Geijn's scatter and all-gather inside.
    """
    hosts = p // local
    depth = ceil_log2(hosts)

    def scatter(s: int, r: IntArray) -> Sides:
        at_root, to, near = _around(root, r, local)
        return (
            [send(at_root, to, OUTPUT, s * local + to % local)],
            [recv(r, root, OUTPUT, s * local + r % local, where=near)],
        )

    def descend(t: IntArray, s: IntArray, r: IntArray) -> Sides:
        mine = s * local + r % local
        gives, takes, to, source = _branch(r, local, root, hosts, t - 1)
        return (
            [send(r, to, OUTPUT, mine, where=gives)],
            [recv(r, source, OUTPUT, mine, where=takes)],
        )

    def gather(s: int, r: IntArray) -> Sides:
        column, peers = r[:, None], _neighbours(r, local)
        mine, theirs = (s * local + place % local for place in (column, peers))
        return (
            [send(column, peers, OUTPUT, mine, where=peers != root)],
            [recv(column, peers, OUTPUT, theirs, where=column != root)],
        )

    stages = (scatter, descend, gather)
    return _pipelined("broadcast", p, depth + 2, pipeline, stages, pipeline * local, root)


def reduce(p: int, local: int, root: int, pipeline: int) -> Schedule:
    """Reduce-scatter inside the hosts, reduce the parts up binomial trees, gather on the root.

    Only the root writes its OUTPUT. The other ranks reduce their parts in SCRATCH.

    Cost: 1+ceil(lg H)+m rounds; at most n/L sent to other hosts.
    Source: the broadcast, reversed.
    """
    hosts = p // local
    depth = ceil_log2(hosts)

    def reduce_inside(s: int, r: IntArray) -> Sides:
        mine, is_root = s * local + r % local, r == root
        column, peers = r[:, None], _neighbours(r, local)
        parts, first, others = mine[:, None], peers[:, 0], peers[:, 1:]
        at_root = is_root[:, None]
        return (
            [send(column, peers, OUTPUT, s * local + peers % local)],
            [
                recv_reduce(column, peers, OUTPUT, parts, where=at_root),
                # Receive the first value and reduce OUTPUT into it. To copy OUTPUT to SCRATCH
                # and reduce all values into the copy would pass over the data once more.
                recv(r, first, SCRATCH, mine, where=~is_root),
                ir.reduce(r, (OUTPUT, mine), (SCRATCH, mine), where=~is_root),
                recv_reduce(column, others, SCRATCH, parts, where=~at_root),
            ],
        )

    def ascend(t: IntArray, s: IntArray, r: IntArray) -> Sides:
        mine = s * local + r % local
        takes, gives, source, to = _branch(r, local, root, hosts, depth - t)
        buffer = np.where(r == root, OUTPUT, SCRATCH)
        return (
            [send(r, to, SCRATCH, mine, where=gives)],
            [make_rows(Op.RECV_REDUCE, r, source, (-1, -1), (buffer, mine), 1, takes)],
        )

    def gather(s: int, r: IntArray) -> Sides:
        at_root, source, near = _around(root, r, local)
        return (
            [send(r, root, SCRATCH, s * local + r % local, where=near)],
            [recv(at_root, source, OUTPUT, s * local + source % local)],
        )

    chunks = pipeline * local
    stages = (reduce_inside, ascend, gather)
    return _pipelined("reduce", p, depth + 2, pipeline, stages, chunks, root, chunks)


def all_gather(p: int, local: int) -> Schedule:
    """Pass blocks around rings between the hosts, and send each received block inside the host.

    Cost: H rounds; n(H-1)/p sent to other hosts, n(L-1)/L inside.
    Source: Open MPI's coll/han.
    """
    hosts = p // local

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        column, peers = r[:, None], _neighbours(r, local)
        mine = (r - k * local) % p
        buf, chunk = (INPUT, r * 0) if k == 0 else (OUTPUT, mine)
        if k < hosts - 1:
            yield send(r, (r + local) % p, buf, chunk)
        yield send(column, peers, buf, chunk[:, None])
        if k < hosts - 1:
            yield recv(r, (r - local) % p, OUTPUT, (mine - local) % p)
        yield recv(column, peers, OUTPUT, (peers - k * local) % p)

    return block_schedule("all_gather", NAME, p, hosts, exchange)


def reduce_scatter(p: int, local: int, pipeline: int) -> Schedule:
    """Reduce all blocks inside the hosts, and pass the sums around rings between the hosts.

    Cost: H-1+m rounds; n(H-1)/p sent to other hosts, n(L-1)/L inside.
    Source: Open MPI's coll/han, with NCCL's rings.
    """
    hosts = p // local

    def chunk(host: IntArray | int, place: IntArray, s: IntArray | int) -> IntArray:
        return (host % hosts * local + place % local) * pipeline + s

    def scatter(s: int, r: IntArray) -> Sides:
        column, peers = r[:, None], _neighbours(r, local)
        sends, takes = [], []
        for host in range(hosts):
            sends.append(send(column, peers, INPUT, chunk(host, peers, s)))
            own, mine = np.equal(host, r // local), chunk(host, r, s)
            into = np.where(own, OUTPUT, SCRATCH), np.where(own, s, mine)
            takes.append(copy(r, (INPUT, mine), (OUTPUT, s), where=own))
            # As in `reduce`: one pass fewer over the data.
            step = np.where(own, Op.RECV_REDUCE, Op.RECV)
            takes.append(make_rows(step, r, peers[:, 0], (-1, -1), into, 1))
            takes.append(ir.reduce(r, (INPUT, mine), (SCRATCH, mine), where=~own))
            others = into[0][:, None], into[1][:, None]
            takes.append(make_rows(Op.RECV_REDUCE, column, peers[:, 1:], (-1, -1), others, 1))
        return sends, takes

    def ring(t: IntArray, s: IntArray, r: IntArray) -> Sides:
        given, taken = (chunk(r // local - back, r, s) for back in (t, t + 1))
        return (
            [send(r, (r + local) % p, SCRATCH, given)],
            [recv_reduce(r, (r - local) % p, SCRATCH, taken)],
        )

    def finish(s: int, r: IntArray) -> Sides:
        return (
            [send(r, (r + local) % p, SCRATCH, chunk(r // local + 1, r, s))],
            [recv_reduce(r, (r - local) % p, OUTPUT, s)],
        )

    stages, chunks = (scatter, ring, finish), pipeline * p
    plan = _pipelined("reduce_scatter", p, hosts, pipeline, stages, pipeline, -1, chunks)
    return replace(plan, input_chunks=chunks)


def all_to_all(p: int, local: int) -> Schedule:
    """Exchange inside the hosts, so that each rank has all blocks of its host for some ranks.

    Then a rank sends one message to each other host, for the rank in its own place there. The
    message has the blocks of all ranks of its own host.

    Cost: L+H-2 rounds, n(L-1)/L + n(H-1)/H sent, of which n(H-1)/H to other hosts; 2n copied.
    Source: Tutel's 2DH all-to-all; Bruck et al. 1997 call it the index operation on a grid.
    """
    hosts = p // local
    # SCRATCH [0, p): blocks for each place l, host by host. [p, 2p): received, from each place.
    grid = np.arange(p).reshape(hosts, local)

    def pack(r: IntArray) -> Iterable[IntArray]:
        column = r[:, None]
        yield copy(column, (INPUT, grid.T.ravel()), (SCRATCH, np.arange(p)))
        place = r % local * hosts
        yield copy(r, (SCRATCH, place), (SCRATCH, p + place), hosts)

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        host, place = r // local, r % local
        if k < local - 1:
            to, source = (place + k + 1) % local, (place - k - 1) % local
            yield send(r, host * local + to, SCRATCH, to * hosts, hosts)
            yield recv(r, host * local + source, SCRATCH, p + source * hosts, hosts)
            return
        if k == local - 1:
            column = r[:, None]
            by_place = np.arange(p).reshape(local, hosts).T.ravel()
            yield copy(column, (SCRATCH, p + by_place), (SCRATCH, np.arange(p)))
        d = k - local + 2
        to, source = (host + d) % hosts, (host - d) % hosts
        yield send(r, to * local + place, SCRATCH, to * local, local)
        yield recv(r, source * local + place, OUTPUT, source * local, local)

    def own(r: IntArray) -> Iterable[IntArray]:
        first = r // local * local
        yield copy(r, (SCRATCH, first), (OUTPUT, first), local)

    return block_schedule(
        "all_to_all", NAME, p, local + hosts - 2, exchange,
        scratch_chunks=2 * p, before=pack, after=own,
    )  # fmt: skip


def _neighbours(r: IntArray, local: int) -> IntArray:
    """Return [ranks, L-1]: the other ranks of each rank's host, from the next one on."""
    return r[:, None] // local * local + (r[:, None] + np.arange(1, local)) % local


def _around(root: int, r: IntArray, local: int) -> tuple[IntArray, IntArray, BoolArray]:
    """Return the root if it is in `r`, the other ranks of its host, and a mask of these in `r`."""
    at_root = r[r == root]
    near = (r // local == root // local) & (r != root)
    return at_root[:, None], _neighbours(at_root, local), near


def _branch(
    r: IntArray, local: int, root: int, hosts: int, level: IntArray
) -> tuple[BoolArray, BoolArray, IntArray, IntArray]:
    """Return masks of parents and of children on one level of binomial trees, then their peers."""
    p, d = hosts * local, np.left_shift(1, level)
    v = (r // local - root // local) % hosts
    upper, lower = (v < d) & (v + d < hosts), (v >= d) & (v < 2 * d)
    return upper, lower, (r + d * local) % p, (r - d * local) % p


def _pipelined(
    collective: str,
    p: int,
    rounds: int,
    pipeline: int,
    stages: Stages,
    chunks: int,
    root: int = -1,
    scratch_chunks: int = 0,
) -> Schedule:
    """Return the schedule in which slices pass through `rounds` stages one after another."""
    first, between, last = stages

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        low, high = max(0, k - rounds + 1), min(k, pipeline - 1)
        sides: list[Sides] = []
        # In the order of slices. Two ranks that exchange several slices in a round otherwise match
        # wrong messages, because matching is first in, first out.
        if k - low == rounds - 1:
            sides.append(last(low, r))
            low += 1
        inner = np.arange(low, high + (k > high))[:, None]
        if len(inner):
            sides.append(between(k - inner, inner, r))
        if k == high:
            sides.append(first(high, r))
        return [rows for way in zip(*sides, strict=True) for rows in chain(*way)]

    return Schedule(
        collective, NAME, p, rounds + pipeline - 1, exchange, root,
        output_chunks=chunks, scratch_chunks=scratch_chunks,
    )  # fmt: skip
