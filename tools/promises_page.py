"""Write docs/reference/promises.md: the promises that each engine keeps, from a run of each engine.

Run from the repository root: `make docs`. A test fails when the page is out of date. Without an MPI
library the column of the MPI engine stays as it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

PAGE = Path("docs/reference/promises.md")
NAMES = {"native": "native engine", "reference": "reference engine", "mpi": "MPI engine"}

HEAD = """\
# Promises of each engine

Written by `tools/promises_page.py` from a run of each engine; do not edit.

`tests/support/promises.py` makes each case happen on 3 processes. The column of MPI is the same
for MPICH, Intel MPI and Open MPI. On GPUs:
[NCCL, IntraNodeComm](../howto/gpus.md#checks-and-errors).

"""

MPI = """
## Weaker on MPI

- After a time-out, a loss or an abort in the data of a call MPI may still read and write the arrays
  of that call. No other rank gets numbers from such an array: after a call of more than 50 ms a
  rank asks the others, for 1 s, if they have given up. If the report of a failure takes longer, a
  wrong number is possible.
- On Open MPI a call of 128 KiB or more blocks a thread in MPI, which may stay there after such an
  error and use a core. The process then ends without `MPI_Finalize`, because that would hang.
- Open MPI 5 counts in 32 bits, and Intel MPI loses data of a broadcast of 5 GiB. There the links
  move more than 2,147,483,647 bytes. If only the sizes of lists or splits are that large, the call
  raises, and the group is broken.
- A killed rank: MPICH and Intel MPI without mpiexec go on. Open MPI goes on under
  `mpiexec --enable-recovery`. Other launchers usually end all ranks.
- On one host MPICH reads large arrays out of the memory of the other rank. If that rank is killed
  meanwhile, MPICH may end the reading process with exit status 143. `MPIR_CVAR_CH4_CMA_ENABLE=0`
  avoids that, but then the shrunk group may wait until its time-out. Intel MPI ends the process
  with SIGABRT, and so does MPICH with UNISONO_SHARED_MEMORY=0 on one host.
- Between hosts over TCP Intel MPI may connect to a killed rank for ever. MPICH may crash with
  SIGSEGV when it sends to that rank.
- If a rank is killed while MPI makes a group, in the group's first call, MPI can make no group any
  more. New groups and `shrink_group` then raise UnsupportedError, unless they have
  `CPUOptions(engine="auto")`.
- A library has room for some 2,000 live groups (MPICH: 2,045). The next group fails on all ranks.
- Sums and products of NaNs may differ between ranks in the NaN's bits.

All tests of groups that pass on the native engine pass on MPI at 2, 3 and 4 ranks, except:

"""


def main() -> None:
    """Run the engines and write the page."""
    sys.path.insert(0, str(Path().resolve()))
    from tests.support.promises import ENGINES, column
    from unisono.adapters.mpi.library import why_absent

    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    known = columns(text)
    found = {
        engine: known[engine] if engine == "mpi" and why_absent() else column(engine)
        for engine in ENGINES
    }
    PAGE.write_text(page(found), encoding="utf-8")


def page(found: dict[str, dict[str, str]]) -> str:
    """Return the page's text for the columns of all engines."""
    from tests.adapters.mpi.runner import OTHERWISE

    lines = ["| promise |" + "".join(f" {NAMES[engine]} |" for engine in found)]
    lines.append("|---" * (len(found) + 1) + "|")
    for promise in next(iter(found.values())):
        cells = "".join(f" {cells[promise]} |" for cells in found.values())
        lines.append(f"| {promise} |{cells}")
    rest = [f"- `{name}`: {why}" for name, why in OTHERWISE.items()]
    return HEAD + "\n".join(lines) + "\n" + MPI + "\n".join(rest) + "\n"


def columns(text: str) -> dict[str, dict[str, str]]:
    """Return the columns of a page, by engine."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    names = {title: engine for engine, title in NAMES.items()}
    return {
        names[title]: {row[0]: row[at] for row in rows[1:]}
        for at, title in enumerate(rows[0] if rows else [])
        if at
    }


if __name__ == "__main__":
    main()
