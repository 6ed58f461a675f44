"""Collectives as data: schedules, their proof, their cost, and the choice among them.

`select` picks an algorithm, `build` returns its `Schedule`, and `lower` turns the schedule into the
`Program` of one rank. The package is pure: no thread, no socket, no clock.

`verify.verify` proves a schedule right, and `cost.cost` counts the bytes that it sends. Few ranks
need these two, so the package does not import them.
"""

from unisono.core.schedules.choice.override import parse_override
from unisono.core.schedules.choice.select import Choice, Topology, select
from unisono.core.schedules.ir import Buf, Op, Schedule
from unisono.core.schedules.lowering.layout import Layout, layout_for
from unisono.core.schedules.lowering.program import Program, lower
from unisono.core.schedules.lowering.shared import SharedProgram, lower_shared
from unisono.core.schedules.lowering.uneven import lower_uneven
from unisono.core.schedules.registry import available, build

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
