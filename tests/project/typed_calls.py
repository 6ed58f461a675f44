"""Right and wrong calls for type checkers, which test_types.py runs; no code runs this file.

A checker must report exactly the lines that end with the comment "wrong".
"""

from __future__ import annotations

import array
import mmap
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Unpack, assert_type

import numpy as np

import unisono as dist
from unisono import MPI

x = np.zeros(4)
flag = bool(x.any())
pg = dist.ProcessGroup(dist.HashStore(), 0, 1)


def results() -> None:
    dist.all_reduce(x)
    dist.all_reduce(x, dist.ReduceOp.MAX, pg, timeout=timedelta(seconds=1), algorithm="ring")
    assert_type(dist.all_reduce(x, async_op=True), dist.Work)
    assert_type(dist.all_reduce(x, dist.ReduceOp.SUM, None, True), dist.Work)
    assert_type(dist.all_reduce(x, async_op=flag), dist.Work | None)
    assert_type(dist.broadcast(x, 0, async_op=True, group_src=None), dist.Work)
    assert_type(dist.broadcast(x, group_src=0, group=pg, async_op=True), dist.Work)
    assert_type(dist.reduce(x, 0, deterministic=True, async_op=True), dist.Work)
    assert_type(dist.all_gather([x, x], x, async_op=True), dist.Work)
    assert_type(dist.all_gather_single(x, x, async_op=True), dist.Work)
    assert_type(dist.gather(x, None, 0, async_op=True), dist.Work)
    assert_type(dist.scatter(x, (x, x), async_op=True), dist.Work)
    assert_type(dist.reduce_scatter_tensor(x, x, async_op=True), dist.Work)
    assert_type(dist.all_to_all_single(x, x, [1, 3], async_op=True), dist.Work)
    assert_type(dist.scan(x, async_op=True), dist.Work)
    assert_type(dist.barrier(async_op=True, timeout=1.0), dist.Work)
    assert_type(dist.all_reduce_coalesced([x, x], async_op=True), dist.Future)
    assert_type(dist.all_gather_coalesced([[x], [x]], [x], async_op=True), dist.Future)
    assert_type(dist.isend(x, 1, timeout=1), dist.Work)
    assert_type(dist.irecv(x), dist.Work)
    assert_type(dist.recv(x, partial=True), int)
    # A rank that is not a member gets no work.
    outside = dist.GroupMember.NON_GROUP_MEMBER
    assert_type(dist.all_reduce(x, group=outside, async_op=True), dist.Work | None)
    assert_type(dist.isend(x, 1, outside), dist.Work | None)
    dist.all_reduce(x).wait()  # wrong
    dist.all_reduce(x, async_op=flag).wait()  # wrong


def keywords(**how: Unpack[dist.CallKeywords]) -> None:
    dist.all_reduce(x, **how)
    pg.broadcast(x, **how)
    dist.all_reduce(x, timeout="1 s")  # wrong
    dist.all_reduce(x, algoritm="ring")  # wrong
    dist.all_reduce(x, async_op=1)  # wrong
    dist.all_reduce(x, "sum")  # wrong
    dist.all_reduce(x, group="default")  # wrong
    dist.broadcast(x, root=0)  # wrong
    dist.barrier(timeout=1, async_op=True, wait=True)  # wrong
    dist.send(x, "1")  # wrong
    dist.all_to_all_single(x, x, 2)  # wrong
    dist.reduce_scattr(x, [x])  # wrong
    dist.get_rank("default")  # wrong


def methods() -> None:
    assert_type(pg.all_reduce(x), dist.Work)
    assert_type(pg.reduce(x, 0, dist.ReduceOp.MIN, async_op=True, timeout=1), dist.Work)
    assert_type(pg.recv(x, algorithm=None), dist.Work)
    assert_type(pg.allreduce([x], dist.AllreduceOptions()), dist.Work)
    pg.all_reduce(1.0)  # wrong
    pg.all_reduce(x, asynchronous=True)  # wrong
    pg.broadcast(x, src=0)  # wrong
    pg.all_gather(x, [x])  # wrong
    pg.allreduced([x])  # wrong


class WithDLPack:
    def __dlpack__(self, *, stream: int | None = None) -> object:
        return x.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def arrays(any_array: dist.Array, table: np.ndarray[Any, np.dtype[np.int8]]) -> None:
    dist.all_reduce(any_array)
    dist.all_reduce(table[:, 1])
    dist.all_reduce(bytearray(4))
    dist.all_reduce(memoryview(bytearray(4)))
    dist.all_reduce(array.array("d", [1.0]))
    dist.all_reduce(mmap.mmap(-1, 4))
    dist.all_reduce(WithDLPack())
    dist.all_gather(np.split(x, 2), x[:2])
    dist.all_reduce(1)  # wrong
    dist.all_reduce([1.0, 2.0])  # wrong
    dist.all_reduce(None)  # wrong
    dist.send("text", 1)  # wrong
    dist.all_gather([1, 2], x)  # wrong
    dist.all_gather(x)  # wrong


