"""The coalescing manager, and calls on several arrays: one message."""

import threading

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import fails, operations_of
from unisono.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
)

SIZES = pytest.mark.ranks(1, 3, kind="both")


# Processes: a wrapper sees the calls of all threads of its process.
@pytest.mark.ranks(2, kind="processes")
def test_one_message_for_each_dtype(rank):
    p = dist.get_world_size()
    for async_ops in (False, True):
        arrays = [np.full(n, rank + n, float) for n in (3, 0, 70_000)] + [np.full((2, 2), rank).T]
        with operations_of(dist.group.WORLD) as seen:
            with dist._coalescing_manager(async_ops=async_ops) as manager:
                for x in arrays:
                    assert dist.all_reduce(x) is None
                assert (arrays[0] == rank + 3).all()  # nothing has happened yet
                assert seen == []
            assert len(manager.works) == (2 if async_ops else 0)
            manager.wait()
        assert seen == ["all_reduce_coalesced"] * 2, "one message for each dtype"
        for n, x in zip((3, 0, 70_000, 0), arrays, strict=True):
            assert (x == sum(r + n for r in range(p))).all()


@SIZES
def test_a_call_made_before_is_recorded(rank):
    """A call that was made before is recorded too, though the C++ engine could repeat it."""
    x = np.ones(4)
    for _ in range(8):
        dist.all_reduce(x)
    x[:] = 1
    with dist._coalescing_manager():
        dist.all_reduce(x)
        assert (x == 1).all()
    assert (x == dist.get_world_size()).all()
    dist.all_reduce(x)
    assert (x == dist.get_world_size() ** 2).all()


@SIZES
def test_reduce_ops_stay_apart(rank):
    """torch takes the reduce op of the first call for all of them."""
    a, b, c = np.ones(3), np.full(3, rank + 1.0), np.full(2, rank + 1.0)
    with dist._coalescing_manager():
        dist.all_reduce(a)
        dist.all_reduce(b, dist.ReduceOp.MAX)
        dist.all_reduce(c, op=dist.ReduceOp.MAX)
    p = dist.get_world_size()
    assert (a == p).all()
    assert (b == p).all()
    assert (c == p).all()


