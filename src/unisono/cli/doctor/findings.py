"""From facts to findings: pure functions, one for each topic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from unisono.base.sockets import is_loopback
from unisono.cli.doctor.facts import ERROR, OK, WARNING, Examination, Finding, Host, some
from unisono.cli.doctor.limits import each_host

_CLOCK_S = 1.0
"""Difference of clocks from which logs of two hosts mislead. NTP keeps clocks within 0.1 s."""

_RESENT = 0.01
"""Share of lost packets from which TCP is clearly slower. A full network loses fewer."""

_SLOW = 3.0
"""How much slower than the median a link must be. Rates of equal links differ by up to 2."""


def findings(facts: Examination) -> list[Finding]:
    """Return the findings, errors first; a topic without a fault has one finding "ok"."""
    found = list(each_host(facts))
    machines = {(host.name.partition("#")[0], *host.addresses) for host in facts.hosts}
    apart = len(machines) > 1 or len(facts.hosts) < facts.expected
    is_measured = bool(facts.links) and all(link.is_measured for link in facts.links)
    for topic, faults, fine in _TOPICS:
        # Nodes on one machine need no names and no token.
        if topic in ("names", "token") and (not apart or is_loopback(facts.endpoint)):
            continue
        faulty = [Finding(topic, *fault) for fault in faults(facts)]
        if not faulty and (is_measured or topic not in _OF_LINKS):
            faulty = [Finding(topic, OK, fine(facts))]
        found += faulty
    return sorted(found, key=lambda finding: (ERROR, WARNING, OK).index(finding.severity))


def endpoint_fault(host: Host, endpoint: str) -> Finding | None:
    """Return why this host cannot find the endpoint, or would serve it for itself; None if fine."""
    fault = _name_fault(host, endpoint)
    # A slow name server delays a job, and does not stop it.
    is_slow = host.names.get(endpoint, ()) is None
    if not fault or is_slow or is_loopback(endpoint) or _is_named(endpoint, host):
        return None
    return Finding("names", ERROR, fault, f"map {endpoint} to its address in /etc/hosts")


_OF_LINKS = ("reach", "packets", "speed", "clocks")

_Faults = Iterator[tuple[str, str, str]]
"""Severity, fact and fix."""


def _hosts(facts: Examination) -> _Faults:
    here = some(host.name for host in facts.hosts)
    came = f"{len(facts.hosts)} of {facts.expected} hosts came ({here})"
    absent = [n for n in facts.wanted if not any(_is_named(n, host) for host in facts.hosts)]
    if len(facts.hosts) < facts.expected:
        fact = f"{came}; absent: {some(absent)}" if absent else came
        yield ERROR, fact, f"run the command there too; let every host reach {facts.endpoint}"
    elif absent and len(facts.hosts) > 1:
        fact = f"{came}; none of them has the name {some(absent)}"
        yield WARNING, fact, "give --hosts the names of the hosts where the command runs"


def _names(facts: Examination) -> _Faults:
    own: dict[str, list[str]] = {}
    for host in facts.hosts:
        asked = [other.name for other in facts.hosts]
        # A faulty endpoint has ended the examination; a slow one has not.
        if facts.endpoint not in asked and host.names.get(facts.endpoint, ()) is None:
            asked.append(facts.endpoint)
        for name in asked:
            if fault := _name_fault(host, name):
                if name == host.name:
                    found = host.names[host.name] or ("no address",)
                    own.setdefault(found[0], []).append(host.name)
                else:
                    fix = f"map {name} to its address in /etc/hosts of {host.name}"
                    yield WARNING, fault, fix
    for address, names in own.items():
        fact = (
            f"{some(names)}: the own name leads to {address}; unisono copes, Gloo and MPI may not"
        )
        yield WARNING, fact, "map the name of each host to its address in /etc/hosts"


def _name_fault(host: Host, name: str) -> str:
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


def _token(facts: Examination) -> _Faults:
    if bare := [host.name for host in facts.hosts if host.admits == "local"]:
        fact = f"UNISONO_TOKEN is not set on {some(bare)}: a store there serves its own host only"
        yield ERROR, fact, "set UNISONO_TOKEN to the same secret on all hosts"
    if unsafe := [host.name for host in facts.hosts if host.admits == "any"]:
        fact = f"UNISONO_INSECURE=1 on {some(unsafe)} lets any client join the job"
        yield WARNING, fact, "set UNISONO_TOKEN instead"


def _versions(facts: Examination) -> _Faults:
    for what in facts.hosts[0].versions:
        places: dict[str, list[str]] = {}
        for host in facts.hosts:
            places.setdefault(host.versions.get(what) or "none", []).append(host.name)
        if len(places) > 1:
            text = ", ".join(f"{version} on {some(names)}" for version, names in places.items())
            # Ranks exchange data in unisono's format and in the byte order of the processor.
            severity = ERROR if what in ("unisono", "byte order") else WARNING
            yield severity, f"{what}: {text}", f"give all hosts the same {what}"


def _reach(facts: Examination) -> _Faults:
    for host in facts.hosts:
        links = [link for link in facts.links if link.target == host.name]
        if lost := [link for link in links if not link.address]:
            sources = some(link.source for link in lost)
            fact = f"{sources} cannot connect to {host.name} ({'; '.join(lost[0].failures)})"
            fix = f"let the firewall of {host.name} pass TCP to ports of ip_local_port_range"
            yield ERROR, fact, fix
        if late := [link for link in links if link.address and link.failures]:
            fact = f"{some(link.source for link in late)} reached {host.name} at "
            fact += f"{late[0].address} only after {'; '.join(late[0].failures)}"
            yield WARNING, fact, f"set UNISONO_HOST={late[0].address} on {host.name}"
        if len(facts.hosts) > 1 and not any(link.source == host.name for link in facts.links):
            fact = f"{host.name} did not report its connections in time"
            yield ERROR, fact, "read what the command prints there"


def _packets(facts: Examination) -> _Faults:
    for host in facts.hosts:
        links = [link for link in facts.links if link.target == host.name]
        for fits in sorted({link.fits_bytes for link in links if link.is_stuck}):
            stuck = [link.source for link in links if link.is_stuck and link.fits_bytes == fits]
            way = f"from {some(stuck)} to {host.name}"
            if fits:
                fact = (
                    f"full packets {way} disappear, packets of {fits} bytes arrive: the path has "
                )
                fact += "a smaller MTU, and drops the ICMP messages about it"
                fix = f"ip link set mtu {fits} dev INTERFACE on {some(stuck)}, or pass ICMP"
                yield ERROR, fact, fix
            else:
                fact = f"32 KiB {way} did not arrive within 1.5 s, although they are connected"
                fix = f"look for lost packets (ip -s link) and a high load on {host.name}"
                yield ERROR, fact, fix
        if lossy := [link for link in links if (link.resent or 0.0) >= _RESENT]:
            share = max(link.resent or 0.0 for link in lossy)
            way = f"from {some(link.source for link in lossy)} to {host.name}"
            fact = f"{share:.1%} of the packets {way} were sent again"
            yield WARNING, fact, "look for errors of interfaces and the switch (ip -s link)"


def _speed(facts: Examination) -> _Faults:
    for link in facts.links:
        if link.address and not link.is_stuck and not link.is_measured:
            fact = f"the connection from {link.source} to {link.target} stopped in a measurement"
            fix = f"look for a high load on {link.target}, and for lost packets (ip -s link)"
            yield WARNING, fact, fix
    rates = [(link.rate_bytes_s, link) for link in facts.links if link.rate_bytes_s is not None]
    if not rates:
        return
    usual = median(rate for rate, _ in rates)
    rate, slow = min(rates, key=lambda pair: pair[0])
    if rate * _SLOW < usual:
        fact = f"{rate / 1e6:.3g} MB/s from {slow.source} to {slow.target}; the median of all "
        fact += f"pairs is {usual / 1e6:.4g} MB/s"
        yield WARNING, fact, "compare link speeds (ethtool) and loads of these hosts"


def _usual_speed(facts: Examination) -> str:
    trips = [link.rtt_s for link in facts.links if link.rtt_s is not None]
    rates = [link.rate_bytes_s for link in facts.links if link.rate_bytes_s is not None]
    return f"round trip {median(trips) * 1e3:.3g} ms, {median(rates) / 1e6:.4g} MB/s (medians)"


def _clocks(facts: Examination) -> _Faults:
    first = facts.hosts[0].name
    for link in facts.links:
        if link.source == first and abs(link.ahead_s) > _CLOCK_S + (link.rtt_s or 0.0) / 2:
            side = "ahead of" if link.ahead_s > 0 else "behind"
            fact = f"the clock of {link.target} is {abs(link.ahead_s):.1f} s {side} that of {first}"
            yield WARNING, fact, "run an NTP client, such as chrony, on all hosts"


def _summary(facts: Examination) -> str:
    world_size = sum(host.nprocs for host in facts.hosts)
    return f"{some(host.name for host in facts.hosts)}; {world_size} ranks"


def _shown_versions(facts: Examination) -> str:
    return ", ".join(f"{what} {value}" for what, value in facts.hosts[0].versions.items() if value)


_TOPICS: tuple[tuple[str, Callable[[Examination], _Faults], Callable[[Examination], str]], ...] = (
    ("hosts", _hosts, _summary),
    ("names", _names, lambda facts: "every host resolves the names of all hosts"),
    ("token", _token, lambda facts: "the hosts have a token"),
    ("versions", _versions, _shown_versions),
    ("reach", _reach, lambda facts: "every host reaches every other host"),
    ("packets", _packets, lambda facts: "full packets arrive, and none are lost"),
    ("speed", _speed, _usual_speed),
    ("clocks", _clocks, lambda facts: f"clocks differ by at most {_CLOCK_S:g} s"),
)


def _is_named(name: str, host: Host) -> bool:
    """Return whether a name or address is that of this host; the domain is not compared."""
    own = {name, *(host.names.get(name) or ())} & set(host.addresses)
    same = name.partition(".")[0] == host.name.partition(".")[0]
    return same or any(not is_loopback(address) for address in own)
