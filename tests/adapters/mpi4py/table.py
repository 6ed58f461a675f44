"""Write docs/lab/0015-mpi4py-tests.md from tables of `run_suite`, also of an MPI library.

    python -m tests.adapters.mpi4py.table OURS.md ... --reference MPICH.md ... > PAGE

Of a file that is in several tables the last one that ended counts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

_HEAD = """# mpi4py's own tests on unisono.MPI

Written by `python -m tests.adapters.mpi4py.table` from what `run_suite` measured: the tests of
mpi4py's repository, on unisono, and with mpi4py 4.1 on MPICH at 2 and 3 ranks, 2026-11-29. Others
used the 2 CPUs, too (load 15 to 35). "—": not measured, or not ended in 5 to 10 minutes.

| file | ranks | passed | refused by name | skipped | failed | passed on MPICH |
|---|---|---|---|---|---|---|
"""


def rows_of(paths: list[Path]) -> dict[tuple[str, int], list[int]]:
    """Return passed, refused, skipped and failed, by file and number of ranks."""
    found: dict[tuple[str, int], list[int]] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if cells[0].startswith("test_") and cells[-1] == "yes":
                found[cells[0], int(cells[1])] = [int(cell) for cell in cells[2:6]]
    return found


def main() -> None:
    """Write the page to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ours", type=Path, nargs="+")
    parser.add_argument("--reference", type=Path, nargs="+", required=True)
    given = parser.parse_args()
    ours, theirs = rows_of(given.ours), rows_of(given.reference)
    lines = []
    passed = possible = 0
    for name, ranks in sorted({*ours, *theirs}):
        mine, other = ours.get((name, ranks)), theirs.get((name, ranks))
        if mine and other:
            passed, possible = passed + min(mine[0], other[0]), possible + other[0]
        cells = " | ".join(map(str, mine)) if mine else "— | — | — | —"
        lines.append(f"| {name} | {ranks} | {cells} | {other[0] if other else '—'} |\n")
    share = f"{100 * passed / possible:.1f}" if possible else "0"
    print(f"{_HEAD}{''.join(lines)}\nOf {possible} that pass on MPICH {passed} pass: {share} %.")


if __name__ == "__main__":
    main()
