"""This machine and the part of it that this process may use."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import platform
import re
import sys
from collections.abc import Collection, Sequence

from unisono.core.platform.proc import read_text

CAN_BIND = sys.platform == "linux" and hasattr(os, "sched_setaffinity")
"""Whether the system can bind processes to cores."""


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(allowed_cpus())


def allowed_cpus(pid: int = 0) -> Collection[int]:
    """Return the numbers of the cores that a process may use; all if nothing can be bound.

    Args:
        pid: The process; 0: this one.

    Raises:
        OSError: There is no such process.
    """
    if sys.platform == "linux" and hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(pid)
    return range(os.cpu_count() or 1)


def bind(cpus: Collection[int]) -> None:
    """Bind this process to some cores; see CAN_BIND."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, cpus)


def cpu_model() -> str:
    """Return the name of this machine's processor."""
    found = re.search(r"^model name\s*:\s*(.*\S)", read_text("/proc/cpuinfo"), re.M)
    return found[1] if found else platform.processor() or "unknown"


def by_core(cpus: Sequence[int]) -> list[list[int]]:
    """Group hardware threads by core; if the cores are unknown, each alone."""
    cores: dict[str, list[int]] = {}
    for cpu in cpus:
        siblings = read_text(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings or str(cpu), []).append(cpu)
    return list(cores.values())


def cpu_quota() -> float:
    """Return the strictest time limit, in CPUs, of this process's cgroup and of those above it.

    It is infinity without a limit, and with version 1 of cgroups.
    """
    path = next(
        (line[3:] for line in read_text("/proc/self/cgroup").splitlines() if line[:3] == "0::"), ""
    )
    limits = [math.inf]
    while True:
        quota, _, period = read_text(f"/sys/fs/cgroup{path}/cpu.max").strip().partition(" ")
        if quota.isdecimal() and period.isdecimal():
            limits.append(int(quota) / int(period))
        if path in ("", "/"):
            return min(limits)
        path = os.path.dirname(path)


def memory_cgroup() -> tuple[str, str]:
    """Return the folder of all cgroups for memory, and the path of this process's cgroup in it.

    The path is "" in the folder itself, else it begins with "/". With version 1 of cgroups the
    folder ends in "/memory".
    """
    found = ""
    for line in read_text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return "/sys/fs/cgroup/memory", path.rstrip("/")
        if not controllers:
            found = path.rstrip("/")
    return "/sys/fs/cgroup", found


def boot_and_processes() -> tuple[str, int] | None:
    """Return the id of this boot, and that of the namespace of process ids; None if unknown.

    Processes for which both are equal see each other's process ids. Each container numbers its own.
    """
    if not (boot := read_text("/proc/sys/kernel/random/boot_id").strip()):
        return None
    try:
        return boot, os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


def clock_name() -> str:
    """Return a name for the monotonic clock of this process.

    All processes of a host read one clock, unless the host starts again or they are in different
    time namespaces.
    """
    name = read_text("/proc/sys/kernel/random/boot_id").strip() or platform.node()
    with contextlib.suppress(OSError):
        name += f" {os.readlink('/proc/self/ns/time')}"
    return name


def most_descriptors() -> float:
    """Return how many descriptors this process may open; infinity without a limit."""
    if sys.platform == "win32":
        return math.inf
    import resource

    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if most == resource.RLIM_INFINITY else most


def page_bytes() -> int:
    """Return the size of a page of memory."""
    return mmap.PAGESIZE


def huge_pages() -> str:
    """Return when the kernel makes huge pages: "always", "madvise" or "never"; "" if unknown."""
    found = re.search(r"\[(\w+)\]", read_text("/sys/kernel/mm/transparent_hugepage/enabled"))
    return found[1] if found else ""


def load_average() -> float:
    """Return how many processes ran or waited for a core in the last minute; 0 if unknown."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def busy_text() -> str:
    """Return that more processes run than the machine has cores, or ""."""
    load, cores = load_average(), os.cpu_count() or 1
    return f"the machine is busy (load {load:.1f} on {cores} cores)" if load > cores else ""
