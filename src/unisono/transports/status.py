"""What a transport reports: how far a rank is, and why a context is broken. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Failure", "Status", "Unreached"]

Unreached = dict[int, list[str]]
"""By rank, the addresses at which it could not be reached, each with the reason."""


class Status(NamedTuple):
    """A call that a rank has entered: its sequence number (0: none yet) and its text.

    `unreached` are the ranks that it could not reach.
    """

    seq: int
    text: str
    unreached: Unreached = {}  # noqa: RUF012  never changed


class Failure(Exception):
    """A context is broken; the same on the rank that found out and on those it told.

    `kind` is "timeout", "lost", "failed", "memory" or "aborted"; `peers` are the ranks to blame;
    `by` is the rank that found out; `table` says who could not reach whom, line by line.
    """

    def __init__(
        self, kind: str, reason: str, peers: Iterable[int], by: int, table: Iterable[str] = ()
    ) -> None:
        super().__init__(kind, reason, tuple(peers), by, tuple(table))
        self.kind = kind
        self.reason = reason
        self.peers = tuple(peers)
        self.by = by
        self.table = tuple(table)

    @property
    def words(self) -> list[object]:
        """What to make the same failure of elsewhere."""
        return list(self.args)
