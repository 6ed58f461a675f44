"""Write docs/reference/matrix.md: the result of every operation on every dtype, from a run.

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
# The runs of the tests: engine and number of ranks.
RUNS = [("native", n) for n in (1, 2, 3, 8)] + [("reference", n) for n in (2, 3, 5)]
SIGNS = {"equal": "=", "rounded": "~", "UnsupportedError": "-"}

Cell = tuple[str, str, str, str]

HEAD = """\
# Supported dtypes and reduce ops

Written by `tools/matrix_page.py` from a run of the tests' matrix; do not edit.

The tests run every operation on every dtype with every reduce op. The native engine runs on
{native} ranks, the reference engine on {reference} ranks. The arrays have these layouts: C order,
Fortran order, every second element, negative stride, 0-d and empty. Some arrays have one element
more or less than a multiple of the ranks.

Every rank compares its results with NumPy. The results of all_reduce are also compared between
ranks, bit by bit. The tests also check that inputs and the gaps between strided elements do not
change.

| sign | meaning |
|---|---|
| = | equal to NumPy, bit by bit |
| ~ | within the rounding of p - 1 operations (below); the same bits on all ranks |
| - | `UnsupportedError` on every rank, before anything is sent; the group stays usable |

Rounding: at most (p + 1) * eps * the reduction of the absolute values, 4 times that for complex
numbers. AVG of integers rounds toward zero. SUM and PRODUCT of bool are "or" and "and". Integers
wrap around, as in NumPy.

Layout, size, number of ranks and engine do not change any cell.

Records, texts, dates and `longdouble` move as bytes.
"""


def main() -> None:
    """Run the matrix and write the page."""
    sys.path.insert(0, str(Path().resolve()))
    from tests.support.matrix import matrix
    from unisono.testing import run

    found = sum(run(matrix, 3, timeout=300), Counter[Cell]())
    PAGE.write_text(page(found), encoding="utf-8")


def page(found: Counter[Cell]) -> str:
    """Return the page's text for the cells of a run on 3 ranks, which has all of them."""
    native, reference = (
        ", ".join(str(size) for engine, size in RUNS if engine == name)
        for name in ("native", "reference")
    )
    moving = [cell for cell in found if not cell[2]]
    reducing = [cell for cell in found if cell[2] and cell[1]]
    refused = [cell for cell in found if not cell[1]]
    parts = [
        HEAD.format(native=native, reference=reference),
        "## Operations that move data\n",
        *table("operation", "dtype", [(name, dtype, end) for name, dtype, _, end in moving]),
        "## Operations that reduce\n",
    ]
    names = grouped([(name, (dtype, op, end)) for name, dtype, op, end in reducing])
    for group, cells in names:
        parts += [f"{', '.join(f'`{name}`' for name in group)}:\n", *table("dtype", "op", cells)]
    parts += [
        "## Sizes that do not fit\n",
        "Each rank has 2 elements; the array of all ranks has one element more or less. Every rank",
        "raises the error, and the group stays usable:\n",
        *(
            f"- `{name}`: `{end}`"
            for name, end in sorted({(name, end) for name, _, _, end in refused})
        ),
    ]
    return "\n".join(parts) + "\n"


def table(rows: str, columns: str, cells: list[tuple[str, str, str]]) -> list[str]:
    """Return a table's lines; equal rows and equal columns are merged."""
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
    """Return names with their values; names with equal values share an entry."""
    belongs: dict[str, set[T]] = {}
    for name, one in pairs:
        belongs.setdefault(name, set()).add(one)
    groups: dict[frozenset[T], list[str]] = {}
    for name, all_of_it in belongs.items():
        groups.setdefault(frozenset(all_of_it), []).append(name)
    return [(names, sorted(all_of_it)) for all_of_it, names in groups.items()]


if __name__ == "__main__":
    main()
