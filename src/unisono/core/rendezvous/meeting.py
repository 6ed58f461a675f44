"""Open a store for ranks whose launcher does not set MASTER_ADDR and MASTER_PORT.

On one host the store is a file, which needs no port. On several hosts it has a host and a port that
each rank can derive.
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

from unisono.core.base import config
from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.net.interfaces import chosen_hosts, published_hosts, reachable_hosts
from unisono.core.base.net.ports import allowed_ports
from unisono.core.platform.posix import require_posix
from unisono.core.platform.processes import entry_of, initial_environment
from unisono.core.rendezvous.launchers import LauncherPlace, first_value
from unisono.core.rendezvous.pmi import carry
from unisono.core.rendezvous.search import ANSWER_S, search, serve_at
from unisono.core.stores import FileStore, PrefixStore, Store, TCPStore
from unisono.errors import Context, RendezvousError

_KUBERNETES_PORT = 29500
# Below the ephemeral ports of Linux (32768 and above).
_FIRST_PORT, _PORTS = 16384, 16384

# The ports at which rank 0 may be. More: further ports are tried while rank 0 is not up yet.
_PLACES = 8

# The number of meetings of this process. It is equal on all ranks, so each meeting has a file of
# its own. A rank that leaves the last meeting late cannot mix its keys into the next.
_meetings = itertools.count()


def open_store(place: LauncherPlace, env: Mapping[str, str], timeout: Timeout) -> Store:
    """Open the store of a place; MASTER_ADDR or MASTER_PORT may be set, but not both.

    Raises:
        RendezvousError: The ranks are on several hosts, and the host of rank 0 is unknown.
    """
    address, port_text = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    meeting = next(_meetings)
    if place.one_host and not address and not port_text:
        return FileStore(_meeting_file(place, env, meeting), place.world_size, timeout=timeout)
    job = f"{place.job or place.launcher.rank}/{meeting}"
    fd = env.get("PMI_FD", "")
    if not (address or place.one_host) and place.launcher.rank == "PMI_RANK" and fd.isdecimal():
        tcp_store = _store_by_pmi(place, int(fd), int(port_text or 0), meeting, timeout)
    else:
        hosts = [address] if address else hosts_of_rank_0(place, env)
        ports = [int(port_text)] if port_text else job_ports(place, meeting)
        if len(hosts) == len(ports) == 1:
            tcp_store = TCPStore(
                hosts[0], ports[0], is_master=place.rank == 0, timeout=timeout, multi_tenant=True
            )
        elif place.rank == 0:
            here = env.get("SLURMD_NODENAME", "")
            tcp_store = serve_at(here if here in hosts else hosts[0], ports, job, timeout)
        else:
            tcp_store = search(hosts, ports, job, place.rank, timeout)
    # The prefix keeps these ranks out of the keys of another job, whose store they may reach.
    return PrefixStore(job, tcp_store, owns_store=True)


def _store_by_pmi(
    place: LauncherPlace, fd: int, port: int, meeting: int, timeout: Timeout
) -> TCPStore:
    """Open the store on rank 0, whose mpiexec carries its addresses to the other ranks.

    Raises:
        RendezvousError: mpiexec does not answer, or no address leads to rank 0.
    """
    limit = Deadline(timeout)
    key = f"unisono-{meeting}"
    if place.rank == 0:
        # It cannot wait for ranks that do not know its address yet.
        store = TCPStore("::", port, is_master=True, timeout=timeout, wait_for_workers=False)
        own = [config.get("UNISONO_HOST"), *chosen_hosts()]
        hosts = [*published_hosts(), *(filter(None, own) if any(own) else reachable_hosts())]
        try:
            carry(fd, key, f"{store.port},{','.join(hosts)}", limit.remaining())
        except BaseException:
            store.close()
            raise
        return store
    text, *hosts = carry(fd, key, None, limit.remaining()).split(",")
    errors = []
    for host in hosts:
        try:
            # Rank 0 listens already, so only an address of another network does not answer.
            socket.create_connection((host, int(text)), ANSWER_S).close()
        except OSError as error:
            errors.append(f"{host} ({error.strerror or error})")
            continue
        store = TCPStore(host, int(text), timeout=limit.remaining(), wait_for_workers=False)
        store.set_timeout(timeout)
        return store
    tried = ", ".join(errors) or "any host"
    raise RendezvousError(
        f"rank {place.rank} cannot reach rank 0 at port {text} of {tried}",
        context=Context(rank=place.rank, peers=(0,)),
        hint="set UNISONO_HOST on rank 0 to an address that the other hosts reach",
    )


def job_ports(place: LauncherPlace, meeting: int = 0) -> list[int]:
    """Return the ports at which rank 0 may serve the store; equal on all ranks of a job.

    They differ between meetings, so that a rank seldom reaches the store of the last one.

    Raises:
        RendezvousError: The job has no name.
    """
    allowed = allowed_ports()
    if place.launcher.is_pod:
        return [allowed[meeting % len(allowed)] if allowed else _KUBERNETES_PORT + meeting]
    if not place.job:
        raise RendezvousError(
            f"{place.launcher.name} started {place.world_size} processes, but MASTER_PORT is not "
            "set and the job has no name to derive a port from",
            hint="set MASTER_PORT to the same free port for all processes",
        )
    ports = allowed or range(_FIRST_PORT, _FIRST_PORT + _PORTS)
    # In UNISONO_PORTS stores have the first ports.
    first = meeting + (0 if allowed else zlib.crc32(place.job.encode()))
    return [ports[(first + more) % len(ports)] for more in range(min(_PLACES, len(ports)))]


def hosts_of_rank_0(place: LauncherPlace, env: Mapping[str, str]) -> list[str]:
    """Return the host of rank 0, or all hosts on which rank 0 may be.

    Raises:
        RendezvousError: The host is unknown, or rank 0 is not where the other ranks expect it.
    """
    if place.one_host:
        return ["127.0.0.1"]
    if hosts := first_value(place.launcher.first_host, env):
        return [hosts.partition(",")[0].strip()]
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST")
    if place.launcher.rank == "SLURM_PROCID" and nodes:
        return _slurm_hosts(place, env, _node_list(nodes))
    if place.launcher.rank == "JOB_COMPLETION_INDEX":
        # A pod's name is <job>-<index>. Other pods reach it as <job>-<index>.<service>...
        name, dot, domain = socket.getfqdn().partition(".")
        job, dash, index = name.rpartition("-")
        if dash and index == str(place.rank):
            return [f"{job}-0{dot}{domain}"]
    if host := host_of_mpiexec(place, env):
        return [host]
    raise RendezvousError(
        f"{place.launcher.name} started {place.world_size} processes on several hosts, but "
        "MASTER_ADDR is not set and the host of rank 0 is unknown",
        hint="set MASTER_ADDR to the host of rank 0 for all processes (mpiexec -genv or -x)",
    )


def _slurm_hosts(place: LauncherPlace, env: Mapping[str, str], nodes: list[str]) -> list[str]:
    """Return the first host of a step; of `srun -m arbitrary` all, because the list is sorted."""
    if "arbitrary" in env.get("SLURM_DISTRIBUTION", ""):
        return nodes
    here = env.get("SLURMD_NODENAME", nodes[0])
    if place.rank == 0 and here != nodes[0]:
        raise RendezvousError(
            f"rank 0 is on {here}, but the other ranks look for it on {nodes[0]}, the first host "
            "of SLURM_STEP_NODELIST",
            context=Context(rank=0, peers=(0,)),
            hint=f"set MASTER_ADDR={here} for all processes",
        )
    return nodes[:1]


def _node_list(text: str) -> list[str]:
    """Return the hosts of Slurm's notation: "gpu[007-008,12]-a,cpu3" means 4 hosts."""
    hosts = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        # Alternately a text and what is in brackets.
        parts = re.split(r"\[([^\]]*)\]", item)
        choices = [_numbers(part) if i % 2 else [part] for i, part in enumerate(parts)]
        hosts += ["".join(chosen) for chosen in itertools.product(*choices)]
    return hosts


