"""torch.distributed's point-to-point functions.

Source: torch.distributed.distributed_c10d (2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import numpy as np

from unisono.core.base.buffers import view
from unisono.core.base.deadline import Timeout
from unisono.core.base.types import Array
from unisono.core.c10d.arguments import group_rank_of
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import Group, member_group, resolve
from unisono.core.operations.keywords import CallKeywords, How, check_keywords
from unisono.core.operations.methods import in_cpp
from unisono.core.operations.work import Work
from unisono.core.transports.messages import ANY_TAG, PROC_NULL, MessageInfo, is_proc_null
from unisono.errors import CollectiveTimeoutError, InvalidArgumentError


def peer_of(group: ProcessGroup, call: str, global_rank: int | None, group_rank: int | None) -> int:
    """Return as `group_rank_of`, for a message, which may be to or from `PROC_NULL`."""
    if group_rank is None and is_proc_null(global_rank):
        return PROC_NULL
    return group_rank_of(group, call, global_rank, group_rank)


def sender_of(group: ProcessGroup, call: str, src: int | None, group_src: int | None) -> int | None:
    """Return the rank in `group` of a sender; None, that is any rank, if neither is given."""
    return None if src is None and group_src is None else peer_of(group, call, src, group_src)


@in_cpp
def isend(
    tensor: Array,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None:
    """Start sending to a rank, also to this rank; the tensor must stay until it is done.

    Args:
        tensor: [...] any layout.
        dst: Global rank of the receiver; `PROC_NULL`: send nothing.
        group: The default group if None.
        tag: A receive takes messages of its tag, in order.
        group_dst: The receiver's rank in the group, instead of `dst`.
        **how: timeout.

    Examples: On rank 1 of 2
        >>> x, received = np.array([rank]), np.array([-1])
        >>> works = [dist.isend(x, dst=1 - rank), dist.irecv(received, src=1 - rank)]
        >>> dist.wait_all(works)
        >>> received
        array([0])
    """
    if (pg := member_group(group, "isend")) is None:
        return None
    check_keywords("send", "isend", how)
    peer = peer_of(pg, "isend", dst, group_dst)
    return pg.send(tensor, peer, tag, async_op=True, _label="isend", **how)


@in_cpp
def irecv(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None:
    """Start receiving from a rank, or from any rank without `src` and `group_src`.

    Examples: On rank 1 of 2
        >>> x = np.array([rank])
        >>> work = dist.irecv(x) if rank == 1 else dist.isend(x, dst=1)
        >>> work.wait(), work.source_rank(), x
        (True, 0, array([0]))
    """
    if (pg := member_group(group, "irecv")) is None:
        return None
    check_keywords("recv", "irecv", how)
    peer = sender_of(pg, "irecv", src, group_src)
    return pg.recv(tensor, peer, tag, async_op=True, _label="irecv", **how)


@in_cpp
def send(
    tensor: Array,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    **how: Unpack[CallKeywords],
) -> None:
    """Send to another rank; the tensor may be changed on return.

    Raises:
        InvalidArgumentError: The receiver is this rank, and no `irecv` waits for the message.

    Examples: On rank 1 of 2
        >>> x = np.array([rank + 5])
        >>> dist.send(x, dst=1) if rank == 0 else dist.recv(x, src=0)
        0
        >>> x
        array([5])
    """
    if (pg := member_group(group, "send")) is None:
        return
    check_keywords("send", "send", how)
    peer = peer_of(pg, "send", dst, group_dst)
    pg.send(tensor, peer, tag, **how)


@in_cpp
def recv(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    partial: bool = False,
    **how: Unpack[CallKeywords],
) -> int:
    """Receive from a rank, or from any rank; return the sender's global rank (-1: not a member).

    Args:
        tensor: [...] any layout.
        src: Global rank of the sender; any rank without `src` and `group_src`. With
            `PROC_NULL` the tensor keeps its values, and the call returns `PROC_NULL`.
        group: The default group if None.
        tag: Of the message; `ANY_TAG` takes every tag.
        group_src: The sender's rank in the group, instead of `src`.
        partial: Take a message of fewer elements, too, and return the number of its elements
            instead of the sender. They are the first of the tensor in C order; the other elements
            keep their values.
        **how: timeout.

    Raises:
        CollectiveMismatchError: The message has another dtype or size (`partial`: more elements).
            The message is dropped, the tensor keeps its values, and the group stays usable.
        CollectiveTimeoutError: No message in time; the group stays usable.

    Examples: On rank 1 of 2
        >>> x = np.array([rank, rank, rank])
        >>> dist.send(x[:2], dst=1) if rank == 0 else dist.recv(x, src=0, partial=True)
        2
        >>> x
        array([0, 0, 1])
    """
    if (pg := member_group(group, "recv")) is None:
        return -1
    check_keywords("recv", "recv", how)
    peer = sender_of(pg, "recv", src, group_src)
    if not partial:
        return pg.recv(tensor, peer, tag, **how).source_rank()
    return pg.recv(tensor, peer, tag, _partial=True, **how)._received()


class Received(NamedTuple):
    """A message that `recv_array` has received.

    Attributes:
        array: [count] its elements.
        source: Global rank of the sender.
        tag: Of the message.
    """

    array: np.ndarray[Any, Any]
    source: int
    tag: int


def recv_array(
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    timeout: Timeout | None = None,
) -> Received | None:
    """Receive a message of any size and dtype into a new array.

    Return the array, the sender's rank and the tag. The array has 1 dimension, because a message
    has no shape. Its dtype is the sender's. Records, texts and times come as bytes, for
    `array.view(dtype)`. bfloat16 and float8 come as unsigned integers unless ml_dtypes is imported.
    The call is one receive: no other thread can take the message between a probe and the receive.

    Args:
        src: Global rank of the sender; any rank without `src` and `group_src`.
        group: The default group if None. On a rank that is no member: warns, returns None.
        tag: Of the message; `ANY_TAG` takes every tag.
        group_src: The sender's rank in the group, instead of `src`.
        timeout: The group's if None.

    Raises:
        CollectiveTimeoutError: No message in time; the group stays usable.
        MemoryError: The message does not fit in memory, and was dropped.

    Examples: On rank 1 of 2
        >>> dist.send(np.arange(3), dst=1, tag=5) if rank == 0 else dist.recv_array(tag=5)
        Received(array=array([0, 1, 2]), source=0, tag=5)
    """
    if (pg := member_group(group, "recv_array")) is None:
        return None
    work = pg.recv_array(sender_of(pg, "recv_array", src, group_src), tag, timeout=timeout)
    return Received(work.result()[0], work.source_rank(), work.tag())


def probe(
    src: int | None = None,
    group: Group = None,
    tag: int = ANY_TAG,
    group_src: int | None = None,
    *,
    wait: bool = True,
    timeout: Timeout | None = None,
) -> MessageInfo | None:
    """Wait for a message, and return its source, tag and size.

    A later receive takes the message. Another thread may take it before that receive; `recv_array`
    has no such gap.

    Args:
        src: Global rank of the sender; any rank without `src` and `group_src`.
        group: The default group if None. On a rank that is no member: warns, returns None.
        tag: Of the message; by default any.
        group_src: The sender's rank in the group, instead of `src`.
        wait: Otherwise return None at once if there is no message.
        timeout: The group's if None.

    Raises:
        CollectiveTimeoutError: No message in time; the group stays usable.

    Examples: On rank 1 of 2
        >>> dist.send(np.arange(3), dst=1, tag=5) if rank == 0 else dist.probe()
        MessageInfo(source=0, tag=5, dtype='int64', count=3, nbytes=24)
    """
    if (pg := member_group(group, "probe")) is None:
        return None
    peer = sender_of(pg, "probe", src, group_src)
    work = pg.probe(peer, tag, async_op=not wait, timeout=timeout)
    if not work.is_completed():
        work.cancel()
    # A probe that waits in a stream is not cancelled.
    if not work.is_completed() or isinstance(work.exception(), CollectiveTimeoutError):
        return None
    work.wait_on_host()
    found: MessageInfo = work.result()[0]
    return found


def sendrecv(
    send_tensor: Array,
    dst: int,
    recv_tensor: Array,
    src: int | None = None,
    group: Group = None,
    send_tag: int = 0,
    recv_tag: int = 0,
    *,
    timeout: Timeout | None = None,
) -> int:
    """Send to a rank and receive from a rank.

    Return the sender's global rank. Both ranks may be this rank. All ranks may call it at once, for
    example around a ring. The tensors may overlap: what is sent is then a copy.

    Args:
        send_tensor: [...] any layout.
        dst: Global rank of the receiver; `PROC_NULL`: send nothing.
        recv_tensor: [...] any layout.
        src: Global rank of the sender; any rank if None, none if `PROC_NULL`.
        group: The default group if None. On a rank that is no member: warns, returns -1.
        send_tag: Of the message to `dst`.
        recv_tag: Of the message from `src`; `ANY_TAG` takes every tag.
        timeout: Of the whole call; the group's if None.

    Raises:
        CollectiveMismatchError: As for `recv`.
        CollectiveTimeoutError: Not done in time. The group stays usable.

    Examples: On rank 1 of 2
        >>> x, received = np.array([rank]), np.array([-1])
        >>> dist.sendrecv(x, 1 - rank, received, 1 - rank), received
        (0, array([0]))
    """
    if (pg := member_group(group, "sendrecv")) is None:
        return -1
    to = peer_of(pg, "sendrecv", dst, None)
    peer = sender_of(pg, "sendrecv", src, None)
    how: How = {"async_op": True, "_label": "sendrecv", "timeout": timeout}
    sent, into = (view(x, write=False, pack=False).memory for x in (send_tensor, recv_tensor))
    if np.may_share_memory(sent, into):
        # Not a copy of `sent`, which is bytes if the dtype moves as bytes.
        array = send_tensor if isinstance(send_tensor, np.ndarray) else sent
        send_tensor = send_tensor.clone() if hasattr(send_tensor, "clone") else array.copy()
    works = [pg.recv(recv_tensor, peer, recv_tag, **how)]
    try:
        works.append(pg.send(send_tensor, to, send_tag, **how))
        for work in works:
            work.wait_on_host()
    except BaseException:
        for work in works:
            work.cancel()
        raise
    return works[0].source_rank()


class P2POp:
    """One send or receive for `batch_isend_irecv`.

    Args:
        op: `isend` or `irecv`.
        tensor: Tensor to send, or to receive into.
        peer: Global rank of the sender or receiver; `PROC_NULL`: no rank.
        group: The default group if None.
        tag: As for isend.
        group_peer: Its rank in the group, instead of `peer`.
    """

    def __init__(
        self,
        op: Callable[..., Work | None],
        tensor: Array,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv):
            raise InvalidArgumentError(f"op must be unisono.isend or unisono.irecv, got {op!r}")
        pg = resolve(group)
        if pg is None:
            raise InvalidArgumentError("P2POp on a rank that does not belong to the given group")
        self.op = op
        self.tensor = tensor
        self.group = pg
        self.tag = tag
        self.group_peer = peer_of(pg, "P2POp", peer, group_peer)
        self.peer = PROC_NULL if is_proc_null(self.group_peer) else pg.ranks[self.group_peer]

    def __repr__(self) -> str:
        return f"P2POp({self.op.__name__}, peer={self.peer}, tag={self.tag})"


def batch_isend_irecv(
    p2p_op_list: Sequence[P2POp], *, timeout: Timeout | None = None
) -> list[Work]:
    """Start several sends and receives, which may be in any order.

    Args:
        p2p_op_list: Operations in one group.
        timeout: Of each operation; the group's if None.

    Raises:
        InvalidArgumentError: The list is empty, mixes groups, or is no list of P2POp.

    Examples: On rank 1 of 2
        >>> x, received = np.array([rank]), np.array([-1])
        >>> ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
        >>> dist.wait_all(dist.batch_isend_irecv(ops))
        >>> received
        array([0])
    """
    if not isinstance(p2p_op_list, (list, tuple)) or not all(
        isinstance(op, P2POp) for op in p2p_op_list
    ):
        raise InvalidArgumentError(f"p2p_op_list must be a list of P2POp, got {p2p_op_list!r}")
    if not p2p_op_list:
        raise InvalidArgumentError("p2p_op_list is empty")
    if any(op.group is not p2p_op_list[0].group for op in p2p_op_list):
        raise InvalidArgumentError("all operations of a batch must use the same group")
    works: list[Work] = []
    how = {} if timeout is None else {"timeout": timeout}
    try:
        with contextlib.ExitStack() as together:
            for backend in p2p_op_list[0].group.backends.values():
                together.enter_context(backend.together())
            for op in p2p_op_list:
                work = op.op(op.tensor, op.peer, op.group, op.tag, **how)
                assert work is not None  # P2POp is for members
                works.append(work)
    except BaseException:
        # A receive that is still waiting would take a later message.
        for work in works:
            work.cancel()
        raise
    return works
