"""The work of ranks besides messages: overheads, copies, reductions, an agreement."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from unisono.core.schedules.ir import IntArray
from unisono.errors import InvalidArgumentError
from unisono.workbench.simulate.evaluators.traffic import WORK, TrafficRows
from unisono.workbench.simulate.networks import LinkSpec, whole_ps


@dataclass(frozen=True)
class Costs:
    """The time that a rank spends on its rows; all of it is 0 by default.

    Attributes:
        send_ps: Per message sent.
        recv_ps: Per message received.
        start_ps: Before the first row of a rank.
        memory: Bandwidth of local copies, as a link without latency.
        reduction: Bandwidth of reductions, in bytes of the operand.
        passes: Times that a reduction passes over its operand.
        cores: Cores per host, on which its ranks take turns; 0 if each rank has its own. Ranks
            that wait use no core.
        switch_ps: Time that a core needs to go from one rank to another.
        agreement_bytes: Size of the messages with which ranks agree on a call before its first
            stage, in ceil(lg p) rounds; 0 for no agreement.
        messages: Bandwidth at which a rank itself moves the bytes of a message, at both ends.
            Over TCP the kernel copies them on the rank's core.
        wake_ps: With `cores`, the time that a core needs to wake a rank whose message has come.
    """

    send_ps: int = 0
    recv_ps: int = 0
    start_ps: int = 0
    memory: LinkSpec = field(default_factory=LinkSpec)
    reduction: LinkSpec = field(default_factory=LinkSpec)
    passes: int = 1
    cores: int = 0
    switch_ps: int = 0
    agreement_bytes: int = 0
    messages: LinkSpec = field(default_factory=LinkSpec)
    wake_ps: int = 0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InvalidArgumentError: A value is negative.
        """
        for name, value in vars(self).items():
            if not isinstance(value, LinkSpec) and not value >= 0:
                raise InvalidArgumentError(f"costs: {name} is {value}, expected 0 or more")

    @property
    def receives_free(self) -> bool:
        """Whether a receive takes no time, so that the order of receives does not count."""
        return not (self.recv_ps or self.works or np.isfinite(self.messages.gbps))

    @property
    def works(self) -> bool:
        """Whether local copies or reductions take time."""
        return bool(np.isfinite([self.memory.gbps, self.reduction.gbps]).any())

    def of(self, rows: TrafficRows) -> IntArray:
        """Return the time that each row takes on its rank, after its message is there."""
        fixed = np.array([self.send_ps, self.recv_ps, 0]).take(rows.kind)
        if np.isfinite(self.messages.gbps):
            fixed = fixed + np.where(rows.kind == WORK, 0, self.messages.busy_ps(rows.nbytes))
        if np.isfinite(self.reduction.gbps):
            reduced = whole_ps(float(self.passes) * self.reduction.busy_ps(rows.nbytes))
            fixed = fixed + np.where(rows.reduces, reduced, 0)
        if np.isfinite(self.memory.gbps):
            copied = (rows.kind == WORK) & ~rows.reduces
            fixed = fixed + np.where(copied, self.memory.busy_ps(rows.nbytes), 0)
        return fixed
