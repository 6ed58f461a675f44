"""Properties of this process on this machine: its cores, its start, the text of its errors."""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
import sys

GUARD_HINT = (
    "a process that multiprocessing starts runs the parent's script to find the function; put code "
    'that it must not run again below `if __name__ == "__main__":`'
)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """Return the name of this machine's processor."""
    found = re.search(r"^model name\s*:\s*(.*\S)", read_text("/proc/cpuinfo"), re.M)
    return found[1] if found else platform.processor() or "unknown"


def is_importing_main() -> bool:
    """Return whether this is a child of multiprocessing that still runs its parent's script."""
    process = sys.modules.get("multiprocessing.process")
    # multiprocessing reads the same attribute to refuse children of such a child.
    return process is not None and hasattr(process.current_process(), "_inheriting")


def read_text(path: str) -> str:
    """Return the text of a file in /proc or /sys; "" if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def resident_bytes(pid: int) -> int | None:
    """Return the memory of a process of this host; None if it is unknown."""
    pages = read_text(f"/proc/{pid}/statm").split()
    return int(pages[1]) * resource.getpagesize() if pages else None


def available_memory_bytes() -> int | None:
    """Return the memory that this process can still get, swap included; None if it is unknown.

    It is the least of the host's memory and the limits of this process's cgroups.
    """
    fields = re.findall(r"^(MemAvailable|SwapFree): +(\d+) kB", read_text("/proc/meminfo"), re.M)
    if not fields:
        return None
    host = {name: 1024 * int(kilobytes) for name, kilobytes in fields}
    free = sum(host.values())
    root, path = memory_cgroup()
    limit, used, total = (
        ("limit_in_bytes", "usage_in_bytes", "total_")
        if root.endswith("/memory")
        else ("max", "current", "")
    )
    while True:
        folder = f"{root}{path}/memory"
        sizes = [read_text(f"{folder}.{name}").strip() for name in (limit, used)]
        if all(map(str.isdecimal, sizes)):  # "max" is no limit
            # The kernel drops cached files before it kills a process.
            cached = re.findall(
                rf"^{total}(?:in)?active_file (\d+)$", read_text(f"{folder}.stat"), re.M
            )
            left = int(sizes[0]) - int(sizes[1]) + sum(map(int, cached))
            free = min(free, max(left, 0) + host.get("SwapFree", 0))
        if not path:
            return free
        path = path.rpartition("/")[0]


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


def stat_fields(pid: int) -> list[str]:
    """Return the fields of a process in /proc from the third on, its state; empty if it has ended.

    Source: proc_pid_stat(5).
    """
    # The name of the program, in parentheses, may contain any character.
    return read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def is_of_this_user(pid: int) -> bool:
    """Whether the effective user of a process of this host is that of this process."""
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:
        return False


def reason_of(error: BaseException) -> str:
    """Return the text of an error in one line; for an OSError without the number."""
    if isinstance(error, OSError) and error.strerror:
        if error.errno == errno.EMFILE:
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return f"{error.strerror}: this process may have {most} (ulimit -n)"
        return error.strerror
    return str(error).partition("\n")[0] or type(error).__name__
