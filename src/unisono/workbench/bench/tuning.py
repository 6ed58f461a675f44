"""Measure every algorithm on the ranks of this world, for a tuning table.

The ranks make `PASSES` passes over all cells (an operation and a size). In a cell the algorithms
take turns, so that other load of the machine affects all of them. After a cell's first pass only
algorithms that can still win are measured. The passes are seconds apart, so an algorithm that wins
in each of them does not win by a moment's noise.

The fastest quarter of the rounds of a pass counts, by its slowest round. The median differs more
between two runs on a busy machine. The fastest round hides what an algorithm waits for.

All ranks take the same decisions, because all decide by the times of the slowest rank.
"""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

import unisono
from unisono.core.schedules import Topology, available, select
from unisono.core.schedules.choice.tables import Measured
from unisono.workbench.bench.data import Data
from unisono.workbench.bench.libraries import (
    TimedCall,
    no_garbage_collection,
    slowest,
    unisono_library,
)
from unisono.workbench.bench.plan import BenchPlan, Case, SizeRange, cases

Rounds = dict[tuple[str, int], dict[str, list[list[float]]]]
"""(collective, bytes) -> algorithm -> microseconds of a call by pass and round."""

OPS = ("all_reduce", "all_gather", "broadcast", "reduce", "reduce_scatter", "all_to_all")
"""The operations that are measured by default."""

SIZES = SizeRange(1 << 10, 1 << 24, 4)
"""The sizes: 1 KiB to 16 MiB."""

# The share of the time at which each pass ends at the latest; the first has more algorithms.
_PASS_ENDS = (0.5, 0.75, 1.0)
PASSES = len(_PASS_ENDS)
# Rounds of a pass. Fewer give no quiet moment, more cost time that other cells need.
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 25
# Duration of one loop. A call that takes longer is made once. In a longer loop another process of
# a busy machine interrupts every loop, and in a shorter loop the barrier before it counts.
_LOOP_S = 0.0007
# An algorithm that is slower than the best by these factors is left out: after the first calls,
# and after the first pass.
OUT_AT_ONCE, OUT_AFTER_PASS = 3.0, 1.4


@dataclass(frozen=True)
class TuningPlan:
    """The settings of a measurement, equal on all ranks.

    Attributes:
        ops: Names from `bench.plan.OPS`.
        sizes: Sizes of each operation.
        limit_s: Duration of all passes.
    """

    ops: tuple[str, ...] = OPS
    sizes: SizeRange = SIZES
    limit_s: float = 45.0


@dataclass
class _Cell:
    """An operation and a size: what is known about its algorithms.

    Attributes:
        case: The operation and the size.
        built_in: The choice of the built-in rule.
        call_s: Time of a call by algorithm, of algorithms that can still win.
        rounds_us: Times of a call by algorithm, pass and round.
    """

    case: Case
    built_in: str
    call_s: dict[str, float]
    rounds_us: dict[str, list[list[float]]]

    def drop(self, factor: float) -> None:
        """Leave out algorithms that are slower than the best by a factor."""
        least = min(self.call_s.values())
        self.call_s = {
            name: call_s
            for name, call_s in self.call_s.items()
            if call_s <= factor * least or name == self.built_in
        }


def measure(
    plan: TuningPlan, topology: Topology, progress: Callable[[int, int, str], None]
) -> Rounds:
    """Measure on the default group; all its ranks must call this.

    Args:
        plan: Operations, sizes and duration.
        topology: The world.
        progress: Called on each rank with the number of measured cells, of all, and the cell.

    Returns:
        The times, equal on all ranks. An algorithm that was left out early has fewer passes. A
        cell that the first pass did not reach in its time is absent.
    """
    start_s = time.perf_counter()
    bench = BenchPlan(plan.ops, topology.world_size, sizes=plan.sizes)
    found = [
        _Cell(case, select(op, case.nbytes, topology).algorithm, {}, {})
        for op in plan.ops
        for case in cases(op, bench)
    ]
    # Every other size comes first, because on a busy machine the first pass may not reach all.
    todo = [*found[::2], *found[1::2]]
    for turn, share in enumerate(_PASS_ENDS):
        ends_s = start_s + share * plan.limit_s
        for at, cell in enumerate(todo):
            left_s = ends_s - time.perf_counter()
            if slowest([-left_s])[0] > 0.0:
                break
            where = f"{cell.case.op} of {cell.case.nbytes} bytes"
            progress(turn * len(found) + at, PASSES * len(found), where)
            data = Data(cell.case, bench, unisono.get_rank())
            _measure(cell, data, topology, left_s / (len(todo) - at))
            if turn == 0:
                cell.drop(OUT_AFTER_PASS)
        # Backwards, so that a slow drift does not favour the same cells in each pass.
        todo = [cell for cell in todo[::-1] if cell.rounds_us]
    progress(PASSES * len(found), PASSES * len(found), "")
    return {(cell.case.op, cell.case.nbytes): cell.rounds_us for cell in found if cell.rounds_us}


def quartiles(rounds: Rounds) -> Measured:
    """Return the lower quartile of each pass."""
    return {
        cell: {name: tuple(map(quartile, passes)) for name, passes in times.items()}
        for cell, times in rounds.items()
    }


def quartile(times: Sequence[float]) -> float:
    """Return the time that a quarter of the times does not exceed."""
    return float(np.quantile(times, 0.25))


def hosts() -> list[str]:
    """Return the name of the host of each rank."""
    names = [""] * unisono.get_world_size()
    unisono.all_gather_object(names, platform.node())
    return names


def _measure(cell: _Cell, data: Data, topology: Topology, share_s: float) -> None:
    """Measure the algorithms of a cell for one pass."""
    data.fill_for_timing()
    op = cell.case.op
    names = cell.call_s or available(op, topology.world_size, local=topology.local)
    calls = {name: unisono_library(name).call(data) for name in names}
    with no_garbage_collection():
        if not cell.call_s:
            # The first call also builds the schedule.
            first = [min(_loop_s(call, 1) for _ in range(3)) for call in calls.values()]
            cell.call_s = dict(zip(calls, slowest(first), strict=True))
            cell.drop(OUT_AT_ONCE)
        calls = {name: calls[name] for name in cell.call_s}
        iters = [max(1, min(1000, int(_LOOP_S / s))) for s in cell.call_s.values()]
        times = _rounds(list(calls.values()), iters, share_s)
    for name, column in zip(calls, slowest(times).T.tolist(), strict=True):
        cell.call_s[name] = min(column)
        cell.rounds_us.setdefault(name, []).append([round(s * 1e6, 3) for s in column])


def _rounds(calls: Sequence[TimedCall], iters: Sequence[int], share_s: float) -> list[list[float]]:
    """Return the seconds per call of this rank, by round and call, for about `share_s`."""
    ends_s = time.perf_counter() + share_s
    times: list[list[float]] = []
    for turn in range(_MOST_ROUNDS):
        # The calls may take longer than before, so the ranks look at the time in each round.
        if turn >= _LEAST_ROUNDS and slowest([time.perf_counter() - ends_s])[0] > 0.0:
            break
        times.append([0.0] * len(calls))
        for i in (i % len(calls) for i in range(turn, turn + len(calls))):
            if iters[i] > 1:
                calls[i]()
            times[turn][i] = _loop_s(calls[i], iters[i]) / iters[i]
    return times


def _loop_s(call: TimedCall, iters: int) -> float:
    """Return the seconds of some calls, which all ranks begin together."""
    unisono.barrier()
    start_s = time.perf_counter()
    for _ in itertools.repeat(None, iters):
        call()
    return time.perf_counter() - start_s
