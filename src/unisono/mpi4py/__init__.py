"""`import unisono.mpi4py` puts `unisono.MPI` in the place of mpi4py; `python -m` runs a program.

mpi4py's own modules in Python, such as `mpi4py.util.pkl5`, are used if mpi4py is installed.
"""

from __future__ import annotations

from unisono.adapters.mpi4py.names import replace

replace()
