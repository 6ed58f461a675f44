"""Estimates of the time of calls, without making them: torch's `_time_estimator`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from threading import get_ident
from typing import Any, NoReturn

from unisono.core.backends import Pending
from unisono.core.base import config
from unisono.core.base.buffers import view
from unisono.core.groups.world import Group, require_group
from unisono.core.operations.hooks import leaves
from unisono.core.operations.methods import OpSchema
from unisono.core.operations.work import Work
from unisono.core.schedules.choice.far import time_us
from unisono.core.schedules.choice.select import Topology, select
from unisono.core.schedules.choice.tuning import topology_of
from unisono.core.schedules.cost import cost
from unisono.core.schedules.ir import COLLECTIVES, ROOTED
from unisono.core.schedules.registry import build
from unisono.errors import InvalidArgumentError, UnsupportedError

# The labels of calls of arrays; another call would read the result.
_OF_ARRAYS = (None, "isend", "irecv", "sendrecv", "gather_into_tensor")
_SHARED_ROUND_US, _SHARED_BYTES_PER_US = 0.5, 5000.0
"""Of a round and of a copy in the memory of a host."""


class TimeEstimate:
    """What `_time_estimator` yields.

    Attributes:
        estimated_time: Of all calls of the block, in microseconds; None inside the block.
    """

    estimated_time: float | None = None


@contextlib.contextmanager
def _time_estimator(group: Group = None, device: Any = None) -> Iterator[TimeEstimate]:
    """Estimate the time of the calls of a with block; nothing is run.

        with dist._time_estimator() as found:
            dist.all_reduce(x)
        print(found.estimated_time, "us")

    The time is that of the chosen algorithm's rounds and bytes, with constants of a usual host, and
    of a network of 2.5 Gb/s with the group's round trip. It shows which of two plans is faster; a
    measured time may differ by several times. Other ranks need not make the calls. Calls of other
    threads are made.

    Args:
        group: The default group if None.
        device: Accepted for torch's sake.

    Raises:
        InvalidArgumentError: The group is in such a block, or in a coalescing block.
        UnsupportedError: The group has no backend of unisono's for CPU memory; or a call in the
            block whose result the caller needs, such as one of objects.

    Source: torch.distributed.distributed_c10d._time_estimator (2.13).
    """
    pg = require_group(group)
    shape = getattr(pg.backends.get("cpu"), "shape", None)
    if shape is None:
        raise UnsupportedError(f"_time_estimator: group '{pg.name}' has no backend for CPU memory")
    if pg._block is not None:
        raise InvalidArgumentError(
            f"_time_estimator: group '{pg.name}' is in a block of calls already"
        )
    block = _Estimator(pg, topology_of(shape))
    found = TimeEstimate()
    # Without these two C++ runs no call of the group.
    pg.calls = pg.port = None
    pg._block = block
    try:
        yield found
        found.estimated_time = block.total_us
    finally:
        pg._block = None
        pg._choose_way()


class _Estimator:
    """Adds up the times of the calls of a block, in place of the group."""

    takes_all = True

    def __init__(self, group: Any, topology: Topology) -> None:
        self.thread = get_ident()  # calls of other threads are made
        self.total_us = 0.0
        self._group = group
        self._topology = topology

    def record(self, schema: OpSchema, arguments: tuple[Any, ...], how: dict[str, Any]) -> Work:
        """Add the time of a call of a method of the group."""
        if (label := how.get("_label")) not in _OF_ARRAYS:
            self.refuse(label)
        values = dict(zip(schema.parameters, arguments, strict=False)) | how
        kinds = {name: kind for name, kind in schema.parameters.items() if kind.lower() in "rwsv"}
        arrays = {name: [*leaves(values.get(name))] for name in kinds}
        sizes = {name: sum(map(_nbytes, each)) for name, each in arrays.items()}
        collective = next((c for c in _LONGEST_FIRST if schema.name.startswith(c)), "")
        nbytes, p = max(sizes.values(), default=0), self._topology.world_size
        if schema.name in ("send", "recv"):
            self.total_us += self._message_us(nbytes)
        elif collective:
            if collective in ("gather", "scatter"):  # The other ranks than the root have one block.
                nbytes = p * max(sizes[name] for name, kind in kinds.items() if kind.islower())
            self.total_us += self._collective_us(collective, nbytes, how)
        else:
            self.refuse(schema.name)
        outputs = [each for name, kind in kinds.items() if kind in "wW" for each in arrays[name]]
        return Work(Pending(outputs, done=True), schema.name, self._group)

    def refuse(self, op: str) -> NoReturn:
        """Raise the error of a call whose result the caller needs."""
        raise UnsupportedError(
            f"{op} in a block of _time_estimator, which takes collectives and messages of arrays"
        )

    def _message_us(self, nbytes: int) -> float:
        if self._topology.shared_memory:
            return _SHARED_ROUND_US + nbytes / _SHARED_BYTES_PER_US
        return self._collective_us("broadcast", nbytes, {}, ranks=2)

    def _collective_us(
        self, collective: str, nbytes: int, how: dict[str, Any], ranks: int = 0
    ) -> float:
        topology = self._topology
        p, local = ranks or topology.world_size, 1 if ranks else topology.local
        wish = {"algorithm": how.get("algorithm"), "ordered": how.get("deterministic", False)}
        if p == 1:
            return nbytes / _SHARED_BYTES_PER_US
        world = Topology(p, topology.shared_memory, local, topology.round_trip_us)
        table = None if ranks else self._group.backends["cpu"].table
        override = config.get("UNISONO_ALGO")
        name, depth = select(collective, nbytes, world, override=override, table=table, **wish)
        if not topology.shared_memory:
            return time_us(collective, name, nbytes, p, local, topology.round_trip_us)
        schedule = build(collective, name, p, 0 if collective in ROOTED else -1, depth, local)
        return cost(schedule, nbytes).time(_SHARED_ROUND_US, 1 / _SHARED_BYTES_PER_US)


_LONGEST_FIRST = sorted(COLLECTIVES, key=len, reverse=True)


def _nbytes(array: Any) -> int:
    return view(array, write=False).array.nbytes
