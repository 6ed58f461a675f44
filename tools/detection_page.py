"""Write docs/reference/environment-detection.md: how init_process_group() knows who started it.

Run from the repository root: `make docs`. A test fails when the page is out of date.
"""

from __future__ import annotations

from pathlib import Path

from unisono.rendezvous.launchers import LAUNCHERS, Launcher

PAGE = Path("docs/reference/environment-detection.md")

HEAD = """\
# How a process knows its place

Written by `tools/detection_page.py` from the table in `src/unisono/rendezvous/launchers.py`; do
not edit.

`init_process_group()` without arguments, and `init_method="env://"`, ask the environment. The rows
are tried from top to bottom; a launcher counts if its rank variable is set. Where a cell lists
several variables, the first that is set is taken.

| started by | rank | world size | local rank | on one host if |
|---|---|---|---|---|
"""

TAIL = """
SLURM_PROCID counts only beside a variable that begins with SLURM_STEP: a batch script outside of
srun has it too. PMI's variables do not count where Slurm's say the same (`srun --mpi=pmi2`): those
know about hosts too. Nothing tells a pod of an Indexed Job how many there are, so WORLD_SIZE has to
be set (to the job's `completions`).

## Where the ranks meet

1. At MASTER_ADDR:MASTER_PORT if both are set; rank 0 runs the store there (under `unisono run` and
   torchrun, the launcher does).
2. On one host without these: in a file in `unisono-<user id>` below the temporary folder. Its name
   comes from the job's id (PMIX_NAMESPACE, SLURM_JOB_ID and SLURM_STEP_ID) or, under Hydra, from
   the process that started the ranks. No port is needed; any number of jobs can run at once.
3. On several hosts under srun: on the first host of SLURM_STEP_NODELIST, at a port from 16384 to
   32767 that follows from the job's and the step's number, and is another at each
   `init_process_group()` of a process.
4. In an Indexed Job: at the pod with index 0 (`<job>-0`, with this pod's domain: the job needs a
   headless service), port 29500 and then the next ones.
5. Otherwise it is an error that asks for MASTER_ADDR. One of MASTER_ADDR and MASTER_PORT alone
   replaces the derived one.

## Worlds of one

Without any of these variables the world has one rank. But `init_process_group()` refuses, and says
why, when several processes were meant and each would get a world of its own:

- SLURM_NTASKS, SLURM_NPROCS, SLURM_NNODES or PMI_SIZE is more than 1, but no launcher started this
  process (a batch script that forgot `srun`);
- JOB_COMPLETION_INDEX is set, but not WORLD_SIZE;
- RANK=0 and WORLD_SIZE=1 are left over in the environment of one of several processes.

`init_process_group(rank=0, world_size=1)` is a world of one in any case.

`unisono run --dry-run` prints what a launch would set for each worker.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page."""
    return HEAD + "".join(map(_row, LAUNCHERS)) + TAIL


def _row(launcher: Launcher) -> str:
    one_host = [f"{name} = world size" for name in launcher.local_size]
    one_host += [f"{name} = 1" for name in launcher.nodes]
    cells = [
        launcher.name,
        launcher.rank,
        ", ".join(launcher.world_size),
        ", ".join(launcher.local_rank) or "-",
        ", ".join(one_host) or "never",
    ]
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    main()
