"""`unisono run --mpi`: make the workers one MPI world, then run the script.

`from mpi4py import MPI` initialises MPI before a line of unisono runs, and each process becomes a
world of its own. So `unisono run` starts this module in place of the script. The module joins the
ranks, and then runs the script, whose mpi4py finds MPI initialised.

    python -m unisono.adapters.mpi.start [-m] script [argument ...]
"""

from __future__ import annotations

import sys

from unisono.adapters.mpi.world import join
from unisono.core.base import config
from unisono.core.base.deadline import Deadline
from unisono.core.rendezvous import rendezvous
from unisono.core.stores import PrefixStore
from unisono.launcher.workers.program import run_program


def main(words: list[str]) -> None:
    """Join the ranks of the environment, then run a script, or a module after "-m"."""
    timeout_s = config.get_float("UNISONO_TIMEOUT")
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout_s)))
    join(PrefixStore("mpi_start", store), rank, size, Deadline(timeout_s))
    store.close()
    run_program(words)


if __name__ == "__main__":
    main(sys.argv[1:])