def train(rank: int, rate: float, name: str = "") -> list[str]:
    return [name] * int(rank * rate)


def alone(rank: int) -> float:
    return float(rank)


def many(rank: int, *rest: Any) -> bytes:
    return bytes(rest)


def launches(rest: Sequence[float]) -> None:
    assert_type(dist.launch(alone, 2), list[float])
    assert_type(dist.launch(alone, 2, ()), list[float])
    assert_type(dist.launch(train, 2, (0.5, "a")), list[list[str]])
    assert_type(dist.launch(train, nprocs=2, args=(1,), start_method="fork"), list[list[str]])
    assert_type(dist.launch(train, 2, [0.5]), list[list[str]])
    assert_type(dist.launch(many, 2, (1, "a")), list[bytes])
    assert_type(dist.launch(many, 2, tuple(rest)), list[bytes])
    assert_type(dist.launch(lambda rank: rank, 2), list[int])
    dist.spawn(alone, nprocs=2)
    dist.spawn(train, (0.5, "a"), 2, True)
    dist.spawn(alone, nprocs=2, join=False).join()
    dist.spawn(train, [0.5], 2, join=False).join()
    unknown: Callable[..., int] = vars(dist)["name"]
    assert_type(dist.launch(unknown, 2, tuple(rest)), list[int])
    assert_type(dist.launch(unknown, 2, (1, "a")), list[int])
    dist.spawn(unknown, (1, "a"), 2)
    dist.spawn(unknown, tuple(rest), 2, join=False).join()
    dist.launch(train, 2)  # wrong
    dist.launch(train, 2, ("a",))  # wrong
    dist.launch(train, 2, (0.5, "a", 3))  # wrong
    dist.launch(alone, 2, (1,))  # wrong
    dist.launch(alone, 2, 10)  # wrong
    dist.launch(4, alone)  # wrong
    dist.spawn(train, nprocs=2)  # wrong
    dist.spawn(train, ("a",), 2)  # wrong
    dist.spawn(train, ("a",), 2, join=False)  # wrong
    dist.spawn(alone, nprocs=2).join()  # wrong


def of_mpi(comm: MPI.Comm, status: MPI.Status) -> int:
    comm.Allreduce(x, np.empty_like(x), op=MPI.SUM)
    comm.Recv([x, MPI.DOUBLE], source=MPI.ANY_SOURCE, status=status)
    assert_type(comm.Isend(x, dest=0, tag=3), MPI.Request)
    assert_type(comm.Bcast_init(x, root=0), MPI.Prequest)
    assert_type(MPI.COMM_WORLD.Create_cart([2, 2]).Sub([True, False]), MPI.Cartcomm)
    assert_type(MPI.COMM_WORLD.Dup(), MPI.Intracomm)
    assert_type(MPI.Win.Allocate(8, comm=MPI.COMM_SELF), MPI.Win)
    assert_type(MPI.Get_version(), tuple[int, int])
    MPI.COMM_WORLD.Allreduc(x)  # wrong
    dist.all_reduce(x, group=MPI.COMM_WORLD)
    assert_type(dist.get_rank(comm.Split(0)), int)
    dist.all_reduce(x, group=MPI.GROUP_EMPTY)  # wrong
    MPI.COMM_WORLD.rank = 3  # wrong
    comm.Isend(x, destination=0)  # wrong
    comm.Irecv(x, status=status)  # wrong
    MPI.Wtim()  # wrong
    return comm.rank + comm.Get_size()


def of_library(group: dist.Group = None) -> dist.ProcessGroup | None:
    return dist.find_group(group)


def of_groups() -> None:
    assert_type(dist.new_group(), dist.ProcessGroup)
    dist.new_group([0, 1]).all_reduce(x)
    assert_type(dist.new_group([0, 1]).rank(), int | Any)
    dist.new_group().all_reduces(x)  # wrong
    dist.GroupMember.NON_GROUP_MEMBER.all_reduce(x)  # wrong
    assert_type(dist.find_group(pg), dist.ProcessGroup | None)
    of_library(pg)
    of_library(MPI.COMM_WORLD)
    of_library(dist.GroupMember.NON_GROUP_MEMBER)
    of_library(1)  # wrong
    dist.all_reduce(x, group=0)  # wrong
    dist.errors.UnisonoError("text")
    dist.all_reduce(x, dist.ReduceOp.MEAN)  # wrong
