"""Machines as TOML texts: networks, and what ranks do besides waiting for messages."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import Any

from unisono.core.schedules.ir import Schedule
from unisono.errors import InvalidArgumentError, UnknownNameError
from unisono.workbench.simulate.channels import Channels, in_channels
from unisono.workbench.simulate.evaluators.costs import Costs
from unisono.workbench.simulate.evaluators.loggops import LogGOPS
from unisono.workbench.simulate.networks import (
    FullyConnected,
    Hosts,
    LinkSpec,
    Network,
    Pods,
    Switch,
    Torus,
)

_CHOICES = {
    "model": ("links", "alpha-beta", "loggops"),
    "topology": ("hosts", "switch", "full", "torus"),
}

# Every key, with its default. Units are in the names; 1 GB is 1e9 bytes.
_KEYS: dict[str, Any] = {
    "about": "", "source": "", "model": "links", "topology": "hosts",
    "ranks_per_host": 1, "interfaces": 1, "width": 0,
    "channels": 1, "channel_gbps": float("inf"),
    "inside_us": 0.0, "inside_gbps": float("inf"), "latency_us": 0.0, "gbps": float("inf"),
    "pod_hosts": 0, "pod_us": 0.0, "oversubscription": 1.0, "dragonfly": False,
    "cut_through": True, "whole_ns": False, "padded": False,
    "send_us": 0.0, "recv_us": 0.0, "start_us": 0.0,
    "copy_gbps": float("inf"), "reduce_gbps": float("inf"), "passes": 1,
    "cores": 0, "switch_us": 0.0, "agreement_bytes": 0, "message_gbps": float("inf"),
    "wake_us": 0.0,
    "L_ns": 2500, "o_ns": 1500, "g_ns": 1000, "G_ns": 6, "O_ns": 0, "S_bytes": 65535,
}  # fmt: skip


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
            InvalidArgumentError: The ranks do not fill hosts, pods or rows.
        """
        v = self.of(algorithm)
        spec = LinkSpec(_ps(v["latency_us"]), v["gbps"], v["whole_ns"])
        cut = v["cut_through"]
        if v["topology"] == "torus":
            width = v["width"] or size
            if size % width:
                raise InvalidArgumentError(f"{size} ranks do not fill rows of {width}")
            return Torus(width, size // width, spec, cut_through=cut)
        if v["topology"] != "hosts":
            flat = Switch if v["topology"] == "switch" else FullyConnected
            return flat(size, spec, cut_through=cut)
        pods = None
        if v["pod_hosts"]:
            pods = Pods(v["pod_hosts"], v["oversubscription"], _ps(v["pod_us"]), v["dragonfly"])
        return Hosts(
            size, v["ranks_per_host"], LinkSpec(_ps(v["inside_us"]), v["inside_gbps"]), spec,
            interfaces=v["interfaces"], pods=pods, cut_through=cut,
        )  # fmt: skip

    def in_channels(self, schedule: Schedule, local: int) -> tuple[Schedule, Network]:
        """Return a schedule and its network, with the channels of the machine if it has any."""
        v = self.of(schedule.algorithm)
        network = self.network(schedule.algorithm, schedule.world_size)
        if (channels := v["channels"]) == 1 and v["channel_gbps"] == float("inf"):
            return schedule, network
        spec = LinkSpec(0, v["channel_gbps"])
        return in_channels(schedule, channels, local), Channels(network, channels, spec)

    def costs(self, algorithm: str) -> Costs:
        """Return what ranks do besides waiting."""
        v = self.of(algorithm)
        return Costs(
            _ps(v["send_us"]), _ps(v["recv_us"]), _ps(v["start_us"]), LinkSpec(0, v["copy_gbps"]),
            LinkSpec(0, v["reduce_gbps"], v["whole_ns"]), v["passes"], v["cores"],
            _ps(v["switch_us"]), v["agreement_bytes"], LinkSpec(0, v["message_gbps"]),
            _ps(v["wake_us"]),
        )  # fmt: skip

    def loggops(self) -> LogGOPS:
        """Return the parameters of the LogGOPS model."""
        times = ("latency_ps", "overhead_ps", "gap_ps", "gap_per_byte_ps", "overhead_per_byte_ps")
        ps = {
            name: _ps(self.values[f"{key}_ns"] / 1000)
            for name, key in zip(times, "LogGO", strict=True)
        }
        return LogGOPS(**ps, eager_bytes=self.values["S_bytes"])


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
    for table in (values, *algorithms.values()):
        _check(name, table)
    measured = {
        int(size): {a: {int(p): float(us) for p, us in row.items()} for a, row in rows.items()}
        for size, rows in published.items()
    }
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


def _ps(us: float) -> int:
    return round(us * 1_000_000)
