"""Write docs/reference/environment-detection.md: rank and world size under each launcher.

Run from the repository root: `make docs`. A test fails when the page is out of date.
"""

from __future__ import annotations

from pathlib import Path

from unisono.core.rendezvous.launchers import LAUNCHERS, Launcher

PAGE = Path("docs/reference/environment-detection.md")

HEAD = """\
# Rank and world size detection

Written by `tools/detection_page.py` from the table in
`src/unisono/core/rendezvous/launchers.py`; do not edit.

`init_process_group()` without arguments, and `init_method="env://"`, read the environment. The rows
are tried from top to bottom: a launcher is detected if its rank variable is set. The first row also
needs WORLD_SIZE. If a cell lists several variables, the first set variable is used.

| started by | rank | world size | local rank | on one host if |
|---|---|---|---|---|
"""

TAIL = """
SLURM_PROCID counts only if a variable that begins with SLURM_STEP is set, because a batch script
outside of srun also has SLURM_PROCID. If Slurm's variables have the same values as PMI's
(`srun --mpi=pmi2`), Slurm's are used, because they also describe the hosts. A pod of an Indexed Job
cannot read the number of pods, so set WORLD_SIZE to the job's `completions`. In a Volcano job of
several tasks use the plug-in `pytorch`, which sets the variables of the first row.

## Where the ranks meet

1. If MASTER_ADDR and MASTER_PORT are set: at that address. Rank 0 runs the store there; under
   `unisono run` and torchrun the launcher does.
2. On one host: in a file in `unisono-<user id>` in the temporary folder, whose name comes from the
   job's id.
3. On several hosts under srun: on the first host of SLURM_STEP_NODELIST, at a port from 16384 to
   32767 that is derived from the numbers of job and step. If another program has it, rank 0 takes
   one of the next 7. With `srun -m arbitrary` the others look on all hosts of the list.
4. On several hosts under mpiexec of MPICH or Intel MPI: rank 0 chooses a port, and mpiexec carries
   its addresses to the other ranks (PMI-1). UNISONO_HOST and MASTER_PORT of rank 0 replace them.
   Under mpiexec of Open MPI: on the host of mpiexec (PMIX_NAMESPACE, OMPI_MCA_orte_hnp_uri), at a
   derived port. If rank 0 is on another host, it raises at once, and mpiexec ends the job.
5. In an Indexed Job: at the pod with index 0, port 29500 and then the next ports. The name of that
   pod is `<job>-0` with the domain of this pod, so the job needs a headless service.
6. In a LeaderWorkerSet: at LWS_LEADER_ADDRESS, and in a Volcano job (plug-ins `env` and `svc`) at
   the first host of `VC_*_HOSTS`, at the same ports.
   UNISONO_PORTS replaces the ports of 3, 5 and 6: the first ports of the range count.
7. Otherwise: an error asks for MASTER_ADDR. If only MASTER_ADDR or only MASTER_PORT is set, it
   replaces the derived value.

## Worlds of one

Without these variables the world has one rank. `init_process_group()` raises an error with the
reason if several processes were started, but each would get a world of one:

- SLURM_NTASKS, SLURM_NPROCS, SLURM_NNODES or PMI_SIZE is more than 1, but no launcher started this
  process (a batch script without `srun`);
- JOB_COMPLETION_INDEX is set, but WORLD_SIZE is not;
- one of several processes has RANK=0 and WORLD_SIZE=1 from an earlier environment.

`init_process_group(rank=0, world_size=1)` always makes a world of one.

`unisono run --dry-run` prints the variables of each worker.
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
