"""What a seed means: a world, its groups, and a sequence of calls. Data only."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono import ReduceOp
from unisono.core.base.types import all_dtypes, reduce_ops_of

Random = np.random.Generator

_KINDS = """
    all_reduce broadcast reduce all_gather all_gather_into_tensor gather scatter reduce_scatter
    reduce_scatter_tensor all_to_all all_to_all_single scan exscan all_reduce_coalesced
    all_gather_coalesced coalesced barrier ring messages objects mismatch refused
"""
KINDS = _KINDS.split()
DTYPES = [dtype for dtype in all_dtypes() if dtype.name == dtype.storage.name]
KIB = 1024
# Where algorithms, slots and rings change, give or take an element.
EDGES = [k * KIB for k in (1, 2, 4, 8, 12, 16, 32, 64, 80, 128, 256, 512, 1024, 4096)]
MAX_TOTAL_BYTES = 24 << 20


@dataclass(frozen=True)
class World:
    """Ranks, and which of them are in which group; group 0 has all."""

    seed: int
    size: int
    ranks: str
    engine: str
    transport: str | None
    groups: tuple[tuple[int, ...], ...]
    threaded: bool
    """Whether every group's calls are made by a thread of their own."""


@dataclass(frozen=True)
class Step:
    """One call. What only one rank knows, its arrays' layout say, it draws itself."""

    number: int
    group: int
    kind: str
    dtype: str
    count: int
    op: ReduceOp
    root: int
    shape: str
    uneven: bool
    in_place: bool
    is_async: bool
    algorithm: int | None
    """Which one of those that serve this call, modulo their number; None: the selected one."""


def world_of(seed: int, *, native: bool, **fixed: Any) -> World:
    """Draw a world; `fixed` overrides what is drawn."""
    draw = np.random.default_rng((seed, 0))
    ranks = "processes" if draw.random() < 0.15 else "threads"
    ranks = fixed.get("ranks") or ranks
    size = int(fixed.get("size") or draw.integers(1, 7 if ranks == "threads" else 5))
    members = [draw.permutation(size)[: draw.integers(1, size + 1)] for _ in range(2)]
    return World(
        seed,
        size,
        ranks,
        fixed.get("engine") or ("native" if native and draw.random() < 0.75 else "reference"),
        fixed.get("transport") or ("tcp" if draw.random() < 0.3 else None),
        (tuple(range(size)), *(tuple(map(int, each)) for each in members)),
        bool(draw.random() < 0.4),
    )


def steps_of(world: World, count: int) -> list[Step]:
    """Draw the first `count` steps; step k is the same whatever `count` is."""
    return [_step(np.random.default_rng((world.seed, 1, k)), k, world) for k in range(count)]


def _step(draw: Random, number: int, world: World) -> Step:
    group = int(draw.choice(len(world.groups), p=[0.6, 0.2, 0.2]))
    p = len(world.groups[group])
    dtype = DTYPES[draw.integers(len(DTYPES))]
    ops = sorted(reduce_ops_of(dtype))
    op = ReduceOp(ops[draw.integers(len(ops))])
    return Step(
        number,
        group,
        str(draw.choice(KINDS)),
        dtype.name,
        _count(draw, dtype.itemsize, p),
        ReduceOp.PREMUL_SUM(2.0) if op.name == "PREMUL_SUM" else op,
        int(draw.integers(p)),
        str(draw.choice(["flat", "flat", "2d"])),
        bool(draw.random() < 0.3),
        bool(draw.random() < 0.2),
        bool(draw.random() < 0.4),
        int(draw.integers(1000)) if draw.random() < 0.5 else None,
    )


def _count(draw: Random, itemsize: int, p: int) -> int:
    """Few elements mostly; else about a number of bytes at which something changes."""
    if draw.random() < 0.5:
        return int(draw.choice([0, 1, 2, 3, 7, 64, 500]))
    # Half as likely as the one before: what is large takes long.
    weights = 0.75 ** np.arange(len(EDGES))
    nbytes = int(draw.choice(EDGES, p=weights / weights.sum()))
    count = nbytes // itemsize + int(draw.integers(-1, 2))
    return min(count, MAX_TOTAL_BYTES // (p * p * itemsize))
