"""The address of a message: which group, what for, which tag. Pure."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

__all__ = ["Key", "Kind"]


class Kind(IntEnum):
    """What a message is for."""

    COLLECTIVE = 0
    P2P = 1
    ASK = 2
    ANSWER = 3
    FAIL = 4
    GOODBYE = 5
    LOST = 6
    KNOCK = 7


class Key(NamedTuple):
    """The address of a message inside a rank: group, purpose, and tag or sequence number."""

    context: int
    kind: Kind
    tag: int