@SIZES
def test_gathers_and_scatters(rank):
    p = dist.get_world_size()
    outs = [np.zeros(p * n) for n in (1, 5)]
    with dist._coalescing_manager() as manager:
        for n, out in zip((1, 5), outs, strict=True):
            dist.all_gather_single(out, np.full(n, rank, float))
    manager.wait()
    for n, out in zip((1, 5), outs, strict=True):
        assert out.tolist() == [r for r in range(p) for _ in range(n)]
    parts = [np.zeros(n) for n in (2, 4)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for n, part in zip((2, 4), parts, strict=True):
            dist.reduce_scatter_single(part, np.arange(p * n, dtype=float))
    manager.wait(timeout=60)
    for n, part in zip((2, 4), parts, strict=True):
        assert part.tolist() == [p * (rank * n + i) for i in range(n)]


@SIZES
def test_rules(rank):
    x = np.ones(2)

    def block(*calls):
        with dist._coalescing_manager():
            for call in calls:
                call()

    def reduce():
        dist.all_reduce(x)

    def gather():
        dist.all_gather_single(np.ones(2 * dist.get_world_size()), x)

    with pytest.raises(InvalidArgumentError, match="takes one kind of collective"):
        block(reduce, gather)
    assert (x == 1).all()
    with pytest.raises(KeyError):
        block(reduce, lambda: {}["missing"])
    assert (x == 1).all(), "a block that failed made a call"
    with dist._coalescing_manager():
        work = dist.all_reduce(x, async_op=True)
        for call in (work.wait, work.is_completed, work.get_future, work.result):
            with pytest.raises(InvalidArgumentError, match="at the end of its coalescing block"):
                call()
        with pytest.raises(InvalidArgumentError, match="is in a coalescing block already"):
            block()
        y = np.full(1, rank)
        dist.broadcast(y, 0)  # other operations run at once
        assert y[0] == 0
    p = dist.get_world_size()
    assert (x == p).all()
    with dist._coalescing_manager() as manager:
        pass
    manager.wait()
    group = dist.new_group([0])
    if rank == 0:
        with dist._coalescing_manager(group):
            dist.all_reduce(x, group=group)
            dist.barrier()
    else:
        dist.barrier()
    dist.all_reduce(x)
    assert (x == p * p).all()


@pytest.mark.ranks(2, kind="both")
def test_a_wait_has_a_time_out(rank):
    x, other = np.ones(3), (rank + 1) % dist.get_world_size()
    if rank == 0:
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(x)
        with pytest.raises(CollectiveTimeoutError, match="1 of 1 works were not done after 0"):
            manager.wait(timeout=0.01)
        dist.send(np.ones(1), other)
        manager.wait(timeout=60)
    else:
        dist.recv(np.ones(1), 0)
        with dist._coalescing_manager():
            dist.all_reduce(x)
    assert (x == dist.get_world_size()).all()


def layouts(values):
    """Return an array with these values in C order, of each layout."""
    flat = np.asarray(values, np.float32)
    strided = np.zeros(2 * flat.size, np.float32)[::2]
    backward = np.zeros(flat.size, np.float32)[::-1]
    fortran = np.zeros((flat.size // 2, 2), np.float32, order="F")
    for array in (strided, backward):
        array[:] = flat
    fortran[:] = flat.reshape(-1, 2)
    return [flat.copy(), strided, backward, fortran, np.zeros(0, np.float32)]


def data(rank, count):
    return np.arange(count) + 100 * rank


@pytest.mark.ranks(1, 2, 3, 5, engine="both")
def test_several_tensors_in_one_call(rank):
    pg = dist.group.WORLD
    p, n = pg.size(), 6
    zeros = np.zeros(p * n)
    outs = layouts(zeros)
    pg.all_gather_into_tensor_coalesced(outs, layouts(data(rank, n)))
    whole = np.concatenate([data(r, n) for r in range(p)])
    for out in outs[:-1]:
        assert (out.ravel() == whole).all(), out
    outs = layouts(np.zeros(n))
    ins = layouts(data(rank, p * n))
    pg.reduce_scatter_tensor_coalesced(outs, ins, dist.ReduceOp.SUM)
    expected = sum(data(r, p * n) for r in range(p))[rank * n : (rank + 1) * n]
    for out in outs[:-1]:
        assert (out.ravel() == expected).all(), out
    assert all((i.ravel() == data(rank, p * n)).all() for i in ins[:-1]), "inputs keep their values"
    ones = [np.full(p, rank + 1.0), np.full(2 * p, 1.0)]
    outs = [np.zeros(1), np.zeros(2)]
    factor = dist.ReduceOp.PREMUL_SUM(2)
    pg.reduce_scatter_tensor_coalesced(outs, ones, factor, async_op=True).wait()
    assert outs[0].tolist() == [p * (p + 1)]
    assert outs[1].tolist() == [2 * p] * 2


@pytest.mark.ranks(3, engine="both")
def test_an_error_of_another_group_of_the_same_name_refuses_the_call_of_a_block(rank):
    """Device meshes with equal labels have groups of equal names."""
    everyone = dist.new_group([0, 1, 2], group_desc="mesh_dp")
    pair = dist.new_group([0, 1], group_desc="mesh_dp")
    x = np.full(4, 100.0 + rank)
    if rank < 2:
        for _ in range(3):
            dist.barrier(group=pair)
    with fails(CollectiveMismatchError, "mesh_dp"), dist._coalescing_manager(group=everyone):
        dist.all_reduce(np.ones(4), group=everyone)
        if rank < 2:
            dist.broadcast(np.zeros(3 + rank), 0, group=pair)
    with dist._coalescing_manager(group=everyone):
        dist.all_reduce(x, group=everyone)
    assert (x == 303).all()


@pytest.mark.ranks(2, kind="processes", engine="both")
def test_calls_after_a_block_do_not_overtake_a_call_that_waits_for_its_stream(rank):
    a, b = np.full(4, rank + 1.0), np.full(4, rank + 100.0)
    for _ in range(4):  # C++ makes later ones alone
        dist.broadcast(np.zeros(4), 0)
    if rank == 0:
        stream, is_open = dist.Stream(), threading.Event()
        with dist._coalescing_manager(), dist.stream(stream):
            stream.submit(is_open.wait, 60)
            work = dist.broadcast(a, 0, async_op=True)
        later = threading.Thread(target=dist.broadcast, args=(b, 0))
        later.start()
        later.join(0.2)  # it would end before if it overtook
        is_open.set()
        work.wait()
        later.join()
    else:
        dist.broadcast(a, 0)
        dist.broadcast(b, 0)
    assert (a == 1).all()
    assert (b == 100).all()


@pytest.mark.ranks(2)
def test_split_sizes_in_a_block_are_refused_by_name(rank):
    x, y = np.zeros(4), np.ones(1 + 2 * rank)
    with pytest.raises(ArgumentTypeError, match="output_split_sizes"), dist._coalescing_manager():
        dist.all_gather_into_tensor(x, y, output_split_sizes=[1, 3])
    dist.all_reduce(y[:1])
    assert y[0] == 2


@pytest.mark.ranks(2, kind="both")
def test_calls_that_return_their_result_are_refused_in_a_block(rank):
    x = np.ones(2)
    for call in ("all_reduce", "all_gather", "reduce_scatter"):
        with (
            pytest.raises(
                InvalidArgumentError,
                match=rf"functional\.{call} in a coalescing block, which makes its calls at",
            ),
            dist._coalescing_manager(),
        ):
            getattr(dist.functional, call)(x)
    with dist._coalescing_manager():
        dist.all_reduce(x)
        y = dist.functional.broadcast(np.full(1, rank + 5.0))  # runs at once
    assert (x.tolist(), y.tolist()) == ([2.0, 2.0], [5.0])
