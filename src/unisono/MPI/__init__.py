"""mpi4py's module MPI: `from unisono import MPI` in place of `from mpi4py import MPI`.

The import makes the world, as `init_process_group` does: the rank comes from `unisono run`,
mpiexec or srun; without a launcher there is one rank.
"""

from __future__ import annotations

from unisono.adapters.mpi4py.names import all_names as _all_names

globals().update(_all_names())
