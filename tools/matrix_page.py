"""Write docs/reference/matrix.md: what every operation gives on every dtype, from a run of it all.

Run from the repository root: `make docs`. A test fails when the page is out of date.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T", bound=tuple[Any, ...])

PAGE = Path("docs/reference/matrix.md")
SIZES = (1, 2, 3, 4, 7, 8)
SIGNS = {"equal": "=", "rounded": "~", "UnsupportedError": "-"}

Cell = tuple[str, str, str, str]

HEAD = """\
# What every operation gives on every dtype

Written by `tools/matrix_page.py` from a run of the tests' matrix; do not edit.

Every operation was run on every dtype with every reduce op, on arrays of these layouts: C order,
Fortran order, every second element, negative stride, 0-d, empty, and with one element more or less
than the ranks can share equally; with {sizes} ranks; on the native and on the reference engine. The
results were compared with NumPy on every rank, {count:,} comparisons in all, and the ranks' results
of all_reduce with one another, bit by bit. Inputs that are not to change were looked at, too, and
so were the gaps between the elements of strided arrays.

| sign | meaning |
|---|---|
| = | equal to NumPy, bit by bit |
| ~ | within the rounding of p - 1 operations (below); the same bits on all ranks |
| - | `UnsupportedError` on every rank, before anything is sent; the group stays usable |

Rounding: at most (p + 1) * eps * the reduction of the absolute values, 4 times that for complex
numbers. AVG of integers rounds towards zero. SUM and PRODUCT of bool are "or" and "and". Integers
wrap around as NumPy's do.

Layout, size, number of ranks and engine made no difference in any cell.
"""


def main() -> None:
    """Run the matrix and write the page."""
    sys.path.insert(0, "tests/groups")
    from matrix_bodies import matrix

    from unisono.testing import run

    found: Counter[Cell] = Counter()
    for size in SIZES:
        for engine in ("native", "reference"):
            for _, cells in run(matrix, size, args=("numpy",), engine=engine, timeout=300):
                found += cells
    PAGE.write_text(page(found, SIZES), encoding="utf-8")


def page(found: Counter[Cell], sizes: Sequence[int]) -> str:
    """Return the page's text for the cells of all ranks of all runs."""
    shown = f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"
    moving = [cell for cell in found if not cell[2]]
    reducing = [cell for cell in found if cell[2] and cell[1]]
    refused = [cell for cell in found if not cell[1]]
    parts = [
        HEAD.format(sizes=shown, count=sum(found.values())),
        "## Operations that move data\n",
        *table("operation", "dtype", [(name, dtype, end) for name, dtype, _, end in moving]),
        "## Operations that reduce\n",
    ]
    names = grouped([(name, (dtype, op, end)) for name, dtype, op, end in reducing])
    for group, cells in names:
        parts += [f"{', '.join(f'`{name}`' for name in group)}:\n", *table("dtype", "op", cells)]
    parts += [
        "## Sizes that do not fit\n",
        "Two elements per rank, and one element more or less in the array of all:\n",
        *(
            f"- `{name}`, {extra}: `{end}` on every rank; the group stays usable"
            for name, _, extra, end in sorted(refused)
        ),
    ]
    return "\n".join(parts) + "\n"


def table(rows: str, columns: str, cells: list[tuple[str, str, str]]) -> list[str]:
    """Return a table's lines; rows and columns that are alike share one."""
    by_column = grouped([(column, (row, end)) for row, column, end in cells])
    heads = [", ".join(names) for names, _ in by_column]
    wide = [(row, (names[0], end)) for names, column in by_column for row, end in column]
    lines = [f"| {rows} \\ {columns} | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for names, found in grouped(wide):
        ends = dict(found)
        signs = " | ".join(
            SIGNS[ends[column[0]]] if column[0] in ends else "" for column, _ in by_column
        )
        lines.append(f"| {', '.join(names)} | {signs} |")
    return [*lines, ""]


def grouped(pairs: Sequence[tuple[str, T]]) -> list[tuple[list[str], list[T]]]:
    """Return names with what belongs to them; names to which the same belongs are one entry."""
    belongs: dict[str, set[T]] = {}
    for name, one in pairs:
        belongs.setdefault(name, set()).add(one)
    groups: dict[frozenset[T], list[str]] = {}
    for name, all_of_it in belongs.items():
        groups.setdefault(frozenset(all_of_it), []).append(name)
    return [(names, sorted(all_of_it)) for all_of_it, names in groups.items()]


if __name__ == "__main__":
    main()
