"""The common form of schedules that move one block per rank, or per pair of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from unisono.schedules.ir import Buf, Exchange, IntArray, Local, Schedule, copy


def block_schedule(
    collective: str,
    algorithm: str,
    p: int,
    rounds: int,
    exchange: Exchange,
    root: int = -1,
    *,
    before: Local | None = None,
    **options: Any,
) -> Schedule:
    """Return the schedule of a collective that moves blocks, with one chunk per block.

    Args:
        collective: One of `BLOCK_COLLECTIVES`.
        algorithm: As for `Schedule`.
        p: World size.
        rounds: As for `Schedule`.
        exchange: As for `Schedule`.
        root: As for `Schedule`.
        before: Local steps before the first round. If None, each rank that has its own block in
            INPUT and a place for it in OUTPUT copies it there.
        **options: scratch_chunks, uneven_ok, after.
    """
    inputs = 1 if collective in ("all_gather", "gather") else p
    outputs = 1 if collective in ("reduce_scatter", "scatter") else p

    def copy_own(r: IntArray) -> Iterable[IntArray]:
        source, target = (r if inputs == p else 0), (r if outputs == p else 0)
        yield copy(r, (Buf.INPUT, source), (Buf.OUTPUT, target), where=(r == root) | (root < 0))

    return Schedule(
        collective, algorithm, p, rounds, exchange, root,
        input_chunks=inputs, output_chunks=outputs, before=before or copy_own, **options,
    )  # fmt: skip
