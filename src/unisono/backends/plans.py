"""Plans of calls: the algorithm, the program and the words of an error, worked out once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from unisono.backends.splits import Splits, check_splits
from unisono.backends.staging import Flat
from unisono.base import config
from unisono.base.types import DType, ReduceOp
from unisono.engines import Call, Communicator, Engine, Exchange
from unisono.engines.api import fingerprint_of
from unisono.schedules import Program, Topology, build, layout_for, select

__all__ = ["Asked", "Plan", "Planner"]

# Collectives whose count is that of one block, of which there is one per rank.
_BLOCKS = {"all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"}

# Collectives in which equal counts are not enough: [2, 3] and [3, 2] have no elements that belong
# together.
_ELEMENTWISE = {"all_reduce", "reduce"}

_ROLES = {"broadcast": "src", "scatter": "src", "reduce": "dst", "gather": "dst"}

# A training loop repeats some dozens of calls; a program whose sizes never repeat must not
# collect plans for ever.
_MAX_PLANS = 1024


class Asked(NamedTuple):
    """What a plan is made from: a call without its memory."""

    collective: str
    called: str
    algorithm: str | None
    elements: int  # the count; a tuple has a method of that name
    dtype: DType
    root: int
    op: ReduceOp | None
    agreed: tuple[object, ...]
    splits: Splits | None


class Plan(NamedTuple):
    """What is the same whenever a call is repeated."""

    call: Call
    program: Program
    exchange: Exchange | None


class Planner:
    """Makes the plans of one group, and keeps them.

    Args:
        comm: The group.
        engine: What the programs are for.
    """

    def __init__(self, comm: Communicator, engine: Engine) -> None:
        self._comm = comm
        self._engine = engine
        self._topology = Topology(comm.size, engine.shares_memory)
        # Read once, as NCCL does: a change in mid-course would have to happen on all ranks.
        self._override = config.get("UNISONO_ALGO")
        self._plans: dict[tuple[object, ...], Plan] = {}

    def plan(self, subject: Flat | None, asked: Asked) -> Plan:
        """Return the plan of a call, made when the call is new."""
        # Of dtype and op what identifies them: hashing the objects would cost a microsecond.
        op, shapes = asked.op, None if subject is None else subject.shapes
        reduction = None if op is None else (op.op.value, op.factor)
        rest = (
            asked.called,
            asked.algorithm,
            asked.elements,
            asked.root,
            asked.agreed,
            asked.splits,
        )
        key = (asked.collective, shapes, asked.dtype.name, reduction, *rest)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._make(subject, asked)
        return plan

    def _make(self, subject: Flat | None, asked: Asked) -> Plan:
        """Work out everything about a call that does not depend on the memory it gets."""
        collective, called, wish, count, dtype, root, op, agreed, splits = asked
        size, itemsize = self._comm.size, dtype.itemsize
        nbytes = count * itemsize
        whole = nbytes * (size if collective in _BLOCKS else 1)
        algorithm, pipeline = select(collective, whole, self._topology, wish, self._override)
        words = [] if subject is None else [str(subject)]
        if splits is not None and not splits.even:
            words.append(f"send {list(splits.sent)}, receive {list(splits.received)}")
        if op is not None:
            words.append(repr(op).removeprefix("ReduceOp."))
        if root >= 0:
            words.append(f"{_ROLES[collective]}={self._comm.ranks[root]}")
        if wish or self._override:
            words.append(f"algorithm={wish or self._override}")
        text = f"{called}({', '.join(words)})"
        if splits is None:
            schedule = build(collective, algorithm, size, root, pipeline)
            program = self._engine.lower(schedule, layout_for(schedule, count), itemsize)
            same = words[:1] if collective in _ELEMENTWISE else []
            agreed = (collective, dtype.name, count, root, op, algorithm, pipeline, *same, *agreed)
            return Plan(Call.of(called, text, agreed, nbytes), program, None)
        exchange, program = self._exchange_plan(algorithm, count, itemsize, splits)
        call = Call.of(called, text, (collective, dtype.name, wish), nbytes)
        return Plan(call, program, exchange)

    def _exchange_plan(
        self, algorithm: str, count: int, itemsize: int, splits: Splits
    ) -> tuple[Exchange, Program]:
        rank, size = self._comm.rank, self._comm.size
        pairwise = build("all_to_all", "pairwise", size)
        # A rank whose own block does not fit must take part too: the check tells everybody.
        sent, received = splits
        fitting = (*received[:rank], sent[rank], *received[rank + 1 :])
        layout = layout_for(pairwise, 0, sent, fitting)
        program = uneven = self._engine.lower(pairwise, layout, itemsize)
        if splits.even:
            schedule = build("all_to_all", algorithm, size)
            program = self._engine.lower(schedule, layout_for(schedule, count), itemsize)
        exchange = Exchange(
            fingerprint_of(count, algorithm) if splits.even else 0,
            np.array([*sent, *received], np.int64),
            lambda call, table: check_splits(self._comm, call, table),
            uneven,
            lambda table: table[:, :size],
        )
        return exchange, program
