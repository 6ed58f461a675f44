"""Prepared calls: algorithm, program and text for errors, worked out once per kind of call.

    CallSpec     a call without its memory: collective, count, root, op, splits, ...
      select       the algorithm: by size and ranks, a tuning table, the caller or UNISONO_ALGO
      build        its schedule, for all ranks
      layout_for   the elements of each chunk
      lower        this rank's program, for the engine of the group
    Prepared     the call to agree on (Call), and the program

In all_to_all, gather and scatter a rank knows only its own sizes, so there may be two programs. If
the sizes of all ranks are even and equal, the prepared program runs. Otherwise the ranks
exchange their sizes, and the program of the `Exchange` runs. Between hosts the sizes choose it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import NamedTuple, Protocol

import numpy as np

from unisono.core.backends.api import CallOptions
from unisono.core.backends.blocks import (
    Blocks,
    Splits,
    check_blocks,
    check_splits,
    sent_blocks,
    sent_splits,
)
from unisono.core.backends.flat import FlatMemory
from unisono.core.backends.neighbors import MessageSizes, neighbor_exchange
from unisono.core.base import config
from unisono.core.base.buffers import Array
from unisono.core.base.types import DType, ReduceOp, dtype_named
from unisono.core.engines import Call, Communicator, Exchange, Prepared
from unisono.core.engines.api import NO_STEPS, Collective, fingerprint_of
from unisono.core.schedules import Layout, Program, Schedule, Topology, build, layout_for, select
from unisono.core.schedules.choice.select import FEW_RANKS
from unisono.core.schedules.choice.tables import ChoiceTable
from unisono.core.schedules.registry import available, own_digest

# Collectives whose count is that of one block; there is one block per rank.
_BLOCKS = {"all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"}

# Collectives that need equal shapes, not only equal counts: the elements of [2, 3] and [3, 2] do
# not correspond.
_ELEMENTWISE = {"all_reduce", "reduce", "scan", "exscan"}

# Elements that ready-made collectives reduce. MPI's libraries count the elements of an own op in 32
# bits; MPICH ends the process if there are more.
_MOST_REDUCED = 2**31 - 1

# The argument of `layout_for` that holds the sizes of the blocks.
_SPLITS = {
    "all_gather": "out_splits",
    "gather": "out_splits",
    "reduce_scatter": "in_splits",
    "scatter": "in_splits",
}

_ROLES = {"broadcast": "src", "scatter": "src", "reduce": "dst", "gather": "dst"}

# A training loop repeats some dozens of calls. Without a limit, a program whose sizes never repeat
# would collect prepared calls for ever.
_MAX_PREPARED = 1024


NO_DTYPE = dtype_named("uint8")
"""The dtype of a call without memory."""


class CallSpec(NamedTuple):
    """A call without its memory.

    Attributes:
        collective: Name of the schedules' collective.
        called: Name of the function that the caller used.
        elements: The count, as in `schedules.layout` (a tuple has a method `count`).
        root: Rank in the group; -1 without a root.
        op: Reduce op.
        splits: Sizes of blocks, or of messages to neighbours, that may differ.
        agreed: Other values that must be equal on all ranks.
        members: Number of ranks that contribute to this rank's result; None: all, 0: this rank's
            output is no result. Follows from the others.
    """

    collective: str
    called: str
    elements: int
    root: int = -1
    op: ReduceOp | None = None
    splits: Splits | Blocks | MessageSizes | None = None
    agreed: tuple[object, ...] = ()
    members: int | None = None


class Subject(NamedTuple):
    """The arrays that describe a call in an error, without their memory.

    Attributes:
        dtype: Element type of all arrays.
        shapes: Their shapes.
    """

    dtype: DType
    shapes: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        if len(self.shapes) == 1:
            return f"{self.dtype}[{', '.join(map(str, self.shapes[0]))}]"
        sizes = list(map(prod, self.shapes))
        if len(set(sizes)) == 1:
            return f"{len(sizes)} x {self.dtype}[{sizes[0]}]"
        return f"{self.dtype}[{' + '.join(map(str, sizes))}]"


class _CallSettings(NamedTuple):
    """The settings of a call that are a part of its meaning; see `CallOptions`."""

    algorithm: str | None
    label: str | None
    ordered: bool


def _compared_only(prepared: Prepared) -> Prepared:
    """Return a call that moves no data, with the agreement and the sizes of another call."""
    call, dtype, op, exchange = prepared.call, prepared.dtype, prepared.op, prepared.exchange
    if exchange is not None:
        exchange = exchange._replace(program=NO_STEPS, counts=None, choose=None)
    return Prepared(call, NO_STEPS, dtype, op, exchange, prepared.algorithm, prepared.count)


class ProgramMaker(Protocol):
    """The part of an engine that determines its programs; see `Engine`."""

    name: str
    shares_memory: bool
    local: int
    has_collectives: bool
    most_moved: int

    def lower(self, schedule: Schedule, layout: Layout, itemsize: int) -> Program:
        """Return this rank's program."""


