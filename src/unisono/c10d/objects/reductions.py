"""Reductions of Python objects by a Python function: what torch lacks and mpi4py calls `allreduce`.

The objects of all ranks come to one rank, which applies the function in the order of ranks:

    op(op(op(x_0, x_1), x_2), ...)

So the function need be neither commutative nor the same on all ranks, and may change its left
operand and return it. There is one evaluation, hence one result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

from unisono.base.deadline import Timeout
from unisono.c10d.collectives import root_of
from unisono.c10d.objects.functions import ObjectCall
from unisono.c10d.objects.serializer import Serializer
from unisono.groups.world import member_group

__all__ = ["all_reduce_object", "reduce_object"]

Function = Callable[[Any, Any], Any]


def all_reduce_object(
    obj: Any,
    op: Function,
    group: Any = None,
    *,
    timeout: Timeout | None = None,
    serializer: Serializer | None = None,
) -> Any:
    """Return the reduction of all ranks' objects; every rank gets its own copy of the result.

    Formula: op(...op(op(x_0, x_1), x_2)..., x_{p-1}), evaluated on rank 0 of the group.

    Args:
        obj: This rank's object.
        op: Function of two objects, such as `operator.add`; used on rank 0 of the group only.
        group: The default group if None. On a rank that is no member: warns, returns None.
        timeout: Of the whole call; the group's if None.
        serializer: Pickle if None.

    Raises:
        CollectiveError: `op` raised, or a rank's object cannot be serialised; the ranks where it
            happened get the error itself. The group stays usable.
    """
    if (pg := member_group(group, "all_reduce_object")) is None:
        return None
    with ObjectCall(pg, "all_reduce_object", timeout, serializer) as call:
        packets = call.gather(call.pack(lambda: obj), 0)
        if pg.rank() != 0:
            packet = call.broadcast(None, 0)
            call.end()
            return call.loads(packet, 0)
        result: list[Any] = []

        def reduced() -> Any:
            # This rank's own error first: the others read it as the reason.
            call.end()
            result.append(reduce(op, call.loads_all(packets)))
            return result[0]

        call.broadcast(call.pack(reduced), 0)
        call.end()
        return result[0]


def reduce_object(
    obj: Any,
    op: Function,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
    *,
    timeout: Timeout | None = None,
    serializer: Serializer | None = None,
) -> Any:
    """Return the reduction of all ranks' objects on rank `dst` (global rank 0), None elsewhere.

    Formula: op(...op(op(x_0, x_1), x_2)..., x_{p-1}), evaluated on `dst`.

    Args:
        obj: This rank's object.
        op: Function of two objects; used on `dst` only.
        dst: Global rank of the root.
        group: The default group if None. On a rank that is no member: warns, returns None.
        group_dst: The root's rank in the group, instead of `dst`.
        timeout: Of the whole call; the group's if None.
        serializer: Pickle if None.

    Raises:
        CollectiveError: On `dst`, if a rank's object cannot be serialised. What `op` raises is
            raised on `dst`.
    """
    if (pg := member_group(group, "reduce_object")) is None:
        return None
    root = root_of(pg, "reduce_object", dst, group_dst, default=0)
    with ObjectCall(pg, "reduce_object", timeout, serializer) as call:
        packets = call.gather(call.pack(lambda: obj), root)
        call.end()
        return reduce(op, call.loads_all(packets)) if pg.rank() == root else None
