"""Machines as TOML texts: networks, and what ranks do besides waiting for messages."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unisono.core.schedules.ir import Schedule
from unisono.core.schedules.registry import known_algorithms
from unisono.errors import InvalidArgumentError, UnknownNameError
from unisono.workbench.simulate.channels import CHANNELLED, Channels, in_channels
from unisono.workbench.simulate.evaluators.costs import Costs
from unisono.workbench.simulate.evaluators.loggops import LogGOPS
from unisono.workbench.simulate.graphs import Graph
from unisono.workbench.simulate.networks import (
    FullyConnected,
    Hosts,
    LinkSpec,
    Network,
    Pods,
    Switch,
    Torus,
)
from unisono.workbench.simulate.numa import NumaHosts
from unisono.workbench.simulate.switches import Switched, nvls, slices

# Of switches that reduce inside hosts; the second is for several hosts.
REDUCING = ("nvls", "nvls_tree")

_CHOICES = {
    "model": ("links", "alpha-beta", "loggops"),
    "topology": ("hosts", "switch", "full", "torus", "graph"),
    "routing": ("adaptive", "hashed"),
    "interface_order": ("turn", "blocks"),
}

# LogGOPS parameters that a file does not give follow from its links.
_UNSET = -1.0

# Every key, with its default. Units are in the names; 1 GB is 1e9 bytes.
_KEYS: dict[str, Any] = {
    "about": "", "source": "", "model": "links", "topology": "hosts",
    "ranks_per_host": 1, "interfaces": 1, "interface_order": "turn", "width": 0,
    "channels": 1, "channel_gbps": float("inf"),
    "ranks_per_node": 0, "node_us": 0.0, "node_gbps": float("inf"), "far_gbps": float("inf"),
    "inside_us": 0.0, "inside_gbps": float("inf"), "latency_us": 0.0, "gbps": float("inf"),
    "efficiency": 1.0, "inside_efficiency": 1.0,
    "links": [], "pod_hosts": 0, "pod_us": 0.0, "oversubscription": 1.0, "dragonfly": False,
    "routing": "adaptive",
    "cut_through": True, "whole_ns": False, "padded": False, "nvls": False,
    "send_us": 0.0, "recv_us": 0.0, "start_us": 0.0,
    "copy_gbps": float("inf"), "reduce_gbps": float("inf"), "passes": 1,
    "cores": 0, "switch_us": 0.0, "agreement_bytes": 0, "message_gbps": float("inf"),
    "wake_us": 0.0,
    "L_ns": _UNSET, "o_ns": _UNSET, "g_ns": _UNSET, "G_ns": _UNSET, "O_ns": _UNSET,
    "S_bytes": 65535,
}  # fmt: skip

# The limits of numbers; see `_check`. Times of larger numbers do not fit into picoseconds, and
# links of more into memory.
_MOST = {
    "ranks_per_host": 1e6, "ranks_per_node": 1e6, "interfaces": 4096, "channels": 4096,
    "efficiency": 1, "inside_efficiency": 1,
}  # fmt: skip
_LEAST = {"ranks_per_host": 1, "interfaces": 1, "channels": 1}
# Of what is above 0.
_LEAST_ABOVE = 1e-6


@dataclass(frozen=True)
class Machine:
    """A network and its ranks' costs, for any number of ranks.

    Attributes:
        name: Of the file.
        values: A value for each key.
        algorithms: Other values per algorithm.
        published: Measured microseconds by size in bytes, algorithm and ranks.
    """

    name: str
    values: dict[str, Any]
    algorithms: dict[str, dict[str, Any]]
    published: dict[int, dict[str, dict[int, float]]]

    def of(self, algorithm: str) -> dict[str, Any]:
        """Return the values for an algorithm."""
        return self.values | self.algorithms.get(algorithm, {})

    def network(self, algorithm: str, size: int) -> Network:
        """Return the network of `size` ranks.

        Raises:
            InvalidArgumentError: The ranks do not fill rows.
        """
        v = self.of(algorithm)
        spec = LinkSpec(_ps(v["latency_us"]), v["gbps"] * v["efficiency"], v["whole_ns"])
        cut = v["cut_through"]
        if v["topology"] == "torus":
            width = v["width"] or size
            if size % width:
                raise InvalidArgumentError(f"{size} ranks do not fill rows of {width}")
            return Torus(width, size // width, spec, cut_through=cut)
        if v["topology"] == "graph":
            return Graph(size, _edges(self.name, v), spec.whole, cut_through=cut)
        if v["topology"] != "hosts":
            flat = Switch if v["topology"] == "switch" else FullyConnected
            return flat(size, spec, cut_through=cut)
        pods = None
        if v["pod_hosts"]:
            pods = Pods(
                v["pod_hosts"], v["oversubscription"], _ps(v["pod_us"]), v["dragonfly"],
                v["routing"] == "hashed",
            )  # fmt: skip
        hosts = Hosts(
            size, v["ranks_per_host"],
            LinkSpec(_ps(v["inside_us"]), v["inside_gbps"] * v["inside_efficiency"]), spec,
            interfaces=v["interfaces"], pods=pods, cut_through=cut,
            blocks=v["interface_order"] == "blocks",
        )  # fmt: skip
        if not v["ranks_per_node"]:
            return hosts
        link = LinkSpec(_ps(v["node_us"]), v["node_gbps"], v["whole_ns"])
        return NumaHosts(hosts, v["ranks_per_node"], link, LinkSpec(0, v["far_gbps"]))

    def part(self, size: int) -> int:
        """Return the ranks per host; if there is one host of several NUMA nodes, those per node."""
        per_host, per_node = self.values["ranks_per_host"], self.values["ranks_per_node"]
        part: int = per_node if size <= per_host and 0 < per_node < size else per_host
        return part

    def set_parts(self, per_host: int, per_node: int) -> None:
        """Give hosts, and NUMA nodes inside them, another number of ranks."""
        self.values.update(ranks_per_host=per_host, ranks_per_node=per_node)

    def in_channels(self, schedule: Schedule, local: int) -> tuple[Schedule, Network]:
        """Return a schedule and its network, with the channels of the machine if both have them."""
        v = self.of(schedule.algorithm)
        network = self.network(schedule.algorithm, schedule.world_size)
        alone = v["channels"] == 1 and v["channel_gbps"] == float("inf")
        if alone or schedule.collective not in CHANNELLED:
            return schedule, network
        spec = LinkSpec(0, v["channel_gbps"])
        channels = v["channels"]
        return in_channels(schedule, channels, local), Channels(network, channels, spec)

    def reducing(self, collective: str, size: int) -> tuple[str, ...]:
        """Return the algorithm in which switches reduce for `size` ranks, if there is one."""
        v = self.values
        serves = v["nvls"] and (v["topology"], collective) == ("hosts", "all_reduce")
        if not serves or v["model"] == "loggops" or size == 1:
            return ()
        if size <= v["ranks_per_host"]:
            return REDUCING[:1]
        return () if size % v["ranks_per_host"] else REDUCING[1:]

    def in_switches(
        self, algorithm: str, size: int, nbytes: int, depth: int = 0
    ) -> tuple[Schedule, Network, int]:
        """Return the schedule of an algorithm of `reducing`, its network, and its slices.

        Args:
            algorithm: Its name.
            size: Number of ranks.
            nbytes: Size of the vector.
            depth: Slices of a channel; 0: as NCCL.

        Raises:
            InvalidArgumentError: The machine has no such algorithm for this number of ranks.
        """
        network = self.network(algorithm, size)
        if algorithm not in self.reducing("all_reduce", size) or not isinstance(network, Hosts):
            raise InvalidArgumentError(
                f"all_reduce ({algorithm}) on {size} ranks: net {self.name} has no switches that "
                "reduce for them; nvls needs one host, nvls_tree several full hosts"
            )
        channels, hosts = self.of(algorithm)["channels"], -(-size // network.per_host)
        depth = depth or slices(nbytes, size, hosts, channels)
        # Of two channels of NCCL each has one of the two trees.
        channels = channels if hosts == 1 else max(channels // 2, 1)
        schedule = in_channels(nvls(size, depth, hosts), channels, 1)
        return schedule, Channels(Switched(network), channels, LinkSpec()), depth

    def costs(self, algorithm: str) -> Costs:
        """Return what ranks do besides waiting."""
        v = self.of(algorithm)
        return Costs(
            _ps(v["send_us"]), _ps(v["recv_us"]), _ps(v["start_us"]), LinkSpec(0, v["copy_gbps"]),
            LinkSpec(0, v["reduce_gbps"], v["whole_ns"]), v["passes"], v["cores"],
            _ps(v["switch_us"]), v["agreement_bytes"], LinkSpec(0, v["message_gbps"]),
            _ps(v["wake_us"]),
        )  # fmt: skip

    def delay_us(self, size: int) -> float:
        """Return the time of an empty message from rank 0 to the farthest of `size` ranks."""
        others = np.arange(size)
        latency, _ = self.network("", size).alone(others * 0, others, others * 0)
        return float(latency.max()) / 1e6

    def loggops(self, size: int = 2) -> LogGOPS:
        """Return the parameters of the LogGOPS model for `size` ranks.

        The model has one kind of message. Where the file has no value, L and G are the latency and
        the time per byte of a message from rank 0 to the last rank. Then `send_us` or `recv_us` is
        o, the larger one. The others are 0.
        """
        many = np.array([10**9])
        latency, moving = self.network("", size).alone(many * 0, many * 0 + size - 1, many)
        costs = self.costs("")
        found = (
            int(latency[0]), max(costs.send_ps, costs.recv_ps), 0, round(int(moving[0]) / 1e9), 0,
        )  # fmt: skip
        given = [self.values[f"{key}_ns"] for key in "LogGO"]
        ps = [own if ns < 0 else _ps(ns / 1000) for ns, own in zip(given, found, strict=True)]
        return replace(LogGOPS(*ps), eager_bytes=self.values["S_bytes"])


def machine(name: str, text: str) -> Machine:
    """Return the machine that a TOML text describes; `shipped/` has examples.

    Raises:
        InvalidArgumentError: The text is no TOML, or a value has the wrong type.
        UnknownNameError: There is no such key.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgumentError(f"{name}: {error}") from None
    algorithms, published = values.pop("algorithms", {}), values.pop("published", {})
    tables = [*algorithms.values()] if isinstance(algorithms, dict) else [algorithms]
    if not all(isinstance(table, dict) for table in tables):
        raise InvalidArgumentError(f"{name}: algorithms has no table of keys per algorithm")
    for table in (values, *tables):
        _check(name, table)
    known = [*known_algorithms(), *REDUCING]
    if unknown := [key for key in algorithms if key not in known]:
        raise UnknownNameError(f"{name}: no algorithm {unknown[0]!r} (known: {', '.join(known)})")
    try:
        measured = {
            int(size): {a: {int(p): float(us) for p, us in row.items()} for a, row in rows.items()}
            for size, rows in published.items()
        }
    except (AttributeError, TypeError, ValueError):
        raise InvalidArgumentError(
            f"{name}: published has no microseconds by size, algorithm and ranks"
        ) from None
    for size, rows in measured.items():
        for algorithm, row in rows.items():
            for p, us in row.items():
                if not (size >= 0 < p and 0 < us < float("inf")):
                    raise InvalidArgumentError(
                        f"{name}: [published.{size}.{algorithm}] has {us} us on {p} ranks"
                    )
    return Machine(name, _KEYS | values, algorithms, measured)


