"""Several collectives of one kind as one message: torch's coalescing manager.

    with unisono._coalescing_manager(async_ops=True) as manager:
        for gradient in gradients:
            unisono.all_reduce(gradient)
    manager.wait()

Source: torch.distributed.distributed_c10d._coalescing_manager (2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from inspect import signature
from threading import get_ident
from typing import Any, NamedTuple

from unisono.core.backends import Pending
from unisono.core.base.buffers import device_of, view
from unisono.core.base.deadline import Timeout
from unisono.core.base.grouping import grouped
from unisono.core.base.types import ReduceOp
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import Group, require_group
from unisono.core.operations.methods import OPS, OpSchema
from unisono.core.operations.work import Work, wait_all
from unisono.errors import InvalidArgumentError


class CoalescingManager:
    """Holds the works of a block of coalesced calls, to be waited for after the block."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def append(self, work: Work | None = None) -> None:
        """Add a work to wait for."""
        if work is not None:
            self.works.append(work)

    def wait(self, timeout: Timeout | None = None) -> None:
        """Wait for all works.

        Args:
            timeout: Of the whole wait; None for no limit but the works' own.

        Raises:
            CollectiveTimeoutError: `timeout` passed first. The works go on.
            UnisonoError: The error of the first work that failed.
        """
        if timeout is not None:
            # Blocks the host in a stream too, as Work.wait does with a time-out.
            wait_all(self.works, timeout)
            return
        for work in self.works:
            work.wait()


@contextlib.contextmanager
def coalescing_manager(
    group: Group = None, device: Any = None, async_ops: bool = False
) -> Iterator[CoalescingManager]:
    """Make the collectives of a with block one call when the block ends.

    Collects all_reduce, or all_gather_single, or reduce_scatter_single: one kind per block. Calls
    that differ in dtype, reduce op or time-out go into separate messages. Other operations run at
    once. A block left by an exception makes no call. On the other ranks the call of the block then
    raises CollectiveMismatchError with the reason. With `async_ops` such a block breaks the group.
    (With torch the group then collects for ever.)

    Args:
        group: The default group if None.
        device: Accepted for torch's sake.
        async_ops: Return before the end; wait for the manager.

    Raises:
        InvalidArgumentError: Two kinds in one block, or a block inside another.
    """
    pg = require_group(group)
    if pg._block is not None:
        raise InvalidArgumentError(f"group '{pg.name}' is in a coalescing block already")
    recorder, manager, since = _BlockRecorder(), CoalescingManager(), pg.place()
    # Without `calls` the C++ engine runs no call of the group.
    pg.calls, pg._block = None, recorder
    try:
        yield manager
        batches = list(recorder.batches())
    except BaseException as error:
        batches = []
        if not pg.is_known_to_all(error, since):
            _leave(pg, error, async_ops)
        raise
    finally:
        pg._block = None
        pg._choose_way()
    for schema, arguments, how in batches:
        work = pg._call(OPS[schema.coalesced], arguments, {**how, "async_op": async_ops})
        if async_ops:
            manager.append(work)


def _leave(pg: ProcessGroup, error: BaseException, async_ops: bool) -> None:
    """Refuse the call of a block that an exception has left."""
    if async_ops:
        # The other ranks may make several calls before they learn of the first.
        if pg.size() > 1:
            pg.abort(f"{type(error).__name__} in a coalescing block")
    else:
        pg.refuse("_coalescing_manager", error)


class _Recorded(NamedTuple):
    schema: OpSchema
    tensors: tuple[Any, ...]
    op: ReduceOp | None
    how: dict[str, Any]


class _BlockRecorder:
    """Records the calls of a block, in place of the group."""

    takes_all = False

    def __init__(self) -> None:
        self.thread = get_ident()  # calls of other threads are no part of the block
        self._calls: list[_Recorded] = []

    def record(
        self, schema: OpSchema, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Work:
        """Record a call of a method of the group."""
        bound = signature(schema.check).bind(None, *arguments, **keywords)
        bound.apply_defaults()
        values, how = bound.arguments, dict(bound.arguments["how"])
        for name, default in (schema.check.__kwdefaults__ or {}).items():
            if values[name] is not default:
                how[name] = values[name]
        kind = schema.name
        if self._calls and self._calls[0].schema.name != kind:
            raise InvalidArgumentError(
                f"{kind} in a coalescing block that began with {self._calls[0].schema.name}: a "
                "block takes one kind of collective"
            )
        how.pop("async_op", None)
        tensors = tuple(values[name] for name in schema.data_names)
        self._calls.append(_Recorded(schema, tensors, values.get("op"), how))
        return _NotYet()

    def batches(self) -> Iterator[tuple[OpSchema, tuple[Any, ...], dict[str, Any]]]:
        """Return the operation, the arguments and the options of each call to make."""
        alike = grouped(
            (repr((_dtype_name(call.tensors[0]), call.op, call.how)), call) for call in self._calls
        )
        for calls in alike.values():
            schema, _, op, how = calls[0]
            columns = [list(column) for column in zip(*(c.tensors for c in calls), strict=True)]
            yield schema, tuple(columns if op is None else [*columns, op]), how


def _dtype_name(array: Any) -> str:
    """Return the name of an array's dtype; of an array of a device as its library writes it."""
    on_host = device_of(array) == "cpu"
    return view(array, write=False).dtype.name if on_host else str(array.dtype)


class _NotYet(Work):
    """The work of a call that is not made before its block ends."""

    _op = "call"

    def __init__(self) -> None:
        pass

    @property
    def _end(self) -> Pending:  # type: ignore[override]
        raise InvalidArgumentError(
            "this call is made at the end of its coalescing block",
            hint="wait for the manager, after the block",
        )

    def __repr__(self) -> str:
        return "<Work recorded in a coalescing block>"
