"""Collectives as data: schedules, their proof, their cost, and the choice among them.

`select` picks an algorithm, `build` returns its `Schedule`, and `lower` turns the schedule into the
`Program` of one rank. The package is pure: no thread, no socket, no clock.

`verify.verify` proves a schedule right, and `cost.cost` counts the bytes that it sends. Few ranks
need these two, so the package does not import them.
"""

from unisono.core.schedules.ir import Buf, Op, Schedule
from unisono.core.schedules.layout import Layout, layout_for
from unisono.core.schedules.override import parse_override
from unisono.core.schedules.program import Program, lower
from unisono.core.schedules.registry import available, build
from unisono.core.schedules.select import Choice, Topology, select
from unisono.core.schedules.shared import SharedProgram, lower_shared
from unisono.core.schedules.uneven import lower_uneven

__all__ = [
    "Buf",
    "Choice",
    "Layout",
    "Op",
    "Program",
    "Schedule",
    "SharedProgram",
    "Topology",
    "available",
    "build",
    "layout_for",
    "lower",
    "lower_shared",
    "lower_uneven",
    "parse_override",
    "select",
]
