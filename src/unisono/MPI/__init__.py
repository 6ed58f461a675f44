"""mpi4py's module MPI: `from unisono import MPI` in place of `from mpi4py import MPI`.

COMM_WORLD is the default group of the thread's world. The import makes no group: the first use
does, unless there is one. The rank comes from `unisono run`, mpiexec or srun; without a launcher
there is one rank.
"""

from __future__ import annotations

from unisono.adapters.mpi4py.names import all_names as _all_names

globals().update(_all_names())
