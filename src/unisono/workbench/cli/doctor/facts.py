"""Facts that the doctor measures, and its findings. Hosts exchange facts as JSON. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

ERROR, WARNING, OK = "error", "warning", "ok"
_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class SystemLimits:
    """Limits of the system for the processes of a host.

    Attributes:
        cores: Cores that a process may use.
        cpu_quota: Cores' worth of time that the cgroup may use; None without a limit.
        memory_bytes: Memory that a process can still get; None if unknown.
        descriptors: File descriptors that a process may have (`ulimit -n`).
    """

    cores: int = 1
    cpu_quota: float | None = None
    memory_bytes: int | None = None
    descriptors: int = 1024


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How two processes of a host can exchange data.

    Attributes:
        engine: The engine that ranks get, and the reason; "" if a second process failed.
        shared_memory: Why processes cannot open each other's memory, or "".
        remote_read: Why a process cannot read another with `process_vm_readv`, or "".
        huge_pages: "always", "madvise" or "never"; "" if the system does not report it.
    """

    engine: str = "native engine"
    shared_memory: str = ""
    remote_read: str = ""
    huge_pages: str = ""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """One host, as it sees itself.

    Attributes:
        name: Its name, which is unique among the hosts.
        nprocs: Number of ranks.
        addresses: Addresses that its ranks would publish, in order of preference.
        names: Addresses of names, as this host resolves them: its own name, the endpoint's and
            those of the other hosts. None: the look-up took too long.
        versions: Version of unisono, Python, NumPy and torch by name, "" if absent; the
            processor and its byte order.
        admits: Clients that a store of this host serves: "token" (holders of the token), "any"
            (UNISONO_INSECURE) or "local" (there is no token).
        protection: What protects its connections to other hosts; "none: ..." if nothing can.
        limits: Limits of the system.
        sharing: How its ranks exchange data.
    """

    name: str
    nprocs: int = 1
    addresses: Sequence[str] = ()
    names: Mapping[str, Sequence[str] | None] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    admits: str = "token"
    protection: str = "TLS 1.3 (token)"
    limits: SystemLimits = field(default_factory=SystemLimits)
    sharing: Sharing = field(default_factory=Sharing)


@dataclass(frozen=True, kw_only=True)
class HostLink:
    """The connection that one host opened to another.

    Attributes:
        source: Name of the host that called.
        target: Name of the other host.
        address: Address at which the target answered; "" if at none.
        failures: Addresses that failed before, each with the reason.
        rtt_s: Median of the round trips in seconds; None if there was no answer.
        ahead_s: Seconds by which the target's clock is ahead, to within half a round trip.
        rate_bytes_s: Rate at which the target received; None if it was not measured.
        resent: Share of the packets that the kernel sent again; None if it is unknown.
        is_stuck: Whether a message of several full packets did not arrive.
        fits_bytes: Size of the largest packets that arrive if full packets do not; 0 if none do.
    """

    source: str
    target: str
    address: str = ""
    failures: Sequence[str] = ()
    rtt_s: float | None = None
    ahead_s: float = 0.0
    rate_bytes_s: float | None = None
    resent: float | None = None
    is_stuck: bool = False
    fits_bytes: int = 0

    @property
    def is_measured(self) -> bool:
        """Whether the round trip and the rate are known."""
        return self.rtt_s is not None and self.rate_bytes_s is not None


@dataclass(frozen=True, kw_only=True)
class Examination:
    """All facts about a set of hosts.

    Attributes:
        hosts: The hosts that took part.
        links: One for each ordered pair of them, apart from those whose source did not report.
        expected: Number of hosts that must take part.
        wanted: Names of these hosts, if the user gave them.
        endpoint: Name or address at which the hosts meet; "" with one host.
    """

    hosts: Sequence[HostFacts]
    links: Sequence[HostLink] = ()
    expected: int = 1
    wanted: Sequence[str] = ()
    endpoint: str = ""


class Finding(NamedTuple):
    """One fact, and the remedy.

    Attributes:
        topic: "hosts", "names", "token", "versions", "reach", "packets", "speed", "clocks",
            "cores", "memory", "descriptors", "sharing" or "limits" (if all four are fine).
        severity: "error" if a job would not start or would stop, "warning" or "ok".
        fact: One line.
        fix: One line in the imperative; "" if there is nothing to do.
    """

    topic: str
    severity: str
    fact: str
    fix: str = ""


def some(names: Iterable[str]) -> str:
    """Return names as a text; only the first if there are many."""
    listed = list(names)
    shown = ", ".join(islice(listed, _SHOWN))
    return shown if len(listed) <= _SHOWN else f"{shown} and {len(listed) - _SHOWN} more"
