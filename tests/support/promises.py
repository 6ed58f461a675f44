"""The promises of engines, each found by making its case happen; see tools/promises_page.py."""

import hashlib
import os
import signal

import numpy as np

import unisono as dist
from tests.faults.fault_calls import attempt, store
from tests.support.oracle import check, reduce_op, reduction, values
from unisono.testing import run

ENGINES = ("native", "reference", "mpi")
VICTIM = 1
SHORT_S = 2.0


def _require(*conditions):
    assert all(conditions), conditions
    return "yes"


def differ(rank):
    """Calls that differ raise on all ranks, which name both sides. No array changes."""
    x = np.full(4 if rank == VICTIM else 3, 5.0)
    ended = attempt(dist.all_reduce, x)
    dist.barrier()
    texts = [f"float64[{n}]" in ended.text for n in (3, 4)]
    return _require(ended.kind == "CollectiveMismatchError", ended.usable, *texts, (x == 5).all())


def late(rank):
    """A rank that never enters a call is named after the time-out. No array changes."""
    group = dist.new_group(timeout=SHORT_S)
    dist.barrier(group=group)
    if rank == VICTIM:
        store().wait([f"late/{other}" for other in (0, 2)])
    ended = attempt(group.all_reduce, x := np.full(1 << 16, 5.0))
    store().set(f"late/{rank}", "")
    dist.destroy_process_group(group)
    found = rank == VICTIM or VICTIM in ended.peers
    return _require(ended.kind == "CollectiveTimeoutError", found, (x == 5).all())


def aborts(rank):
    """`abort()` ends the waiting calls of all ranks, with the name of its rank."""
    group = dist.new_group()
    dist.barrier(group=group)
    if rank == VICTIM:
        group.abort()
    ended = attempt(group.all_reduce, np.ones(3))
    dist.destroy_process_group(group)
    return _require(ended.kind == "CollectiveAbortedError", ended.peers == (VICTIM,))


def shapes(rank):
    """Uneven sizes, strided arrays, objects."""
    p = dist.get_world_size()
    parts = [np.zeros(r + 1) for r in range(p)]
    dist.all_gather(parts, np.full(rank + 1, float(rank)))
    dist.all_reduce(x := np.ones((4, 6))[::2, ::3])
    objects = [None] * p
    dist.all_gather_object(objects, {"rank": rank})
    return _require(
        all((part == r).all() for r, part in enumerate(parts)),
        (x == p).all(),
        objects == [{"rank": r} for r in range(p)],
    )


def arithmetic(rank):
    """Integers wrap, MIN and MAX keep NaN, bfloat16 is added in float32."""
    p = dist.get_world_size()
    for dtype, op in (("int8", "SUM"), ("uint16", "PRODUCT"), ("bfloat16", "SUM")):
        x = values(dtype, rank, 999).copy()
        dist.all_reduce(x, reduce_op(op))
        check((dtype, op), x, *reduction(dtype, op, p, 999))
    dist.all_reduce(x := np.array([np.nan if rank == VICTIM else 1.0, rank]), dist.ReduceOp.MAX)
    return _require(np.isnan(x[0]), x[1] == p - 1)


def equal_bits(rank):
    """A reduction has the same bits on all ranks, for numbers other than NaN."""
    x = np.random.default_rng(rank).normal(size=100_000).astype(np.float32)
    dist.all_reduce(x)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, hashlib.sha256(x).hexdigest())
    return _require(len(set(found)) == 1)


def ordered(rank):
    """`deterministic=True` adds in the order of the ranks; `algorithm=` and UNISONO_ALGO work."""
    parts = [np.random.default_rng(r).normal(size=1000) for r in range(dist.get_world_size())]
    x, y = parts[rank].copy(), np.ones(5)
    dist.all_reduce(x, deterministic=True)
    dist.all_reduce(y, algorithm="ring")
    return _require((x == (parts[0] + parts[1]) + parts[2]).all(), (y == len(parts)).all())


def library_calls(_):
    """Collectives run the algorithms of this library, so their sums have its bits."""
    return "MPI's" if _backend()._engine.has_collectives else "unisono's"


def messages(_):
    """send and recv use the way of collectives."""
    return "no: TCP" if "p2p=tcp" in repr(dist.group.WORLD) else "yes"


def repeated(_):
    """Repeated calls run without Python code."""
    return "no" if _backend().calls is None else "yes"


def survivors(rank):
    """A killed rank is named, and the other ranks shrink the group and go on."""
    dist.all_reduce(np.ones(3))
    if rank == VICTIM:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    # On MPI the end of the rank may reach a slow rank in the barrier.
    ended = attempt(lambda: [dist.barrier(), *(dist.all_reduce(np.ones(3)) for _ in range(5000))])
    group = dist.shrink_group([VICTIM])
    dist.all_reduce(x := np.full(1 << 16, 1.0))
    return _require(
        ended.kind == "PeerLostError", ended.peers == (VICTIM,), group.size() == 2, (x == 2).all()
    )


PROBES = (
    differ, late, aborts, survivors, shapes, arithmetic, equal_bits, ordered, library_calls,
    messages, repeated,
)  # fmt: skip
"""In the order of the table. `survivors` runs last, because it ends a rank."""


def _backend():
    return dist.group.WORLD.backends["cpu"]


def all_of_them(rank):
    last = (survivors,)
    return {probe.__name__: probe(rank) for probe in (*(p for p in PROBES if p not in last), *last)}


def column(engine):
    """Return {promise: cell of the table} of an engine."""
    first, _, third = run(all_of_them, 3, ranks="processes", engine=engine, dead={VICTIM})
    assert first == third
    return {probe.__doc__: first[probe.__name__] for probe in PROBES}
