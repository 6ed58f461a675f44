"""torch.distributed's object collectives, over any serializer, and reductions of objects.

They take torch's arguments in torch's order, with `timeout` and `serializer` added as keywords, and
block. A rank with wrong arguments raises its own error, and all other ranks raise
CollectiveMismatchError with its text. If an object cannot be serialised, its rank takes part in the
call and sends the error instead. The ranks that need the object raise CollectiveError, which names
that rank, and the rank itself raises its own error. In both cases the group stays usable.

Reductions: torch lacks them, mpi4py has `allreduce`. The objects of all ranks come to one rank,
which applies a Python function in the order of ranks:

    op(op(op(x_0, x_1), x_2), ...)

So the function need be neither commutative nor the same on all ranks, and may change its left
operand and return it. It is evaluated once, so there is one result.

Source: torch.distributed.distributed_c10d (2.13).
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from unisono.core.base.deadline import Timeout
from unisono.core.base.text import takes_own_keywords
from unisono.core.base.types import Function
from unisono.core.c10d.arguments import root_of
from unisono.core.c10d.objects.call import ObjectCall
from unisono.core.c10d.objects.packet import FIRST_BYTES
from unisono.core.c10d.objects.serializer import Serializer
from unisono.core.c10d.p2p import peer_of, sender_of
from unisono.core.groups.world import Group, member_group
from unisono.core.operations.checked import list_on_root, one_each
from unisono.core.transports.messages import PROC_NULL, is_proc_null
from unisono.errors import ArgumentTypeError, CollectiveMismatchError, InvalidArgumentError


@takes_own_keywords
def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
    *,
    timeout: Timeout | None = None,
    serializer: Serializer | None = None,
) -> None:
    """Copy the objects of rank `src` (global rank 0 by default) into the lists of all ranks.

    Args:
        object_list: As many entries on every rank; replaced on all ranks but `src`.
        src: Global rank of the root.
        group: The default group if None.
        device: Accepted for torch's sake; objects travel through CPU memory.
        group_src: The root's rank in the group, instead of `src`.
        timeout: Of the whole call; the group's if None.
        serializer: Pickle if None.

    Raises:
        CollectiveMismatchError: Lists of different lengths, or another root.
        CollectiveError: The root's objects cannot be serialised.

    Examples: On rank 1 of 2
        >>> objects = [{"rate": 0.1} if rank == 0 else None]
        >>> dist.broadcast_object_list(objects, src=0)
        >>> objects
        [{'rate': 0.1}]
    """
    if (pg := member_group(group, "broadcast_object_list", stacklevel=4)) is None:
        return
    root = root_of(pg, "broadcast_object_list", src, group_src, default=0)
    with ObjectCall(pg, "broadcast_object_list", timeout, serializer) as call:
        call.check(_require_list, object_list)
        call.label = f"broadcast_object_list[{len(object_list)}]"
        packet = call.pack(lambda: list(object_list)) if pg.rank() == root else None
        packet = call.broadcast(packet, root)
        call.end()
    if pg.rank() != root:
        object_list[:] = call.loads(packet, root)


@takes_own_keywords
def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: Group = None,
    *,
    timeout: Timeout | None = None,
    serializer: Serializer | None = None,
) -> None:
    """Copy the object of rank i into object_list[i] on all ranks, also on rank i itself.

    Args:
        object_list: One entry per rank, replaced.
        obj: This rank's object.
        group: The default group if None.
        timeout: Of the whole call; the group's if None.
        serializer: Pickle if None.

    Raises:
        CollectiveMismatchError: A rank's list has a wrong length.
        CollectiveError: A rank's object cannot be serialised.

    Examples: On rank 1 of 2
        >>> objects = [None, None]
        >>> dist.all_gather_object(objects, {"rank": rank})
        >>> objects
        [{'rank': 0}, {'rank': 1}]
    """
    if (pg := member_group(group, "all_gather_object", stacklevel=4)) is None:
        return
    with ObjectCall(pg, "all_gather_object", timeout, serializer) as call:
        call.check(one_each, pg, object_list, "object_list")
        packets = call.all_gather(call.pack(lambda: obj))
        call.end()
    object_list[:] = call.loads_all(packets)


@takes_own_keywords
def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    *,
    timeout: Timeout | None = None,
    serializer: Serializer | None = None,
) -> None:
    """Copy the object of rank i into object_gather_list[i] on rank `dst` (global rank 0).

    `object_gather_list` has one entry per rank on `dst` and must be None elsewhere. `timeout` and
    `serializer` are as in all_gather_object.

    Raises:
        CollectiveMismatchError: The list is missing, in the wrong place or of a wrong length.
        CollectiveError: On `dst`, if a rank's object cannot be serialised.

    Examples: On rank 0 of 2
        >>> objects = [None, None] if rank == 0 else None
        >>> dist.gather_object({"rank": rank}, objects, dst=0)
        >>> objects
        [{'rank': 0}, {'rank': 1}]
    """
    if (pg := member_group(group, "gather_object", stacklevel=4)) is None:
        return
    root = root_of(pg, "gather_object", dst, group_dst, default=0)
    with ObjectCall(pg, "gather_object", timeout, serializer) as call:
        call.check(list_on_root, pg, object_gather_list, root, "object_gather_list")
        packets = call.gather(call.pack(lambda: obj), root)
        call.end()
    if object_gather_list is not None and pg.rank() == root:
        object_gather_list[:] = call.loads_all(packets)


@takes_own_keywords
def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    *,
    timeout: Timeout | None = None,
    serializer: Serializer | None = None,
) -> None:
    """Copy scatter_object_input_list[i] of rank `src` into rank i's scatter_object_output_list[0].

    `src` is global rank 0 by default; the other ranks' input lists are ignored. `timeout` and
    `serializer` are as in all_gather_object.

    Raises:
        CollectiveMismatchError: The root's list has not one object per rank, or a rank's output
            list is empty.
        CollectiveError: The root's objects cannot be serialised.

    Examples: On rank 1 of 2
        >>> objects = [None]
        >>> dist.scatter_object_list(objects, ["first", "second"] if rank == 0 else None, src=0)
        >>> objects
        ['second']
    """
    if (pg := member_group(group, "scatter_object_list", stacklevel=4)) is None:
        return
    root = root_of(pg, "scatter_object_list", src, group_src, default=0)
    with ObjectCall(pg, "scatter_object_list", timeout, serializer) as call:
        call.check(_require_place, scatter_object_output_list)
        packets = None
        if pg.rank() == root:
            call.check(
                list_on_root, pg, scatter_object_input_list, root, "scatter_object_input_list"
            )
            packets = call.pack_each(scatter_object_input_list or ())
        packet = call.scatter(packets, root)
        call.end()
    scatter_object_output_list[0] = call.loads(packet, root)


@takes_own_keywords
def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    *,
    tag: int = 0,
    timeout: Timeout | None = None,
    serializer: Serializer | None = None,
) -> None:
    """Send objects to another rank, which calls recv_object_list; block until they are sent.

    A list with a `tag` is received with this tag. `device` and `use_batch` are accepted for
    torch's sake. `timeout` and `serializer` are as in all_gather_object.

    Several threads may send to one rank, and several threads may receive from one rank: each list
    arrives whole.

    Raises:
        InvalidArgumentError: The receiver is this rank.

    Examples: On rank 1 of 2
        >>> objects = ["a", "b"] if rank == 0 else [None, None]
        >>> dist.send_object_list(objects, dst=1) if rank == 0 else dist.recv_object_list(objects)
        0
        >>> objects
        ['a', 'b']
    """
    if (pg := member_group(group, "send_object_list", stacklevel=4)) is None:
        return
    peer = peer_of(pg, "send_object_list", dst, group_dst)
    if peer == pg.rank():
        raise InvalidArgumentError("send_object_list to this rank itself would wait for ever")
    _require_list(object_list)
    if is_proc_null(peer):
        return
    with ObjectCall(pg, "send_object_list", timeout, serializer).messages(peer) as call:
        packet = call.pack(lambda: object_list)
        call.wait([call.send(packet.first, peer, tag), *call.send_parts(packet, peer)])
        call.end()


@takes_own_keywords
def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
    *,
    tag: int = 0,
    timeout: Timeout | None = None,
    serializer: Serializer | None = None,
) -> int:
    """Receive objects into a list; return the sender's global rank (-1: not a member).

    Without `src` and `group_src` the first message of any rank counts, as torch documents it.
    With `tag=ANY_TAG` a list of every tag counts; do not send arrays beside lists then.
    `device` and `use_batch` are accepted for torch's sake. `timeout` and `serializer` are as in
    all_gather_object.

    Raises:
        CollectiveMismatchError: The sender's list has another length; `object_list` keeps its
            entries.
        CollectiveError: The sender could not serialise its objects, or this rank cannot read them.

    Examples: On rank 1 of 2
        >>> items = [{"rate": 0.1} if rank == 0 else None]
        >>> dist.send_object_list(items, dst=1) if rank == 0 else dist.recv_object_list(items)
        0
        >>> items
        [{'rate': 0.1}]
    """
    if (pg := member_group(group, "recv_object_list", stacklevel=4)) is None:
        return -1
    wanted = sender_of(pg, "recv_object_list", src, group_src)
    if wanted == pg.rank():
        raise InvalidArgumentError("recv_object_list from this rank itself would wait for ever")
    _require_list(object_list)
    if is_proc_null(wanted):
        return PROC_NULL
    with ObjectCall(pg, "recv_object_list", timeout, serializer).messages(wanted) as call:
        first = np.empty(FIRST_BYTES, np.uint8)
        source = pg.recv(first, wanted, tag, timeout=call.remaining_s).source_rank()
        peer = pg.group_rank(source)
        packet = call.arriving(first, peer)
        call.recv_parts(packet, peer)
        objects = call.loads(packet, peer)
        if len(objects) != len(object_list):
            raise CollectiveMismatchError(
                f"{call}: rank {source} sent {len(objects)} objects, expected {len(object_list)}",
                context=call.context(peer),
            )
        object_list[:] = objects
    return source


@takes_own_keywords
def all_reduce_object(
    obj: Any,
    op: Function,
    group: Group = None,
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
        CollectiveError: `op` raised, or a rank's object cannot be serialised. The rank where that
            happened raises the original error. The group stays usable.

    Examples: On rank 1 of 2
        >>> dist.all_reduce_object({rank: "here"}, lambda a, b: a | b)
        {0: 'here', 1: 'here'}
    """
    if (pg := member_group(group, "all_reduce_object", stacklevel=4)) is None:
        return None
    with ObjectCall(pg, "all_reduce_object", timeout, serializer) as call:
        packets = call.gather(call.pack(lambda: obj), 0)
        result: list[Any] = []

        def reduced() -> Any:
            # This rank's own error first: the other ranks get it as the reason.
            call.end()
            result.append(reduce(op, call.loads_all(packets)))
            return result[0]

        packet = call.broadcast(call.pack(reduced) if pg.rank() == 0 else None, 0)
        call.end()
    return result[0] if pg.rank() == 0 else call.loads(packet, 0)


@takes_own_keywords
def reduce_object(
    obj: Any,
    op: Function,
    dst: int | None = None,
    group: Group = None,
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
        CollectiveError: On `dst`, if a rank's object cannot be serialised.
        Exception: On `dst`, any exception that `op` raises.

    Examples: On rank 0 of 2
        >>> dist.reduce_object(f"from {rank}", max, dst=0)
        'from 1'
    """
    if (pg := member_group(group, "reduce_object", stacklevel=4)) is None:
        return None
    root = root_of(pg, "reduce_object", dst, group_dst, default=0)
    with ObjectCall(pg, "reduce_object", timeout, serializer) as call:
        packets = call.gather(call.pack(lambda: obj), root)
        call.end()
    return reduce(op, call.loads_all(packets)) if pg.rank() == root else None


def _require_list(objects: Any) -> None:
    if not isinstance(objects, list):
        raise ArgumentTypeError(f"object_list must be a list, got {type(objects).__name__}")


def _require_place(objects: Any) -> None:
    if not isinstance(objects, list) or not objects:
        raise InvalidArgumentError("scatter_object_output_list must be a list of at least one")
