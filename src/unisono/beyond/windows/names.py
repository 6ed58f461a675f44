"""c10d's names beside its Window: options of its methods, and the answer of `get_attr`.

Source: torch._C._distributed_c10d (torch's main line after 2.13).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import timedelta

from unisono.core.operations.c10d_methods import GROUP_DEFAULT


class WindowAccessType(enum.Enum):
    """Whether the owner and the other ranks see one memory."""

    UNIFIED = 0
    SEPARATE = 1


@dataclass(frozen=True)
class WindowAttr:
    """Attributes of the part of a rank, from `Window.get_attr`.

    Attributes:
        access_type: Always UNIFIED: a rank's part is one memory for all ranks.
    """

    access_type: WindowAccessType = WindowAccessType.UNIFIED


@dataclass
class PutOptions:
    """Options of `Window.put`.

    Attributes:
        timeout: The group's by default.
        hints: Without effect.
    """

    timeout: timedelta = GROUP_DEFAULT
    hints: dict[str, str] = field(default_factory=dict)


@dataclass
class SignalOptions(PutOptions):
    """Options of `Window.signal`."""


@dataclass
class WaitSignalOptions(PutOptions):
    """Options of `Window.wait_signal`."""
