"""From facts to findings: pure functions over each host, each connection, and all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from statistics import median

from unisono.core.base.grouping import grouped
from unisono.core.base.net.sockets import is_loopback
from unisono.workbench.cli.doctor.facts import (
    ERROR,
    OK,
    WARNING,
    Examination,
    Finding,
    HostFacts,
    HostLink,
    some,
)

_CLOCK_S = 1.0
"""Difference of clocks from which logs of two hosts mislead. NTP keeps clocks within 0.1 s."""

_RESENT = 0.01
"""Share of lost packets from which TCP is clearly slower. A full network loses fewer."""

_SLOW = 3.0
"""How much slower than the median a link must be. Rates of equal links differ by up to 2."""

_OWN_DESCRIPTORS = 24
"""Descriptors of a rank without peers: files, sockets and memory. With 20 a group can be made."""

_RANK_BYTES = 64 << 20
"""Memory of a rank that has loaded NumPy and unisono."""

_NAMES = "{names}"
"""In the text of a fault: the names of the hosts that have it."""

_OF_HOST = ("cores", "memory", "descriptors", "sharing")
_OF_LINKS = ("reach", "packets", "speed", "clocks")


def findings(facts: Examination) -> list[Finding]:
    """Return the findings, errors first; a topic without a fault has one finding "ok"."""
    world_size = sum(host.nprocs for host in facts.hosts)
    found = [
        *_merged(
            (host.name, fault) for host in facts.hosts for fault in _of_host(host, world_size)
        ),
        *_merged((link.source, fault) for link in facts.links for fault in _of_link(link)),
        *(fault for of_all in _OF_ALL for fault in of_all(facts)),
    ]
    machines = {(host.name.partition("#")[0], *host.addresses) for host in facts.hosts}
    apart = len(machines) > 1 or len(facts.hosts) < facts.expected
    if not apart or is_loopback(facts.endpoint):
        # Nodes on one machine need no names and no token.
        topics = [topic for topic in _FINE if topic not in ("names", "token")]
        found = [fault for fault in found if fault.topic not in ("names", "token")]
    else:
        topics = list(_FINE)
    if not facts.links or not all(link.is_measured for link in facts.links):
        topics = [topic for topic in topics if topic not in _OF_LINKS]
    faulty = {fault.topic for fault in found}
    if good := [topic for topic in _OF_HOST if topic not in faulty]:
        found.append(Finding("limits", OK, f"enough on each host: {', '.join(good)}"))
    found += [Finding(topic, OK, _FINE[topic](facts)) for topic in topics if topic not in faulty]
    return sorted(found, key=lambda finding: (ERROR, WARNING, OK).index(finding.severity))


def endpoint_fault(host: HostFacts, endpoint: str) -> Finding | None:
    """Return why this host cannot find the endpoint, or would serve it for itself; None if fine."""
    fault = _name_fault(host, endpoint)
    # A slow name server delays a job, and does not stop it.
    is_slow = host.names.get(endpoint, ()) is None
    if not fault or is_slow or is_loopback(endpoint) or _is_named(endpoint, host):
        return None
    return Finding("names", ERROR, fault, f"map {endpoint} to its address in /etc/hosts")


def _merged(faults: Iterable[tuple[str, Finding]]) -> Iterator[Finding]:
    """Yield one finding for equal faults of several hosts; it has their names at `_NAMES`."""
    for fault, names in grouped((fault, name) for name, fault in faults).items():
        fact, fix = (text.replace(_NAMES, some(names)) for text in (fault.fact, fault.fix))
        yield fault._replace(fact=fact, fix=fix)


def _of_host(host: HostFacts, world_size: int) -> Iterator[Finding]:
    limits, nprocs = host.limits, host.nprocs
    fewer = "start fewer ranks, or raise the limit of the job or container"
    if limits.cpu_quota is not None and limits.cpu_quota < nprocs:
        fact = f"{_NAMES}: the cgroup has the time of {limits.cpu_quota:g} cores for {nprocs} ranks"
        yield Finding("cores", WARNING, fact, fewer)
    elif limits.cores < nprocs:
        fact = f"{_NAMES}: {nprocs} ranks share {limits.cores} cores"
        yield Finding("cores", WARNING, fact, fewer)
    if limits.memory_bytes is not None and limits.memory_bytes < nprocs * _RANK_BYTES:
        fact = f"{_NAMES}: {limits.memory_bytes >> 20} MiB of memory are left for {nprocs} ranks"
        yield Finding("memory", WARNING, fact, fewer)
    # A group needs a connection to each rank of the host; each other rank may need 2.
    least, most = _OWN_DESCRIPTORS + nprocs, _OWN_DESCRIPTORS + 2 * world_size
    if limits.descriptors < most:
        severity = ERROR if limits.descriptors < least else WARNING
        need = f"{least}" if severity == ERROR else f"up to {most}"
        fact = f"{_NAMES}: a rank needs {need} file descriptors and may have {limits.descriptors}"
        yield Finding("descriptors", severity, fact, f"ulimit -n {most}")
    for severity, fact, fix in _sharing(host):
        yield Finding("sharing", severity, f"{_NAMES}: {fact}", fix)
    if host.admits == "local":
        fact = f"UNISONO_TOKEN is not set on {_NAMES}: a store there serves its own host only"
        yield Finding("token", ERROR, fact, "set UNISONO_TOKEN to the same secret on all hosts")
    elif host.admits == "any":
        fact = f"UNISONO_INSECURE=1 on {_NAMES} lets any client join the job"
        yield Finding("token", WARNING, fact, "set UNISONO_TOKEN instead")
    elif host.protection.startswith("none: "):
        fact = f"{_NAMES}: connections to other hosts are not encrypted ({host.protection[6:]})"
        yield Finding(
            "token", WARNING, fact, "install OpenSSL 3, or set UNISONO_TLS=off everywhere"
        )
    if _name_fault(host, host.name):
        address, *_ = host.names[host.name] or ("no address",)
        fact = f"{_NAMES}: the own name leads to {address}; unisono copes, Gloo and MPI may not"
        yield Finding(
            "names", WARNING, fact, "map the name of each host to its address in /etc/hosts"
        )


def _sharing(host: HostFacts) -> Iterator[tuple[str, str, str]]:
    """Yield severity, fact and fix."""
    sharing, several = host.sharing, host.nprocs > 1
    if not sharing.engine:
        fact = f"a second process fails: {sharing.shared_memory}"
        yield ERROR, fact, "run `python -c 'import unisono'` there"
        return
    if sharing.engine.startswith("reference"):
        fix = "install unisono with a C++ compiler, unless this engine is intended"
        yield WARNING, sharing.engine, fix
    if several and sharing.shared_memory:
        fact = f"ranks cannot share memory: {sharing.shared_memory}"
        yield WARNING, fact, "permit memfd_create and /proc in the container"
    elif several and sharing.remote_read:
        fact = f"process_vm_readv fails ({sharing.remote_read}): large arrays are copied once more"
        fix = "sysctl kernel.yama.ptrace_scope=0; for a container, --cap-add SYS_PTRACE"
        yield WARNING, fact, fix
    elif several and sharing.huge_pages == "never":
        fact = "huge pages are off: large arrays are copied once more"
        yield WARNING, fact, "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"


def _of_link(link: HostLink) -> Iterator[Finding]:
    """Yield what is wrong with a connection; equal faults differ in the source only."""
    target, failures = link.target, "; ".join(link.failures)
    way = f"from {_NAMES} to {target}"
    if not link.address:
        fact = f"{_NAMES} cannot connect to {target} ({failures})"
        if all("refused" in failure for failure in link.failures):
            fix = f"read what the command prints on {target}: it has ended, or a firewall refuses"
        else:
            fix = f"let the firewall of {target} pass TCP to ports of ip_local_port_range, or to "
            fix += "those of UNISONO_PORTS; behind NAT set UNISONO_PUBLISH there"
        yield Finding("reach", ERROR, fact, fix)
        return
    if failures:
        fact = f"{_NAMES} reached {target} at {link.address} only after {failures}"
        yield Finding("reach", WARNING, fact, f"set UNISONO_HOST={link.address} on {target}")
    if link.is_stuck and link.fits_bytes:
        fact = f"full packets {way} disappear, packets of {link.fits_bytes} bytes arrive: "
        fact += "the path has a smaller MTU, and drops the ICMP messages about it"
        fix = f"ip link set mtu {link.fits_bytes} dev INTERFACE on {_NAMES}, or pass ICMP"
        yield Finding("packets", ERROR, fact, fix)
    elif link.is_stuck:
        fact = f"32 KiB {way} did not arrive within 1.5 s, although they are connected"
        fix = f"look for lost packets (ip -s link) and a high load on {target}"
        yield Finding("packets", ERROR, fact, fix)
    elif not link.is_measured:
        fact = f"the connection {way} stopped in a measurement"
        fix = f"look for lost packets (ip -s link) and a high load on {target}"
        yield Finding("speed", WARNING, fact, fix)


def _hosts(facts: Examination) -> Iterator[Finding]:
    here = some(host.name for host in facts.hosts)
    came = f"{len(facts.hosts)} of {facts.expected} hosts came ({here})"
    absent = [n for n in facts.wanted if not any(_is_named(n, host) for host in facts.hosts)]
    if len(facts.hosts) < facts.expected:
        fact = f"{came}; absent: {some(absent)}" if absent else came
        fix = f"run the command there too; let every host reach {facts.endpoint}"
        yield Finding("hosts", ERROR, fact, fix)
    elif absent and len(facts.hosts) > 1:
        fact = f"{came}; none of them has the name {some(absent)}"
        fix = "give --hosts the names of the hosts where the command runs"
        yield Finding("hosts", WARNING, fact, fix)
    sources = {link.source for link in facts.links}
    for host in facts.hosts:
        if len(facts.hosts) > 1 and host.name not in sources:
            fact = f"{host.name} did not report its connections in time"
            yield Finding("reach", ERROR, fact, "read what the command prints there")


def _other_names(facts: Examination) -> Iterator[Finding]:
    for host in facts.hosts:
        asked = {other.name for other in facts.hosts} - {host.name}
        # A faulty endpoint has ended the examination; a slow one has not.
        if host.names.get(facts.endpoint, ()) is None:
            asked.add(facts.endpoint)
        for name in sorted(asked):
            if fault := _name_fault(host, name):
                fix = f"map {name} to its address in /etc/hosts of {host.name}"
                yield Finding("names", WARNING, fault, fix)


def _name_fault(host: HostFacts, name: str) -> str:
    """Return what is wrong with the addresses that `host` finds for a name, or ""."""
    if name not in host.names:
        return ""
    addresses = host.names[name]
    if addresses is None:
        return f"{host.name} got no answer about {name} from a name server"
    if not addresses:
        return f"{host.name} cannot resolve {name}"
    if not all(map(is_loopback, addresses)):
        return ""
    return f"{host.name} resolves {name} to {addresses[0]}, which is {host.name} itself"


def _versions(facts: Examination) -> Iterator[Finding]:
    for what in facts.hosts[0].versions:
        found = ((host.versions.get(what) or "none", host.name) for host in facts.hosts)
        places = grouped(found)
        if len(places) > 1:
            text = ", ".join(f"{version} on {some(names)}" for version, names in places.items())
            # Ranks exchange data in unisono's format and in the byte order of the processor.
            severity = ERROR if what in ("unisono", "byte order") else WARNING
            fix = f"give all hosts the same {what}"
            yield Finding("versions", severity, f"{what}: {text}", fix)


def _lost_packets(facts: Examination) -> Iterator[Finding]:
    for host in facts.hosts:
        links = [link for link in facts.links if link.target == host.name]
        if lossy := [link for link in links if (link.resent or 0.0) >= _RESENT]:
            share = max(link.resent or 0.0 for link in lossy)
            way = f"from {some(link.source for link in lossy)} to {host.name}"
            fact = f"{share:.1%} of the packets {way} were sent again"
            fix = "look for errors of interfaces and the switch (ip -s link)"
            yield Finding("packets", WARNING, fact, fix)


def _speed(facts: Examination) -> Iterator[Finding]:
    rates = [(link.rate_bytes_s, link) for link in facts.links if link.rate_bytes_s is not None]
    if not rates:
        return
    usual = median(rate for rate, _ in rates)
    rate, slow = min(rates, key=lambda pair: pair[0])
    if rate * _SLOW < usual:
        fact = f"{rate / 1e6:.3g} MB/s from {slow.source} to {slow.target}; the median of all "
        fact += f"pairs is {usual / 1e6:.4g} MB/s"
        fix = "compare link speeds (ethtool) and loads of these hosts"
        yield Finding("speed", WARNING, fact, fix)


def _clocks(facts: Examination) -> Iterator[Finding]:
    first = facts.hosts[0].name
    for link in facts.links:
        if link.source == first and abs(link.ahead_s) > _CLOCK_S + (link.rtt_s or 0.0) / 2:
            side = "ahead of" if link.ahead_s > 0 else "behind"
            fact = f"the clock of {link.target} is {abs(link.ahead_s):.1f} s {side} that of {first}"
            fix = "run an NTP client, such as chrony, on all hosts"
            yield Finding("clocks", WARNING, fact, fix)


def _shown_protection(facts: Examination) -> str:
    return f"the hosts have a token; encryption between them: {facts.hosts[0].protection}"


_OF_ALL = (_hosts, _other_names, _versions, _lost_packets, _speed, _clocks)


def _summary(facts: Examination) -> str:
    world_size = sum(host.nprocs for host in facts.hosts)
    return f"{some(host.name for host in facts.hosts)}; {world_size} ranks"


def _usual_speed(facts: Examination) -> str:
    trips = [link.rtt_s for link in facts.links if link.rtt_s is not None]
    rates = [link.rate_bytes_s for link in facts.links if link.rate_bytes_s is not None]
    return f"round trip {median(trips) * 1e3:.3g} ms, {median(rates) / 1e6:.4g} MB/s (medians)"


def _shown_versions(facts: Examination) -> str:
    return ", ".join(f"{what} {value}" for what, value in facts.hosts[0].versions.items() if value)


_FINE: dict[str, Callable[[Examination], str]] = {
    "hosts": _summary,
    "names": lambda facts: "every host resolves the names of all hosts",
    "token": _shown_protection,
    "versions": _shown_versions,
    "reach": lambda facts: "every host reaches every other host",
    "packets": lambda facts: "full packets arrive, and none are lost",
    "speed": _usual_speed,
    "clocks": lambda facts: f"clocks differ by at most {_CLOCK_S:g} s",
}
"""Text about a topic without a fault."""


def _is_named(name: str, host: HostFacts) -> bool:
    """Return whether a name or address is that of this host; the domain is not compared."""
    own = {name, *(host.names.get(name) or ())} & set(host.addresses)
    same = name.partition(".")[0] == host.name.partition(".")[0]
    return same or any(not is_loopback(address) for address in own)
