"""NUMA nodes and shared caches: in which part of the machine a process may run."""

from __future__ import annotations

import os
import re
from collections.abc import Collection

from unisono.core.platform.machine import allowed_cpus
from unisono.core.platform.proc import read_text

SYSTEM = "/sys/devices/system"
"""The folder in which the kernel describes the machine."""


def numa_nodes(system: str = SYSTEM) -> dict[int, list[int]]:
    """Return the CPUs of each NUMA node that has some; {} if the nodes are unknown."""
    try:
        names = os.listdir(f"{system}/node")
    except OSError:
        return {}
    numbers = sorted(int(name[4:]) for name in names if re.fullmatch("node[0-9]+", name))
    found = {number: _cpus(f"{system}/node/node{number}/cpulist") for number in numbers}
    # A node without CPUs is memory only, or its CPUs are offline.
    return {number: cpus for number, cpus in found.items() if cpus}


def numa_node(cpus: Collection[int], system: str = SYSTEM) -> int | None:
    """Return the NUMA node that has all of these CPUs; None if there is none, or it is unknown."""
    return next((node for node, own in numa_nodes(system).items() if {*cpus} <= {*own}), None)


def memory_node() -> int:
    """Return the NUMA node of this process, for its memory.

    It is -1 if the machine has one node, or if the process may run on several.
    """
    mine, nodes = {*allowed_cpus()}, numa_nodes()
    found = (node for node, cpus in nodes.items() if mine <= {*cpus})
    return next(found, -1) if len(nodes) > 1 else -1


def shared_cache(cpus: Collection[int], system: str = SYSTEM) -> int | None:
    """Return the first CPU of those that share an L3 cache with all of these CPUs, or None."""
    near = _cpus(f"{system}/cpu/cpu{min(cpus, default=-1)}/cache/index3/shared_cpu_list")
    return near[0] if near and {*cpus} <= {*near} else None


def _cpus(path: str) -> list[int]:
    """Return the CPUs of a list of the kernel, such as "0-3,8"; [] if the file is missing."""
    ends = [part.split("-") for part in read_text(path).split(",") if part.strip()]
    return [cpu for each in ends for cpu in range(int(each[0]), int(each[-1]) + 1)]
