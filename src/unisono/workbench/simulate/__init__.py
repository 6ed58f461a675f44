"""Schedules in virtual time: the programs that run for real, on networks that are numbers.

`simulate` runs a schedule on a `Network` and returns when each rank ends and why. The package is
pure: no I/O, no clock, no thread. All times are integers of picoseconds.

Three models. *Links*: messages cross links that serve in turn (`networks`, `links`). *Alpha-beta*:
the same without contention (`contended=False`). *LogGOPS*: processors and interfaces that are
busy, without contention in the network (`loggops`). Large worlds are evaluated stage by stage
(`stages`), or by following a few ranks (`images`, `alike`).
"""

from unisono.workbench.simulate.channels import Channels, in_channels
from unisono.workbench.simulate.evaluators.costs import Costs
from unisono.workbench.simulate.evaluators.evaluate import simulate
from unisono.workbench.simulate.evaluators.goal import from_goal, to_goal
from unisono.workbench.simulate.evaluators.loggops import (
    LogGOPS,
    LogGOPSResult,
    Program,
    program_of,
)
from unisono.workbench.simulate.evaluators.result import Result
from unisono.workbench.simulate.evaluators.traffic import Traffic
from unisono.workbench.simulate.graphs import Graph
from unisono.workbench.simulate.machines import Machine, machine
from unisono.workbench.simulate.networks import (
    FullyConnected,
    Hosts,
    LinkSpec,
    Network,
    Pods,
    Switch,
    Torus,
)
from unisono.workbench.simulate.switches import nvls, sharp

__all__ = [
    "Channels", "Costs", "FullyConnected", "Graph", "Hosts", "LinkSpec", "LogGOPS", "LogGOPSResult",
    "Machine", "Network", "Pods", "Program", "Result", "Switch", "Torus", "Traffic", "from_goal",
    "in_channels", "machine", "nvls", "program_of", "sharp", "simulate", "to_goal",
]  # fmt: skip