def _numbers(text: str) -> list[str]:
    """Return the numbers of "007-009,12", each with the zeros of its range."""
    ranges = [part.partition("-") for part in text.split(",")]
    return [
        f"{number:0{len(low)}}"
        for low, _, high in ranges
        for number in range(int(low), int(high or low) + 1)
    ]


def host_of_mpiexec(place: LauncherPlace, env: Mapping[str, str]) -> str:
    """Return the host on which Open MPI's mpiexec runs, usually with rank 0; "" if unknown.

    Raises:
        RendezvousError: This is rank 0, and it is on another host.
    """
    version_5 = re.fullmatch(r"prterun-(.+)-\d+@\d+", env.get("PMIX_NAMESPACE", ""))
    version_4 = re.search(r"tcp://([^,:;]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    if not (found := version_5 or version_4):
        return ""
    # "<job>.<number>;<address>": the daemon on the host of mpiexec has the number 0.
    if place.rank == 0 and ".0;" not in env.get("PMIX_SERVER_URI2", ".0;"):
        here = socket.gethostname()
        raise RendezvousError(
            f"rank 0 is on {here}, but the other ranks look for it on {found[1]}, the host of "
            "mpiexec",
            context=Context(rank=0, peers=(0,)),
            hint=f"start mpiexec on {here}, or with -x MASTER_ADDR={here}",
        )
    return found[1]


def _meeting_file(place: LauncherPlace, env: Mapping[str, str], meeting: int) -> str:
    """Return a path that all ranks of a job have in common and no other process derives."""
    variable = place.launcher.rank
    job = place.job or _launcher_process(f"{variable}={env[variable]}")
    digest = hashlib.sha256(f"{place.launcher.name}/{job}/{meeting}".encode()).hexdigest()[:32]
    return os.path.join(_private_folder(), digest)


def _private_folder() -> str:
    """Make or find a folder that only this user can write to.

    Raises:
        RendezvousError: Another user owns a file of that name or may write to it.
    """
    require_posix("a meeting of ranks in a folder")
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
    """Return an identifier of the process that started all ranks of this host.

    It is the nearest ancestor without the rank's variable. Between this ancestor and a rank there
    may be a shell or another wrapper, which has the variable.
    """
    pid, started = _parent(os.getpid())
    while pid > 1 and marker in initial_environment(pid):
        pid, started = _parent(pid)
    return f"{pid} {started}"


def _parent(pid: int) -> tuple[int, str]:
    """Return the parent of a process and the parent's start time."""
    if (own := entry_of(pid)) and (above := entry_of(own.parent)):
        return own.parent, above.started
    return os.getppid(), ""
