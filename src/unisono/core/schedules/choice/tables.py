"""Tables of measured choices: the algorithms that are faster on one machine than the built-in rule.

A table belongs to a machine, an engine and a shape of the world. Its rules give an algorithm for
some sizes of some collectives, and for all other calls the built-in rule decides. `select` uses a
table only if all ranks of a group have an equal table; `digest` compares them.

    {"format": 2, "unisono": "0.1.0", "machine": "...", "engine": "native", "over": "tcp",
     "ranks": 4, "local": 1, "round_trip_us": 250, "rules": [["reduce", 0, 8191, "linear"], ...],
     "measured": [["reduce", 1024, "linear", [111.0, 114.2, 109.8]], ...], "about": {...}}

`rules` are inclusive ranges of bytes of the whole data. `measured` has the microseconds of each
pass. Only people and `unisono explain` read `measured` and `about`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from unisono.core.base import document
from unisono.core.schedules.ir import COLLECTIVES
from unisono.core.schedules.registry import available
from unisono.errors import InvalidArgumentError

FORMAT = 2

VIRTUAL = "any machine, in virtual time"
"""The machine of a table of simulated times."""

Measured = Mapping[tuple[str, int], Mapping[str, tuple[float, ...]]]
"""(collective, bytes) -> algorithm -> microseconds of a call in each pass."""


class GroupShape(NamedTuple):
    """The kind of group that a table is for.

    Attributes:
        engine: "native" or "reference".
        over: "shared-memory", or the transport of messages, such as "tcp".
        ranks: Number of ranks.
        local: Ranks per host; see `Topology.local`.
        round_trip_us: Between hosts; see `Topology.round_trip_us`.
    """

    engine: str
    over: str
    ranks: int
    local: int
    round_trip_us: int = 0

    def __str__(self) -> str:
        far = f"-{self.round_trip_us}us" if self.round_trip_us else ""
        return f"{self.engine}-{self.over}-{self.ranks}-{self.local}{far}"


class Rule(NamedTuple):
    """The algorithm for data of `least` to `most` bytes."""

    collective: str
    least: int
    most: int
    algorithm: str


@dataclass(frozen=True)
class ChoiceTable:
    """The measured choices of one machine for one shape of the world.

    Attributes:
        shape: The groups that the table is for.
        machine: The machine, in words.
        version: Version of unisono that measured.
        rules: In the order of collectives and sizes; ranges do not overlap.
        measured: The times that the rules come from.
        about: Date, duration and load of the measurement.
    """

    shape: GroupShape
    machine: str
    version: str
    rules: tuple[Rule, ...]
    measured: Measured = field(default_factory=dict, repr=False)
    about: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def digest(self) -> str:
        """A text that is equal for tables with the same shape, version and rules."""
        text = json.dumps([FORMAT, self.version, self.shape, self.rules])
        return blake2b(text.encode(), digest_size=6).hexdigest()

    def rule(self, collective: str, nbytes: int) -> Rule | None:
        """Return the rule for a call, or None."""
        for rule in self.rules:
            if rule.collective == collective and rule.least <= nbytes <= rule.most:
                return rule
        return None

    def to_json(self) -> str:
        """Return the table as text, a line per rule and per measured size."""
        measured = [
            json.dumps([*cell, name, times])
            for cell, names in self.measured.items()
            for name, times in names.items()
        ]
        lists = {"rules": [json.dumps(rule) for rule in self.rules], "measured": measured}
        head = {"format": FORMAT, "unisono": self.version, "machine": self.machine}
        head |= self.shape._asdict() | {"about": dict(self.about)}
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        lines += [f'"{key}": [\n  ' + ",\n  ".join(rows) + "\n]" for key, rows in lists.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, name: str, text: str) -> ChoiceTable:
        """Return the table that `to_json` wrote.

        Args:
            name: Of the file, for errors.
            text: Its content.

        Raises:
            InvalidArgumentError: The text is no table of this format, a rule names an unknown
                collective or algorithm, or ranges overlap.
        """
        try:
            fields = document.loads(dict[str, Any], text, version=FORMAT)
            shape = GroupShape(*(fields[key] for key in GroupShape._fields))
            rules = tuple(Rule(*row) for row in fields["rules"])
            _check(rules, shape)
            measured = _measured(fields["measured"])
            machine, version = str(fields["machine"]), str(fields["unisono"])
            return cls(shape, machine, version, rules, measured, dict(fields["about"]))
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            # A KeyError's text is the missing key alone.
            why = f"no key {error}" if isinstance(error, KeyError) else str(error)
            raise InvalidArgumentError(
                f"{name} is no tuning table of format {FORMAT}: {why}",
                hint="measure again with `unisono tune`, or set UNISONO_TUNING=0",
            ) from None


def _measured(rows: list[list[Any]]) -> Measured:
    """Return the times of a table; raise ValueError if there is one that is no time."""
    measured: dict[tuple[str, int], dict[str, tuple[float, ...]]] = {}
    for collective, nbytes, algorithm, times in rows:
        if type(nbytes) is not int or nbytes < 1 or not times or not min(times) > 0:
            raise ValueError(f"{collective} of {nbytes!r} bytes takes {times!r} us")
        measured.setdefault((collective, nbytes), {})[algorithm] = tuple(map(float, times))
    return measured


def _check(rules: tuple[Rule, ...], shape: GroupShape) -> None:
    """Raise ValueError if the shape or a rule cannot be used."""
    types = [type(value) for value in shape]
    # The ranks publish the names in one word.
    fits = types == [str, str, int, int, int]
    fits = fits and re.fullmatch(r"[\w-]+", shape.engine + shape.over) is not None
    if not fits or shape.ranks < 1 or shape.local < 1 or shape.round_trip_us < 0:
        raise ValueError(f"shape {list(shape)}")
    ends: dict[str, int] = {}
    for rule in rules:
        if rule.collective not in COLLECTIVES:
            raise ValueError(f"unknown collective {rule.collective!r}")
        names = available(rule.collective, shape.ranks, local=shape.local)
        if rule.algorithm not in names:
            raise ValueError(
                f"{rule.collective} has no algorithm {rule.algorithm!r} on {shape.ranks} ranks"
            )
        least, most = rule.least, rule.most
        if type(least) is not int or type(most) is not int:
            raise ValueError(f"{rule.collective}: sizes {least!r} and {most!r}")
        if not ends.get(rule.collective, -1) < least <= most:
            raise ValueError(f"{rule.collective}: ranges overlap or are empty at {least} bytes")
        ends[rule.collective] = most