def _check(name: str, table: dict[str, Any]) -> None:
    for key, value in table.items():
        if key not in _KEYS:
            raise UnknownNameError(f"{name}: no key {key!r} (known: {', '.join(sorted(_KEYS))})")
        kinds = (int, float) if isinstance(_KEYS[key], float) else (type(_KEYS[key]),)
        if not isinstance(value, kinds) or isinstance(value, bool) != (bool in kinds):
            raise InvalidArgumentError(
                f"{name}: {key} is {value!r}, expected a value like {_KEYS[key]!r}"
            )
        choices = _CHOICES.get(key)
        if choices and value not in choices:
            raise InvalidArgumentError(f"{name}: {key} is {value!r}, not {' or '.join(choices)}")
        if type(value) in (int, float):
            _check_number(name, key, value)


def _check_number(name: str, key: str, value: float) -> None:
    """Raise an error if a number is not possible."""
    bandwidth = key.endswith("gbps")
    above = bandwidth or key in ("oversubscription", "efficiency", "inside_efficiency")
    least, most = _LEAST.get(key, 0), _MOST.get(key, 1e9)
    fits = (least < value if above else least <= value) and not (above and value < _LEAST_ABOVE)
    # NaN fits nowhere.
    if not fits or not (value <= most or (bandwidth and value == float("inf"))):
        low = "above 0 (at least 1e-6)" if above else f"{least} or more"
        limit = f"{most:g}".replace("e+0", "e")
        raise InvalidArgumentError(
            f"{name}: {key} is {value!r}, expected a number {low}, and at most {limit}"
        )