class PreparedCalls:
    """The prepared calls of one group, by what the call means; makes a call that is new.

    C++ has a second table, by the arguments of public functions (`native/bindings/calls.hpp`). Its
    entries are these objects, so a call is prepared once, whichever way it comes.

    Args:
        comm: The group.
        engine: Executes the programs.
        table: Measured choices, equal on all ranks; or None.
        moves_data: Whether the engine moves the data. If not, the calls are only compared:
            programs have no steps, and UNISONO_ALGO and UNISONO_DETERMINISTIC do not hold.

    Attributes:
        deterministic: Whether all calls reduce in the order of ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        engine: ProgramMaker,
        table: ChoiceTable | None = None,
        *,
        moves_data: bool = True,
    ) -> None:
        self._comm = comm
        self._engine = engine
        self._table = table
        self._topology = Topology(comm.size, engine.shares_memory, engine.local, comm.round_trip_us)
        # Read once, as NCCL does, because a later change would have to happen on all ranks.
        self._override = config.get("UNISONO_ALGO") if moves_data else ""
        # On few ranks of a host a sum of halves is one accumulation, which levels would divide.
        few = engine.shares_memory and comm.size <= FEW_RANKS and not self._override
        self._undivided = replace(self._topology, local=comm.size) if few else self._topology
        self.deterministic = moves_data and config.get_flag("UNISONO_DETERMINISTIC")
        self._moves_data = moves_data
        self._prepared: dict[tuple[object, ...], Prepared] = {}

    def get(self, spec: CallSpec, subject: FlatMemory | None, options: CallOptions) -> Prepared:
        """Return a prepared call, made when the call is new.

        Args:
            spec: The call.
            subject: The array that describes the call in an error; None without one.
            options: Algorithm, label and order of reduction.
        """
        ordered = spec.op is not None and (options.deterministic or self.deterministic)
        wishes = _CallSettings(options.algorithm, options.label, ordered)
        like = None if subject is None else Subject(subject.dtype, subject.shapes)
        return self._get(spec, like, wishes)

    def resized(self, prepared: Prepared, shape: tuple[int, ...]) -> Prepared:
        """Return the prepared call on an array of another shape, of a call on one array."""
        spec, wishes = prepared.source
        subject = Subject(prepared.dtype, (shape,))
        return self._get(spec._replace(elements=prod(shape)), subject, wishes)

    def _get(self, spec: CallSpec, subject: Subject | None, wishes: _CallSettings) -> Prepared:
        op, label = spec.op, wishes.label
        # The parts that identify dtype and op: hashing the objects would cost a microsecond.
        reduction = None if op is None else (op.op.value, op.factor)
        like = None if subject is None else (subject.dtype.name, subject.shapes)
        key = (*spec[:4], reduction, *spec[5:7], like, wishes)
        prepared = self._prepared.get(key)
        if prepared is None:
            if len(self._prepared) >= _MAX_PREPARED:
                self._prepared.clear()
            called = spec
            if label is not None:
                called = spec._replace(called=label, agreed=(*spec.agreed, label))
            prepared = self._make(called, subject, wishes.algorithm, ordered=wishes.ordered)
            if not self._moves_data:
                prepared = _compared_only(prepared)
            prepared.source = spec, wishes
            self._prepared[key] = prepared
        return prepared

    def _make(
        self, spec: CallSpec, subject: Subject | None, wish: str | None, *, ordered: bool
    ) -> Prepared:
        """Return everything about a call that does not depend on its memory."""
        collective, called, count, root, op, splits, agreed, members = spec
        dtype, reduce_op = NO_DTYPE if subject is None else subject.dtype, op or ReduceOp.SUM
        size, itemsize = self._comm.size, dtype.itemsize
        nbytes = count * itemsize
        shown = "" if subject is None else str(subject)
        text = f"{called}({', '.join(self._words(spec, shown, wish, ordered))})"
        if isinstance(splits, MessageSizes):
            call = Call.of(called, text, (collective, splits.links.digest, *agreed), nbytes)
            linked = neighbor_exchange(self._comm, splits, dtype)
            return Prepared(call, linked.program, dtype, reduce_op, linked, "", count)
        # Sizes that all ranks know are a part of the agreement; others are compared after it.
        listed = collective in ("all_gather", "reduce_scatter")
        blocks = splits.sizes if listed and isinstance(splits, Blocks) else None
        whole = nbytes * (size if collective in _BLOCKS else 1)
        if blocks is not None:
            count, whole = 0, sum(blocks) * itemsize
        halves = op is not None and not wish and dtype.name in ("float16", "bfloat16")
        algorithm, pipeline = select(
            collective, whole, self._undivided if halves else self._topology, wish, self._override,
            uneven=blocks is not None, ordered=ordered, table=self._table,
        )  # fmt: skip
        what = None
        too_many = op is not None and whole > _MOST_REDUCED * itemsize
        if splits is None or blocks is not None:
            too_many = too_many or whole > self._engine.most_moved
        else:
            pipeline = 1
        by_program = ordered or wish or self._override or too_many
        if self._engine.has_collectives and size > 1 and not by_program:
            algorithm, pipeline = self._engine.name, 1
            known = splits.sizes if isinstance(splits, Blocks) else None
            sent, received = splits if isinstance(splits, Splits) else (None, None)
            reduces = op is not None
            what = Collective(collective, whole, root, reduces, known, sent, received)
        by_steps = (collective, algorithm, size, root, pipeline, self._topology.local)
        own = own_digest(*by_steps) if what is None else ""
        text = f"{text[:-1]}, schedule={own})" if own else text
        if splits is None or blocks is not None:
            given = {} if blocks is None else {_SPLITS[collective]: blocks}
            program = NO_STEPS
            if what is None:
                program = self._lower(collective, algorithm, count, itemsize, root, pipeline, given)
            same = shown if collective in _ELEMENTWISE else ""
            agreed = (
                collective, dtype.name, count, root, op, algorithm, own, pipeline, ordered,
                blocks, same, *agreed,
            )  # fmt: skip
            exchange = None
        else:
            exchange, program = self._exchange(spec, splits, algorithm, own, itemsize, what, wish)
            agreed = (collective, dtype.name, wish, wish and own, root, *agreed)
        call = Call.of(called, text, agreed, nbytes)
        prepared = Prepared(
            call, program, dtype, reduce_op, exchange, algorithm, spec.elements, what=what
        )
        prepared.members = size if members is None else members
        return prepared

    def _lower(
        self,
        collective: str,
        algorithm: str,
        count: int,
        itemsize: int,
        root: int = -1,
        pipeline: int = 1,
        splits: dict[str, tuple[int, ...]] | None = None,
    ) -> Program:
        """Return this rank's program of an algorithm."""
        local = self._topology.local
        schedule = build(collective, algorithm, self._comm.size, root, pipeline, local)
        return self._engine.lower(schedule, layout_for(schedule, count, **(splits or {})), itemsize)

    def _words(self, spec: CallSpec, subject: str, wish: str | None, ordered: bool) -> list[str]:
        """Return the arguments as an error shows them."""
        op, splits = spec.op, spec.splits
        words = [subject] if subject else []
        if splits is not None and not splits.even:
            words.append(
                f"send {list(splits.sent)}, receive {list(splits.received)}"
                if isinstance(splits, (Splits, MessageSizes))
                else f"blocks of {list(splits.sizes)}"
            )
        if isinstance(splits, MessageSizes):
            words.append(splits.links.text)
        if op is not None:
            words.append(repr(op).removeprefix("ReduceOp."))
        if spec.root >= 0:
            words.append(f"{_ROLES[spec.collective]}={self._comm.ranks[spec.root]}")
        if wish or self._override:
            words.append(f"algorithm={wish or self._override}")
        if ordered:
            words.append("deterministic")
        return words

    def _exchange(
        self,
        spec: CallSpec,
        splits: Splits | Blocks,
        algorithm: str,
        own: str,
        itemsize: int,
        what: Collective | None,
        wish: str | None,
    ) -> tuple[Exchange, Program]:
        """Return the exchange of sizes that a rank knows only in part, and the even program."""
        collective, count, root = spec.collective, spec.elements, spec.root
        rank = self._comm.rank
        counts: Callable[[Array], Array]
        if isinstance(splits, Splits):
            # A rank whose own block does not fit must take part, too, so that the check raises on
            # all ranks.
            sent, received = splits
            fitting = (*received[:rank], sent[rank], *received[rank + 1 :])
            linear, given = "pairwise", {"in_splits": sent, "out_splits": fitting}
            mine = np.array([*sent, *received], np.int64)
            check = partial(check_splits, self._comm)
            counts = sent_splits
        else:
            linear, given = "linear", {_SPLITS[collective]: splits.sizes}
            mine = np.array(splits.sizes, np.int64)
            check = partial(check_blocks, self._comm, root=root, collective=collective)
            counts = partial(sent_blocks, root=root, collective=collective)
        program, word = NO_STEPS, fingerprint_of(count, algorithm, own) if splits.even else 0
        if what is not None:
            return Exchange(word, mine, check, NO_STEPS, counts), program
        if splits.even:
            program = self._lower(collective, algorithm, count, itemsize, root)
        make = cache(
            partial(self._lower, collective, count=0, itemsize=itemsize, root=root, splits=given)
        )

        def choose(table: Array) -> Program:
            sent = counts(table)
            most = int(max(sent.sum(0).max(), sent.sum(1).max())) * itemsize
            name = wish if wish in available(collective, self._comm.size, uneven=True) else None
            return make(select(collective, most, self._topology, name, uneven=True).algorithm)

        by_size = choose if self._topology.round_trip_us else None
        return Exchange(word, mine, check, make(linear), counts, by_size), program
