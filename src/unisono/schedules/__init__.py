"""Collectives as data: schedules, their proof, their cost, and the choice among them.

`select` picks an algorithm, `build` returns its `Schedule`, and `lower` turns the schedule into the
`Program` of one rank. `verify` proves a schedule right, and `cost` counts the bytes that it sends.
The package is pure: no thread, no socket, no clock.
"""

from unisono.schedules.cost import Cost, cost
from unisono.schedules.ir import Buf, Op, Schedule
from unisono.schedules.layout import Layout, layout_for
from unisono.schedules.override import parse_override
from unisono.schedules.program import Program, lower
from unisono.schedules.registry import available, build
from unisono.schedules.select import Choice, Topology, select
from unisono.schedules.shared import SharedProgram, lower_shared
from unisono.schedules.uneven import lower_uneven
from unisono.schedules.verify import verify

__all__ = [
    "Buf",
    "Choice",
    "Cost",
    "Layout",
    "Op",
    "Program",
    "Schedule",
    "SharedProgram",
    "Topology",
    "available",
    "build",
    "cost",
    "layout_for",
    "lower",
    "lower_shared",
    "lower_uneven",
    "parse_override",
    "select",
    "verify",
]
