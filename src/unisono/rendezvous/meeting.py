"""Where ranks meet that a launcher started without telling them a place.

On one host in a file, which needs no port; on several at a host and port that all of them can
work out by themselves.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import socket
import stat
import tempfile
import zlib
from collections.abc import Mapping

from unisono.base.deadline import Timeout
from unisono.errors import RendezvousError
from unisono.rendezvous.launchers import Place
from unisono.stores import FileStore, PrefixStore, Store, TCPStore

__all__ = ["first_host", "job_port", "open_store"]

_KUBERNETES_PORT = 29500
# Below the ports that Linux gives to whoever asks for any (32768 and above).
_FIRST_PORT, _PORTS = 16384, 16384

# How often this process has met others. All ranks meet equally often, so each meeting has a
# file of its own: a rank that is late to leave the last one cannot hand on its keys.
_meetings = itertools.count()


def open_store(place: Place, env: Mapping[str, str], timeout: Timeout) -> Store:
    """Open the store of a place without MASTER_ADDR or MASTER_PORT (one of them may be set).

    Raises:
        RendezvousError: The ranks are on several hosts, and nothing says which has rank 0.
    """
    address, port_text = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    meeting = next(_meetings)
    if place.one_host and not address and not port_text:
        return FileStore(_meeting_file(place, env, meeting), place.world_size, timeout=timeout)
    host = address or ("127.0.0.1" if place.one_host else first_host(place, env))
    port = int(port_text) if port_text else job_port(place, meeting)
    tcp_store = TCPStore(
        host,
        port,
        place.world_size,
        is_master=place.rank == 0,
        timeout=timeout,
        multi_tenant=True,
    )
    # Two jobs may come to the same port. One of them then fails to listen there; its other
    # ranks must not disturb the world of the job that they reach instead.
    return PrefixStore(f"{place.job or place.launcher.rank}/{meeting}", tcp_store, owns_store=True)


def job_port(place: Place, meeting: int = 0) -> int:
    """Return a port that all ranks of a job work out alike, another for each meeting.

    Otherwise a rank could come to the next meeting while rank 0 still serves the last one.

    Raises:
        RendezvousError: The job has no name.
    """
    if place.launcher.rank == "JOB_COMPLETION_INDEX":
        return _KUBERNETES_PORT + meeting
    if not place.job:
        raise RendezvousError(
            f"{place.launcher.name} started {place.world_size} processes, but MASTER_PORT is not "
            "set and the job has no name to derive a port from",
            hint="set MASTER_PORT to the same free port for all processes",
        )
    return _FIRST_PORT + (zlib.crc32(place.job.encode()) + meeting) % _PORTS


def first_host(place: Place, env: Mapping[str, str]) -> str:
    """Return the host of rank 0.

    Raises:
        RendezvousError: Nothing says which it is.
    """
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST")
    if place.launcher.rank == "SLURM_PROCID" and nodes:
        return _first_of_node_list(nodes)
    if place.launcher.rank == "JOB_COMPLETION_INDEX":
        # Pods are called <job>-<index>, and <job>-<index>.<service>... for one another.
        name, dot, domain = socket.getfqdn().partition(".")
        job, dash, index = name.rpartition("-")
        if dash and index == str(place.rank):
            return f"{job}-0{dot}{domain}"
    raise RendezvousError(
        f"{place.launcher.name} started {place.world_size} processes on several hosts, but "
        "MASTER_ADDR is not set and nothing else says where rank 0 is",
        hint="set MASTER_ADDR to the host of rank 0 for all processes (mpiexec -genv or -x)",
    )


def _first_of_node_list(nodes: str) -> str:
    """Return the first host of Slurm's notation: "gpu[007-010,12],cpu3" begins with "gpu007"."""
    head = re.match(r"([^,\[]*)(?:\[([^\],-]*)[^\]]*\]([^,\[]*))?", nodes)
    assert head is not None
    return "".join(part or "" for part in head.groups())


def _meeting_file(place: Place, env: Mapping[str, str], meeting: int) -> str:
    """Return a path that is the same for all ranks of a job, and only for them."""
    variable = place.launcher.rank
    job = place.job or _launcher_process(f"{variable}={env[variable]}")
    digest = hashlib.sha256(f"{place.launcher.name}/{job}/{meeting}".encode()).hexdigest()[:32]
    return os.path.join(_private_folder(), digest)


def _private_folder() -> str:
    """Make, or find, a folder in which nobody else can have put anything.

    Raises:
        RendezvousError: Somebody else owns what has that name, or may write to it.
    """
    folder = os.path.join(tempfile.gettempdir(), f"unisono-{os.getuid()}")
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise RendezvousError(f"cannot make {folder!r} to meet in: {error.strerror}") from error
    found = os.lstat(folder)
    private = stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o022
    if found.st_uid != os.getuid() or not private:
        raise RendezvousError(
            f"{folder!r}, where the ranks would meet, is not a folder of this user alone",
            hint="remove it, or set TMPDIR to a folder of your own for all ranks",
        )
    return folder


def _launcher_process(marker: str) -> str:
    """Name the process that started all ranks of this host.

    It is the nearest ancestor without the rank's variable: between it and a rank there may be
    a shell or another wrapper per rank.
    """
    pid, started = _parent(os.getpid())
    while pid > 1 and marker.encode() in _initial_environment(pid):
        pid, started = _parent(pid)
    return f"{pid} {started}"


def _initial_environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []  # another user's: certainly no wrapper of ours


def _parent(pid: int) -> tuple[int, str]:
    """Return a process's parent, and when that was started."""
    try:
        parent = int(_status_fields(pid)[1])
        return parent, _status_fields(parent)[19]
    except OSError:
        return os.getppid(), ""


def _status_fields(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        # The name of the program, in parentheses, may contain blanks.
        return file.read().rpartition(")")[2].split()
