"""The table of calls that `unisono run --stats` prints: what the workers of this node have written.

The workers write a file each at their end, see `unisono.core.recorder.files`. A worker that a
signal killed writes none.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from unisono.core.base.grouping import grouped

_HEAD = f"  {'operation':30}{'calls':>9}{'MB':>12}{'median us':>12}{'worst ms':>12}  on rank"


def prepare_stats() -> str:
    """Make the folder into which the workers of this launch write; return its name."""
    folder = tempfile.mkdtemp(prefix="unisono-stats-")
    os.environ["UNISONO_STATS_DIR"] = folder
    return folder


def take_stats(folder: str) -> str:
    """Return the table, and remove the folder."""
    try:
        return stats_table(read_stats(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read_stats(folder: str) -> list[dict[str, Any]]:
    """Return the statistics of all groups of all workers, in the order of ranks."""
    found: list[dict[str, Any]] = []
    for path in Path(folder).glob("stats_rank_*.json"):
        found += json.loads(path.read_text(encoding="utf-8"))
    return sorted(found, key=lambda stats: stats["rank"])


def stats_table(all_stats: Sequence[dict[str, Any]]) -> str:
    """Return the table of all groups: their operations, and the ranks that were waited for."""
    lines = []
    for name, members in grouped((stats["group"], stats) for stats in all_stats).items():
        lines.append(f"calls in group '{name}' on {len(members)} ranks of this node")
        lines += [_HEAD, *_operations(members), *_waits(members)]
    return "\n".join(lines) or "no worker has recorded a call"


def _operations(members: Sequence[dict[str, Any]]) -> list[str]:
    """Return a row for each operation; `calls` are those of the rank with most."""
    names = list(dict.fromkeys(op for stats in members for op in stats["operations"]))
    lines = []
    for op in names:
        rows = [(m["operations"][op], m["rank"]) for m in members if op in m["operations"]]
        calls = max(row["calls"] for row, _ in rows)
        nbytes = sum(row["nbytes"] for row, _ in rows)
        middle = median(row["median_s"] for row, _ in rows)
        worst_s, rank = max((row["worst_s"], rank) for row, rank in rows)
        lines.append(
            f"  {op:30}{calls:9}{nbytes / 1e6:12.3f}{middle * 1e6:12.1f}{worst_s * 1e3:12.3f}"
            f"  {rank}"
        )
    return lines


def _waits(members: Sequence[dict[str, Any]]) -> list[str]:
    """Return a row for each rank for which the others have waited, longest first."""
    sums: dict[str, float] = {}
    for stats in members:
        for rank, waited_s in stats["waited_s"].items():
            sums[rank] = sums.get(rank, 0.0) + waited_s
    total_s = sum(sums.values())
    if not total_s:
        return []
    slowest = sorted(sums.items(), key=lambda item: -item[1])[:8]
    return [
        "  time that all these ranks have waited for a rank",
        *(f"  rank {rank:>6}{s:12.3f} s{s / total_s:8.0%}" for rank, s in slowest),
    ]
