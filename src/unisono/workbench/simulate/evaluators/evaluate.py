"""Choose the evaluator, and run a schedule in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unisono.core.schedules.ir import Schedule
from unisono.core.schedules.registry import build
from unisono.errors import InvalidArgumentError
from unisono.workbench.simulate.evaluators import alike, links, stages
from unisono.workbench.simulate.evaluators import symmetry as images
from unisono.workbench.simulate.evaluators.costs import Costs
from unisono.workbench.simulate.evaluators.result import Result
from unisono.workbench.simulate.evaluators.traffic import Traffic, TrafficRows, joined
from unisono.workbench.simulate.networks import Network

# Up to this number of rows a run of the events takes seconds. Above it, stages are evaluated.
_EVENT_ROWS = 400_000
# Rows that stages take in some seconds. Above it, chunks that differ by an element are padded if a
# few ranks can then stand for all.
_UNEVEN_ROWS = 20_000_000
# Rows that stages can take in some minutes.
_ALL_ROWS = 3_000_000_000


def simulate(
    schedule: Schedule,
    nbytes: int,
    network: Network,
    costs: Costs | None = None,
    *,
    itemsize: int = 1,
    padded: bool = False,
    contended: bool = True,
    method: str = "auto",
) -> Result:
    """Run a schedule in virtual time.

    Args:
        schedule: The algorithm.
        nbytes: Size of the whole data: the vector, or all p blocks.
        network: Links between the ranks.
        costs: The work of ranks besides messages; none by default.
        itemsize: Bytes per element.
        padded: Give all chunks the size of the largest chunk; see `Traffic`.
        contended: Whether links serve in turn. Otherwise each message finds its links free, as in
            the alpha-beta model.
        method: "events" is exact, "stages" is for large worlds, "auto" chooses by the rows.

    Returns:
        When each rank ends, and why. `Result.exact` is False if the order of messages on shared
        links was approximated.

    Raises:
        InvalidArgumentError: The network has another number of ranks, the run would take too
            many rows, or an argument is none.
    """
    if method not in ("auto", "events", "stages"):
        raise InvalidArgumentError(f"method must be auto, events or stages; got {method!r}")
    if not isinstance(schedule, Schedule):
        raise InvalidArgumentError(
            f"simulate: schedule is {schedule!r}, expected a Schedule",
            hint="unisono.lowlevel.build(op, name, ranks) returns that of an algorithm",
        )
    if not hasattr(nbytes, "__index__") or nbytes < 0:
        raise InvalidArgumentError(f"simulate: nbytes is {nbytes!r}, expected a number of bytes")
    p = schedule.world_size
    name = f"simulate {schedule.collective} ({schedule.algorithm})"
    if network.size != p:
        raise InvalidArgumentError(f"{name}: the network has {network.size} ranks, expected {p}")
    costs = costs or Costs()
    parts = [Traffic(schedule, nbytes, itemsize, padded, work=costs.works)]
    if costs.agreement_bytes and p > 1:
        agreement = build("barrier", "dissemination", p)
        parts.insert(0, Traffic(agreement, 0, message_bytes=costs.agreement_bytes))
    most, rows = _size(parts)
    if method == "events" or (method == "auto" and rows <= _EVENT_ROWS) or costs.cores:
        if rows > 20 * _EVENT_ROWS:
            raise _too_large(name, rows, 20 * _EVENT_ROWS, "events take")
        return links.run(all_rows(parts), network, costs, contended=contended)
    result = _by_images(parts, network, costs, contended=contended)
    if result is None and method == "auto" and rows > _UNEVEN_ROWS:
        result = _by_padding(parts, network, costs, contended=contended)
    if result is not None:
        return result
    if rows > _ALL_ROWS:
        raise _too_large(name, rows, _ALL_ROWS, "stages take")
    result = stages.run(parts, network, costs, contended=contended, large=most > stages.LARGE)
    if result is None and contended:
        result = alike.run(parts, network, costs)
    if result is None:
        raise _too_large(name, most, stages.LARGE, "a stage takes")
    return result


def all_rows(parts: Sequence[Traffic]) -> TrafficRows:
    """Return the rows of schedules one after another, rank by rank; for small worlds."""
    return joined([part.all_rows() for part in parts])


def _by_images(
    parts: Sequence[Traffic], network: Network, costs: Costs, *, contended: bool
) -> Result | None:
    """Evaluate with a few ranks that stand for all, or return None if there are none."""
    run = images.run_shared if contended else images.run
    for unordered in (False, True) if costs.receives_free else (False,):
        found = images.find_images(parts, network, unordered=unordered)
        result = run(parts, network, costs, found) if found else None
        if result is not None:
            return result
    return None


def _by_padding(
    parts: Sequence[Traffic], network: Network, costs: Costs, *, contended: bool
) -> Result | None:
    """Evaluate as if all chunks had the size of the largest, which has one element more.

    With fewer elements than chunks only a ring may do so: in it each chunk passes all ranks.
    """
    last = parts[-1]
    schedule = last.schedule
    ring = schedule.collective == "all_reduce" and schedule.rounds >= schedule.world_size - 1
    full = last.nbytes // last.itemsize >= schedule.work_chunks
    if last.padded or not (full or (ring and last.nbytes)):
        return None
    padded = [*parts[:-1], replace(last, padded=True)]
    result = _by_images(padded, network, costs, contended=contended)
    return result and replace(
        result, exact=False, method=f"{result.method}, all chunks as large as the largest"
    )


def _size(parts: Sequence[Traffic]) -> tuple[int, int]:
    """Return the estimated rows of the largest stage and of all, from some ranks and stages."""
    most = rows = 0
    for part in parts:
        some = sorted({k * (part.stages - 1) // 15 for k in range(16)})
        counts = [part.count(k) for k in some]
        most = max(most, *counts)
        # A stage with few rows is computed for all ranks, too.
        rows += (sum(counts) // len(counts) + part.schedule.world_size // 8) * part.stages
    return most, rows


def _too_large(name: str, rows: int, limit: int, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{name}: {what} about {rows:,} rows (limit {limit:,})",
        hint="take fewer ranks, another algorithm, or a size that all chunks share equally: then "
        "a few ranks can stand for all",
    )