def _edges(name: str, values: dict[str, Any]) -> dict[tuple[int, int], LinkSpec]:
    """Return the links of a graph by their ends, from lists [from, to, GB/s, us]."""
    found: dict[tuple[int, int], LinkSpec] = {}
    for link in values["links"]:
        numbers = link if isinstance(link, list) else []
        kinds = [int, int, int | float, int | float][: len(numbers)]
        fits = 2 <= len(numbers) <= 4 and all(map(isinstance, numbers, kinds))
        fits = fits and not any(isinstance(each, bool) for each in numbers)
        ends = tuple(numbers[:2])
        if not fits or len(set(ends)) < 2 or min(ends) < 0 or max(ends) >= 4096 or ends in found:
            raise InvalidArgumentError(
                f"{name}: links has {link!r}, expected [from, to], [from, to, GB/s] or "
                "[from, to, GB/s, us], each pair of ranks once"
            )
        given = dict(zip(("gbps", "latency_us"), numbers[2:], strict=False))
        for key, value in given.items():
            _check_number(name, key, value)
        given = values | given
        gbps = given["gbps"] * values["efficiency"]
        found[ends[0], ends[1]] = LinkSpec(_ps(given["latency_us"]), gbps, values["whole_ns"])
    return found


def _ps(us: float) -> int:
    return round(us * 1_000_000)
