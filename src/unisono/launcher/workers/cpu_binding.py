"""Assign CPUs and a number of threads to each worker of a host.

Only the CPUs that the launcher itself may use are assigned: a batch system's cpuset is respected.
Binding cannot divide a cgroup's time limit, so that limit only lowers the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.core.platform.machine import CAN_BIND, allowed_cpus, by_core, cpu_quota
from unisono.core.platform.nodes import numa_nodes
from unisono.errors import InvalidArgumentError, LaunchError
from unisono.launcher.ranges import format_ranges

MODES = ("none", "core", "numa", "auto")
"""Values of `--bind`.

- none: every worker may use all CPUs.
- core: each worker gets an equal share of adjacent cores, with all hardware threads of a core.
- numa: each worker gets a whole NUMA node.
- auto: core if there is a core for each worker, otherwise none.
"""


@dataclass(frozen=True)
class HostCPUs:
    """The part of a host that the launcher may use.

    Attributes:
        nodes: NUMA nodes; each is a list of cores, each core a list of hardware threads.
        quota_cpus: Time limit of the cgroup in CPUs; infinity without a limit.
    """

    nodes: Sequence[Sequence[Sequence[int]]]
    quota_cpus: float = math.inf

    @property
    def cores(self) -> list[Sequence[int]]:
        """All cores, NUMA node by NUMA node."""
        return [core for node in self.nodes for core in node]

    @classmethod
    def here(cls) -> HostCPUs:
        """Return the part of this host that the process may use."""
        allowed = sorted(allowed_cpus())
        nodes = []
        placed: set[int] = set()
        for node in numa_nodes().values():
            cpus = [cpu for cpu in node if cpu in allowed]
            placed.update(cpus)
            nodes.append(by_core(cpus))
        nodes.append(by_core([cpu for cpu in allowed if cpu not in placed]))
        return cls([node for node in nodes if node], cpu_quota())


@dataclass(frozen=True)
class Binding:
    """The CPUs of the workers of one host.

    Attributes:
        shares: CPUs of each local rank; empty if no worker is bound.
        threads: Number of threads for each local rank; empty if no worker is bound.
        report: One line that states the binding and its reason.
    """

    shares: Sequence[Sequence[int]] = ()
    threads: Sequence[int] = ()
    report: str = ""

    @classmethod
    def make(cls, mode: str, nprocs: int, machine: HostCPUs | None = None) -> Binding:
        """Return the binding of `nprocs` workers.

        Raises:
            InvalidArgumentError: The mode is unknown.
            LaunchError: With "core", there are more workers than cores.
        """
        if mode not in MODES:
            raise InvalidArgumentError(f"bind must be one of {', '.join(MODES)}; got {mode!r}")
        if mode == "none":
            return cls()
        machine = machine or HostCPUs.here()
        cores = machine.cores
        if mode != "numa" and nprocs > len(cores):
            short = f"{nprocs} workers, {len(cores)} cores"
            if mode == "core":
                raise LaunchError(
                    f"cannot bind each worker to cores of its own: {short}",
                    hint="use --bind none, or fewer workers",
                )
            return cls(report=f"bind: none ({short})")
        if not CAN_BIND:
            return cls(report="bind: none (this system cannot bind processes)")
        groups = _whole_nodes(machine, nprocs) if mode == "numa" else _equal(cores, nprocs)
        # Workers that share a NUMA node share its threads.
        sharers = [sum(other == group for other in groups) for group in groups]
        limit = max(1, int(machine.quota_cpus // nprocs)) if machine.quota_cpus < math.inf else None
        threads = [max(1, len(g) // n) for g, n in zip(groups, sharers, strict=True)]
        shares = [sorted(cpu for core in group for cpu in core) for group in groups]
        return cls(
            shares=shares,
            threads=[min(n, limit or n) for n in threads],
            report=_report("core" if mode == "auto" else mode, shares, machine.quota_cpus),
        )

    def cpus(self, local_rank: int) -> Sequence[int]:
        """Return the CPUs of a worker; empty if it is not bound."""
        return self.shares[local_rank] if self.shares else ()

    def environment(self, local_rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return OMP_NUM_THREADS for a bound worker, unless the user has set it."""
        if not self.threads or inherited.get("OMP_NUM_THREADS"):
            return {}
        return {"OMP_NUM_THREADS": str(self.threads[local_rank])}


def _equal(cores: Sequence[Sequence[int]], nprocs: int) -> list[Sequence[Sequence[int]]]:
    edges = [rank * len(cores) // nprocs for rank in range(nprocs + 1)]
    return [cores[edges[rank] : edges[rank + 1]] for rank in range(nprocs)]


def _whole_nodes(machine: HostCPUs, nprocs: int) -> list[Sequence[Sequence[int]]]:
    return [machine.nodes[rank * len(machine.nodes) // nprocs] for rank in range(nprocs)]


def _report(kind: str, shares: Sequence[Sequence[int]], quota_cpus: float) -> str:
    ranks = " ".join(f"{rank}:{format_ranges(cpus)}" for rank, cpus in enumerate(shares))
    limit = f", cgroup limit {quota_cpus:g} CPUs" if quota_cpus < math.inf else ""
    return f"bind: {kind} (local rank:CPUs {ranks}{limit})"
