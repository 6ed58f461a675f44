"""Write docs/reference/algorithms.md: the cost of every schedule, counted from its steps.

Run from the repository root: `make docs`. A test fails when the page is out of date.
"""

from __future__ import annotations

from pathlib import Path

from unisono.core.schedules import available, build
from unisono.core.schedules.cost import cost
from unisono.core.schedules.ir import COLLECTIVES, ROOTED
from unisono.core.schedules.registry import ALGORITHMS

PAGE = Path("docs/reference/algorithms.md")
WORLD_SIZES = (8, 13)

HEAD = """\
# Algorithms and their cost

Written by `tools/algorithms_page.py` from the schedules; do not edit.

Each cell has two counts for a world of p ranks. The **rounds** are the number of message latencies
in sequence. The **bytes sent** are those of the busiest rank, as a multiple of the size of the
whole data: the vector, or all p blocks together. A dash means that the algorithm does not support
that world size.

Roots are rank 0. Data is not pipelined: a pipeline adds rounds and does not change the bytes.

`one_shot`, `two_shot` and `rank_order` are meant for shared memory, where a rank writes each post
once. The counts here are for an engine that sends each post to every rank that reads it.

`unisono explain all_reduce 1M -n 64` shows the rounds in another world, and the choice of
`unisono.lowlevel.select`. `algorithm="ring"` in a call or
[`UNISONO_ALGO`](environment.md#unisono_algo-choose-algorithms) overrides it,
also with [your own](../howto/algorithms.md).
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page's text."""
    return "\n".join([HEAD, *(section(collective) for collective in COLLECTIVES)])


def section(collective: str) -> str:
    """Return the table of one collective."""
    head = " | ".join(f"p = {p}" for p in WORLD_SIZES)
    lines = [
        f"## {collective}",
        "",
        f"| algorithm | {head} |",
        "|---" * (len(WORLD_SIZES) + 1) + "|",
    ]
    served = {name for p in WORLD_SIZES for name in available(collective, p)}
    rows: dict[str, list[str]] = {}
    for name in [name for name in ALGORITHMS if name in served]:
        cells = " | ".join(cell(collective, name, p) for p in WORLD_SIZES)
        rows.setdefault(cells, []).append(f"`{name}`")
    lines += [f"| {', '.join(names)} | {cells} |" for cells, names in rows.items()]
    return "\n".join(lines) + "\n"


def cell(collective: str, algorithm: str, world_size: int) -> str:
    """Return rounds and bytes of one schedule."""
    if algorithm not in available(collective, world_size):
        return "-"
    root = 0 if collective in ROOTED else -1
    counted = cost(build(collective, algorithm, world_size, root))
    return f"{counted.rounds}; {counted.bytes_sent}"


if __name__ == "__main__":
    main()
