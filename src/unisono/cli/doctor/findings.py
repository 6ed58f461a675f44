"""From facts to findings: pure functions, one for each topic."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from unisono.base.sockets import is_loopback
from unisono.cli.doctor.facts import Examination, Host, Link

ERROR, WARNING, OK = "error", "warning", "ok"

_OWN_DESCRIPTORS = 24
"""Descriptors of a rank without peers: files, sockets and memory. With 20 a group can be made."""

_RANK_BYTES = 64 << 20
"""Memory of a rank that has loaded NumPy and unisono."""

_CLOCK_S = 1.0
"""Difference of clocks from which logs of two hosts mislead. NTP keeps clocks within 0.1 s."""

_RESENT = 0.005
"""Share of lost packets from which TCP is clearly slower. Senders that fill a network lose fewer."""

_SLOW = 3.0
"""How much slower than the median a link must be. Rates of equal links differ by up to 2."""

_SHOWN = 4


class Finding(NamedTuple):
    """One fact, and the remedy.

    Attributes:
        topic: "hosts", "names", "token", "versions", "reach", "packets", "speed", "clocks",
            "cores", "memory", "descriptors" or "sharing".
        severity: "error" if a job would not start or would stop, "warning" or "ok".
        fact: One line.
        fix: One line in the imperative; "" if there is nothing to do.
    """

    topic: str
    severity: str
    fact: str
    fix: str = ""


def findings(facts: Examination) -> list[Finding]:
    """Return the findings, errors first; a topic without a fault has one finding "ok"."""
    found = [finding for topic in _TOPICS for finding in topic(facts)]
    return sorted(found, key=lambda finding: (ERROR, WARNING, OK).index(finding.severity))


def endpoint_fault(host: Host, endpoint: str) -> Finding | None:
    """Return why this host cannot find the endpoint, or would serve it for itself; None if fine."""
    fault = _name_fault(host, endpoint)
    if not fault or is_loopback(endpoint) or _is_named(endpoint, host):
        return None
    return Finding("names", ERROR, fault, f"map {endpoint} to its address in /etc/hosts")


def _hosts(facts: Examination) -> Iterator[Finding]:
    here = _some([host.name for host in facts.hosts])
    if len(facts.hosts) == facts.expected:
        yield Finding("hosts", OK, f"{here}; {_world_size(facts)} ranks")
        return
    absent = [name for name in facts.wanted if not any(_is_named(name, h) for h in facts.hosts)]
    fact = f"{len(facts.hosts)} of {facts.expected} hosts came ({here})"
    fact += f"; absent: {_some(absent)}" if absent else ""
    fix = f"run the command there too; let every host reach {facts.endpoint}"
    yield Finding("hosts", ERROR, fact, fix)


def _names(facts: Examination) -> Iterator[Finding]:
    found = []
    for host in facts.hosts:
        if fault := endpoint_fault(host, facts.endpoint):
            found.append(fault)
        for other in facts.hosts:
            # Alone on its host, or in a job of one host, a rank needs no name.
            if len(facts.hosts) > 1 and (text := _name_fault(host, other.name)):
                about = "; unisono copes, Gloo and MPI may not" if other is host else ""
                fix = f"map {other.name} to its address in /etc/hosts of {host.name}"
                found.append(Finding("names", WARNING, text + about, fix))
    # The endpoint is the name of a host, too.
    yield from {(finding.fact): finding for finding in reversed(found)}.values()
    if not found and len(facts.hosts) > 1:
        yield Finding("names", OK, "every host resolves the names of all hosts")


def _name_fault(host: Host, name: str) -> str:
    """Return what is wrong with the addresses that `host` finds for a name, or ""."""
    addresses = host.names.get(name, (name,))
    if addresses is None:
        return f"{host.name} got no answer about {name} from a name server"
    if not addresses:
        return f"{host.name} cannot resolve {name}"
    if name not in host.names or not all(map(_is_loopback_ip, addresses)):
        return ""
    return f"{host.name} resolves {name} to {addresses[0]}, which is {host.name} itself"


def _token(facts: Examination) -> Iterator[Finding]:
    if facts.expected == 1 or is_loopback(facts.endpoint):
        return
    unsafe = [host.name for host in facts.hosts if host.insecure]
    bare = [host.name for host in facts.hosts if not host.has_token and not host.insecure]
    if bare:
        fact = f"UNISONO_TOKEN is not set on {_some(bare)}: a store there serves its own host only"
        yield Finding("token", ERROR, fact, "set UNISONO_TOKEN to the same secret on all hosts")
    elif unsafe:
        fact = f"UNISONO_INSECURE=1 on {_some(unsafe)} lets any client join the job"
        yield Finding("token", WARNING, fact, "set UNISONO_TOKEN instead")
    else:
        yield Finding("token", OK, "every host has a token")


def _versions(facts: Examination) -> Iterator[Finding]:
    found = []
    for what in facts.hosts[0].versions:
        groups = _groups(facts.hosts, lambda host, what=what: host.versions.get(what, ""))
        if len(groups) > 1:
            text = ", ".join(f"{value or 'none'} on {_some(on)}" for value, on in groups.items())
            # Ranks exchange data in unisono's format and in the byte order of the processor.
            severity = ERROR if what in ("unisono", "byte order") else WARNING
            fix = f"give all hosts the same {what}"
            found.append(Finding("versions", severity, f"{what}: {text}", fix))
    shown = ", ".join(f"{what} {value}" for what, value in facts.hosts[0].versions.items() if value)
    yield from found or [Finding("versions", OK, shown)]


def _reach(facts: Examination) -> Iterator[Finding]:
    found = []
    others = len(facts.hosts) - 1
    for host in facts.hosts if others else ():
        links = [link for link in facts.links if link.target == host.name]
        if lost := [link for link in links if not link.address]:
            sources = [link.source for link in lost]
            who = f"all {others} other hosts" if len(lost) == others > 1 else _some(sources)
            fact = f"{who} cannot connect to {host.name} ({'; '.join(lost[0].failures)})"
            fix = f"let the firewall of {host.name} pass TCP to ports of ip_local_port_range"
            found.append(Finding("reach", ERROR, fact, fix))
        if late := [link for link in links if link.address and link.failures]:
            first = late[0]
            fact = f"{_some([link.source for link in late])} reached {host.name} at "
            fact += f"{first.address} only after {'; '.join(first.failures)}"
            fix = f"set UNISONO_HOST={first.address} on {host.name}"
            found.append(Finding("reach", WARNING, fact, fix))
        if not any(link.source == host.name for link in facts.links):
            fact = f"{host.name} did not report its connections in time"
            found.append(Finding("reach", ERROR, fact, "read what the command prints there"))
    if not found and others:
        yield Finding("reach", OK, "every host reaches every other host")
    yield from found


def _packets(facts: Examination) -> Iterator[Finding]:
    found = []
    for link in facts.links:
        way = f"from {link.source} to {link.target}"
        if link.is_stuck and link.fits_bytes:
            fact = f"full packets {way} disappear, packets of {link.fits_bytes} bytes arrive: the "
            fact += "path has a smaller MTU, and drops the ICMP messages about it"
            fix = f"ip link set mtu {link.fits_bytes} dev INTERFACE on {link.source}, or pass ICMP"
            found.append(Finding("packets", ERROR, fact, fix))
        elif link.is_stuck:
            fact = f"32 KiB {way} did not arrive within 2 s, although they are connected"
            fix = f"look for lost packets (ip -s link) and a high load on {link.target}"
            found.append(Finding("packets", ERROR, fact, fix))
        elif link.resent is not None and link.resent >= _RESENT:
            fact = f"{link.resent:.1%} of the packets {way} were sent again"
            fix = "look for errors of interfaces and the switch (ip -s link)"
            found.append(Finding("packets", WARNING, fact, fix))
    if not found and any(link.address for link in facts.links):
        yield Finding("packets", OK, "full packets arrive, and none are lost")
    yield from found


def _speed(facts: Examination) -> Iterator[Finding]:
    trips = [link.rtt_s for link in facts.links if link.rtt_s is not None]
    rates = sorted((link.rate_bytes_s, link) for link in facts.links if link.rate_bytes_s)
    if not trips or not rates:
        return
    usual = median(rate for rate, _ in rates)
    rate, link = rates[0]
    if rate * _SLOW < usual:
        fact = f"{rate / 1e6:.3g} MB/s from {link.source} to {link.target}; the median of all pairs "
        fix = "compare link speeds (ethtool) and loads of these hosts"
        yield Finding("speed", WARNING, f"{fact}is {usual / 1e6:.3g} MB/s", fix)
    fact = f"medians of all pairs: round trip {median(trips) * 1e3:.3g} ms, {usual / 1e6:.4g} MB/s"
    yield Finding("speed", OK, fact)


def _clocks(facts: Examination) -> Iterator[Finding]:
    first = facts.hosts[0].name
    found, most_s = [], 0.0
    for link in facts.links:
        if link.source != first or link.rtt_s is None:
            continue
        most_s = max(most_s, abs(link.ahead_s))
        if abs(link.ahead_s) > _CLOCK_S + link.rtt_s / 2:
            side = "ahead of" if link.ahead_s > 0 else "behind"
            fact = f"the clock of {link.target} is {abs(link.ahead_s):.1f} s {side} that of {first}"
            fix = "run an NTP client, such as chrony, on all hosts"
            found.append(Finding("clocks", WARNING, fact, fix))
    if not found and facts.links:
        yield Finding("clocks", OK, f"clocks differ by at most {most_s * 1e3:.3g} ms from {first}'s")
    yield from found


class _Check(NamedTuple):
    """A check of each host for itself; `fault` takes the host and the number of ranks of all."""

    topic: str
    severity: str
    fault: Callable[[Host, int], str]
    fix: str


def _cores(host: Host, world_size: int) -> str:
    limits = host.limits
    if limits.cpu_quota is not None and limits.cpu_quota < host.nprocs:
        return f"the cgroup has the time of {limits.cpu_quota:g} cores for {host.nprocs} ranks"
    return f"{host.nprocs} ranks share {limits.cores} cores" if limits.cores < host.nprocs else ""


def _memory(host: Host, world_size: int) -> str:
    left = host.limits.memory_bytes
    if left is None or left >= host.nprocs * _RANK_BYTES:
        return ""
    return f"{left >> 20} MiB of memory are left for {host.nprocs} ranks"


def _no_group(host: Host, world_size: int) -> str:
    need, have = _OWN_DESCRIPTORS + host.nprocs, host.limits.descriptors
    return f"a rank needs {need} file descriptors and may have {have}" if have < need else ""


def _few_descriptors(host: Host, world_size: int) -> str:
    need, have = _OWN_DESCRIPTORS + 2 * world_size, host.limits.descriptors
    if have >= need or _no_group(host, world_size):
        return ""
    return f"a rank with a connection to each other rank needs {need} file descriptors, has {have}"


def _no_sharing(host: Host, world_size: int) -> str:
    reason = host.sharing.shared_memory
    return f"ranks cannot share memory: {reason}" if reason and host.nprocs > 1 else ""


def _slow_engine(host: Host, world_size: int) -> str:
    return host.sharing.engine if host.sharing.engine.startswith("reference") else ""


def _two_copies(host: Host, world_size: int) -> str:
    reason = host.sharing.remote_read
    if host.nprocs == 1 or not reason or host.sharing.shared_memory:
        return ""
    return f"process_vm_readv is refused ({reason}): large arrays are copied once more"


def _small_pages(host: Host, world_size: int) -> str:
    if host.sharing.huge_pages != "never" or host.nprocs == 1:
        return ""
    return "huge pages are off: large arrays are copied once more"


_CHECKS = (
    _Check("cores", WARNING, _cores, "start fewer ranks, or raise the limit of the job"),
    _Check("memory", WARNING, _memory, "start fewer ranks, or raise the limit of the job"),
    _Check("descriptors", ERROR, _no_group, "ulimit -n 1024"),
    _Check("descriptors", WARNING, _few_descriptors, "raise ulimit -n"),
    _Check("sharing", WARNING, _no_sharing, "permit memfd_create and /proc in the container"),
    _Check("sharing", WARNING, _slow_engine, "install unisono with a C++ compiler"),
    _Check(
        "sharing",
        WARNING,
        _two_copies,
        "sysctl kernel.yama.ptrace_scope=0; for a container, --cap-add SYS_PTRACE",
    ),
    _Check(
        "sharing",
        WARNING,
        _small_pages,
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    ),
)


def _each_host(facts: Examination) -> Iterator[Finding]:
    """Yield the findings of `_CHECKS`, one for all hosts that have the same fault."""
    faulty = set()
    for topic, severity, fault, fix in _CHECKS:
        groups = _groups(facts.hosts, lambda host, of=fault: of(host, _world_size(facts)))
        for text, names in groups.items():
            if text:
                faulty.add(topic)
                yield Finding(topic, severity, f"{_some(names)}: {text}", fix)
    if good := [topic for topic in dict.fromkeys(c.topic for c in _CHECKS) if topic not in faulty]:
        yield Finding("limits", OK, f"{', '.join(good)} of each host suffice")


_TOPICS = (_hosts, _names, _token, _versions, _reach, _packets, _speed, _clocks, _each_host)


def _world_size(facts: Examination) -> int:
    return sum(host.nprocs for host in facts.hosts)


def _groups(hosts: Iterable[Host], key: Callable[[Host], str]) -> dict[str, list[str]]:
    """Return the names of hosts by the value of a function."""
    groups: dict[str, list[str]] = {}
    for host in hosts:
        groups.setdefault(key(host), []).append(host.name)
    return groups


def _is_named(name: str, host: Host) -> bool:
    """Return whether a name or address is that of this host; the domain is not compared."""
    return name in host.addresses or name.partition(".")[0] == host.name.partition(".")[0]


def _is_loopback_ip(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _some(names: Sequence[str]) -> str:
    """Return names as a text; only the first if there are many."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
