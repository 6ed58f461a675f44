"""Write docs/reference/mpi4py.md: what unisono.MPI refuses. `make docs` runs it."""

from __future__ import annotations

from pathlib import Path

from unisono.adapters.mpi4py.names import page

if __name__ == "__main__":
    Path("docs/reference/mpi4py.md").write_text(page(), encoding="utf-8")
