"""Findings about each host for itself: its limits, and how its ranks share memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.cli.doctor.facts import ERROR, OK, WARNING, Examination, Finding, Host, some

_OWN_DESCRIPTORS = 24
"""Descriptors of a rank without peers: files, sockets and memory. With 20 a group can be made."""

_RANK_BYTES = 64 << 20
"""Memory of a rank that has loaded NumPy and unisono."""

_TOPICS = ("cores", "memory", "descriptors", "sharing")


def each_host(facts: Examination) -> Iterator[Finding]:
    """Yield one finding for all hosts that have the same fault, and one for topics without."""
    world_size = sum(host.nprocs for host in facts.hosts)
    faults: dict[Finding, list[str]] = {}
    for host in facts.hosts:
        for fault in (*_limits(host, world_size), *_sharing(host)):
            faults.setdefault(fault, []).append(host.name)
    for fault, names in faults.items():
        yield fault._replace(fact=f"{some(names)}: {fault.fact}")
    faulty = {fault.topic for fault in faults}
    if good := [topic for topic in _TOPICS if topic not in faulty]:
        yield Finding("limits", OK, f"enough on each host: {', '.join(good)}")


def _limits(host: Host, world_size: int) -> Iterator[Finding]:
    limits, nprocs = host.limits, host.nprocs
    fewer = "start fewer ranks, or raise the limit of the job or container"
    if limits.cpu_quota is not None and limits.cpu_quota < nprocs:
        fact = f"the cgroup has the time of {limits.cpu_quota:g} cores for {nprocs} ranks"
        yield Finding("cores", WARNING, fact, fewer)
    elif limits.cores < nprocs:
        yield Finding("cores", WARNING, f"{nprocs} ranks share {limits.cores} cores", fewer)
    if limits.memory_bytes is not None and limits.memory_bytes < nprocs * _RANK_BYTES:
        fact = f"{limits.memory_bytes >> 20} MiB of memory are left for {nprocs} ranks"
        yield Finding("memory", WARNING, fact, fewer)
    # A group needs a connection to each rank of the host; each other rank may need 2.
    least, most = _OWN_DESCRIPTORS + nprocs, _OWN_DESCRIPTORS + 2 * world_size
    if limits.descriptors < most:
        severity = ERROR if limits.descriptors < least else WARNING
        need = f"{least}" if severity == ERROR else f"up to {most}"
        fact = f"a rank needs {need} file descriptors and may have {limits.descriptors}"
        yield Finding("descriptors", severity, fact, f"ulimit -n {most}")


def _sharing(host: Host) -> Iterator[Finding]:
    sharing = host.sharing
    if not sharing.engine:
        fact = f"a second process fails: {sharing.shared_memory}"
        yield Finding("sharing", ERROR, fact, "run `python -c 'import unisono'` there")
        return
    if sharing.engine.startswith("reference"):
        fix = "install unisono with a C++ compiler, unless this engine is intended"
        yield Finding("sharing", WARNING, sharing.engine, fix)
    if host.nprocs == 1:
        return
    if sharing.shared_memory:
        fact = f"ranks cannot share memory: {sharing.shared_memory}"
        fix = "permit memfd_create and /proc in the container"
        yield Finding("sharing", WARNING, fact, fix)
    elif sharing.remote_read:
        fact = f"process_vm_readv fails ({sharing.remote_read}): large arrays are copied once more"
        fix = "sysctl kernel.yama.ptrace_scope=0; for a container, --cap-add SYS_PTRACE"
        yield Finding("sharing", WARNING, fact, fix)
    elif sharing.huge_pages == "never":
        fact = "huge pages are off: large arrays are copied once more"
        fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding("sharing", WARNING, fact, fix)
