"""Memory that processes share, memory that is left, and kills for lack of it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import sys
from typing import NamedTuple

from unisono.core.platform.machine import memory_cgroup
from unisono.core.platform.posix import NONBLOCK
from unisono.core.platform.proc import read_text

_RECORD_BYTES = 8192
# The kernel makes this much memory at once.
_PART_BYTES = 4 << 20
_NONE = "this system has no memfd_create"


# --- shared between processes ------------------------------------------------------------------


def has_memory_files() -> bool:
    """Whether the system has files in memory."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def new_memory_file(name: str, flags: int = 0) -> int:
    """Return the descriptor of a file in memory.

    Args:
        name: Of the file.
        flags: Status flags of the open file, such as os.O_APPEND.

    Raises:
        OSError: The system has none, or no memory.
    """
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, _NONE)
    made = os.memfd_create(name)
    if flags:
        import fcntl

        fcntl.fcntl(made, fcntl.F_SETFL, flags)
    return made


def open_memory_of(pid: int, fd: int, name: str = "") -> int:
    """Open the file in memory of another process of this user; return a descriptor.

    Args:
        pid: Number of the process.
        fd: Its descriptor.
        name: Of the file; if given, it must be the same.

    Raises:
        OSError: It cannot be opened, or has another name.
    """
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    if name and os.readlink(f"/proc/self/fd/{opened}") != f"/memfd:{name} (deleted)":
        os.close(opened)
        raise OSError(errno.EXDEV, "it is not the same")
    return opened


def reserve(fd: int, nbytes: int) -> None:
    """Give a file in memory its size, and make all of its memory now.

    Otherwise a later write ends in SIGBUS if no memory is left then.

    Raises:
        OSError: There is less memory than that.
    """
    if sys.platform == "linux":
        # A signal, such as Ctrl-C, is handled between two parts. On older kernels a signal that
        # comes while memory is made undoes the part, so a large part would never end under a timer.
        for start in range(0, nbytes, _PART_BYTES):
            os.posix_fallocate(fd, start, min(_PART_BYTES, nbytes - start))


def memory_kind() -> str:
    """Return "memfd", or the reason why processes cannot open each other's memory here."""
    if not has_memory_files():
        return _NONE
    try:
        made = new_memory_file("unisono-probe")
        try:
            os.close(open_memory_of(os.getpid(), made))
        finally:
            os.close(made)
    except OSError as error:
        return f"{error.strerror}: {error.filename or 'memfd_create'}"
    return "memfd"


def why_not_readable(pid: int, address: int, proof: bytes) -> str:
    """Return why this process cannot read `proof` in another process; "" if it can."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return "this system does not have it"
    found = ctypes.create_string_buffer(len(proof))
    # struct iovec: an address and a length.
    here = (ctypes.c_size_t * 2)(ctypes.addressof(found), len(proof))
    there = (ctypes.c_size_t * 2)(address, len(proof))
    one, no_flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    got = libc.process_vm_readv(pid, here, one, there, one, no_flags)
    if got == len(proof) and found.raw == proof:
        return ""
    return os.strerror(ctypes.get_errno()) if got < 0 else "the process number is another's"


# --- what is left ------------------------------------------------------------------------------


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


# --- kills -------------------------------------------------------------------------------------


class Kills(NamedTuple):
    """Processes that the kernel killed for lack of memory; None if it does not count them."""

    in_cgroup: int | None
    on_host: int | None


def kills() -> Kills:
    """Return the kills so far, in this process's cgroup and on the host."""
    events, _ = _cgroup_files()
    return Kills(_field(events, "oom_kill"), _field("/proc/vmstat", "oom_kill"))


def cgroup_limit() -> str:
    """Return the memory limit of this process's cgroup; "" if it is unknown."""
    return read_text(_cgroup_files()[1]).strip()


def open_end_of_kernel_log() -> int | None:
    """Open the kernel's log at its end; None if it may not be read."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | NONBLOCK)
    except OSError:
        return None
    # An older record may name another process with the same number.
    os.lseek(fd, 0, os.SEEK_END)
    return fd


def rest_of_kernel_log(fd: int) -> str:
    """Return the records that have come since the last call."""
    text = ""
    # Each read returns one record; at the end it fails with EAGAIN, an OSError.
    with contextlib.suppress(OSError):
        while True:
            text += os.read(fd, _RECORD_BYTES).decode(errors="replace")
    return text


def _cgroup_files() -> tuple[str, str]:
    """Return the paths of the kill counter and the memory limit of this process's cgroup."""
    root, path = memory_cgroup()
    version_1 = root.endswith("/memory")
    names = ("oom_control", "limit_in_bytes") if version_1 else ("events", "max")
    events, limit = (f"{root}{path}/memory.{name}" for name in names)
    return events, limit


def _field(path: str, name: str) -> int | None:
    for line in read_text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return None


def is_readable(address: int, nbytes: int) -> bool:
    """Return whether the CPU may read the ends of memory, which it may not on a GPU."""
    write = ctypes.CDLL(None).write
    sink, source = os.pipe()
    try:
        ends = address, address + nbytes - 1
        return all(write(source, ctypes.c_void_p(each), 1) == 1 for each in ends)
    finally:
        os.close(sink)
        os.close(source)
