"""Parse UNISONO_ALGO: the algorithms that a user permits, in NCCL_ALGO's grammar.

    text  = [collective ":"] list (";" collective ":" list)*
    list  = ["^"] algorithm ("," algorithm)*

    ring                          ring wherever it exists
    ^ring                         anything but ring
    ring,tree;broadcast:binomial  ring or tree, and binomial for broadcasts

Case, "_" and "-" make no difference: `AllReduce` and `all_reduce` are the same name.
Only the first entry may leave out the collective. A later entry overrides an earlier entry.

Source: NCCL 2.30 (`parseList`), where unknown names are errors since 2.24 as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from unisono.core.schedules.ir import COLLECTIVES
from unisono.core.schedules.registry import ALGORITHMS
from unisono.errors import InvalidArgumentError

EVERY = "*"  # the key of the entry without a collective

_HINT = "UNISONO_ALGO has NCCL_ALGO's grammar, e.g. 'ring' or 'ring,tree;broadcast:^linear'"


@dataclass(frozen=True)
class Permission:
    """A list of algorithms, permitted or (`inverted`) forbidden."""

    algorithms: tuple[str, ...]
    inverted: bool = False

    def among(self, names: Iterable[str]) -> list[str]:
        """Return the permitted names among `names`, in the order of the permission's list."""
        names = list(names)
        if self.inverted:
            return [name for name in names if name not in self.algorithms]
        return [name for name in self.algorithms if name in names]

    def __str__(self) -> str:
        return "^" * self.inverted + ",".join(self.algorithms)


@lru_cache(maxsize=64)
def parse_override(text: str) -> Mapping[str, Permission]:
    """Return collective -> permission; the entry without a collective has the key `EVERY`.

    Raises:
        InvalidArgumentError: The grammar is wrong, or a collective or algorithm is unknown. The
            text lists the known names.
    """
    parsed: dict[str, Permission] = {}
    if not text.strip():
        return MappingProxyType(parsed)
    for index, part in enumerate(text.split(";")):
        collective, colon, names = part.rpartition(":")
        if not colon and index > 0:
            raise InvalidArgumentError(
                f"algorithm override {text!r}: entry {part.strip()!r} names no collective, "
                "only the first entry may leave it out",
                hint=_HINT,
            )
        key = _known(collective, COLLECTIVES, "collective", text) if colon else EVERY
        parsed[key] = _permission(names.strip(), text)
    return MappingProxyType(parsed)


def _permission(names: str, text: str) -> Permission:
    inverted = names.startswith("^")
    elements = names.removeprefix("^").split(",")
    return Permission(
        tuple(_known(name, ALGORITHMS, "algorithm", text) for name in elements), inverted
    )


def _known(name: str, known: Iterable[str], kind: str, text: str) -> str:
    """Return the official spelling of `name`."""
    for candidate in known:
        if _plain(candidate) == _plain(name):
            return candidate
    raise InvalidArgumentError(
        f"algorithm override {text!r}: unknown {kind} {name.strip()!r} (known: {', '.join(known)})",
        hint=_HINT,
    )


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "").replace("-", "")
