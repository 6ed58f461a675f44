"""`_time_estimator`: the time of calls that are not made."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import unisono as dist
from unisono.errors import InvalidArgumentError, UnsupportedError


def estimated(*calls):
    with dist._time_estimator() as found:
        for call in calls:
            call()
    return found.estimated_time


@pytest.mark.ranks(3, kind="both")
def test_nothing_is_run(rank):
    x, y, parts = np.ones(4), np.zeros(12), [np.zeros(4) for _ in range(3)]
    root = parts if rank == 0 else None
    for _ in range(2):
        dist.all_reduce(np.ones(4))  # C++ knows the call then
    calls = [
        lambda: dist.all_reduce(x),
        lambda: dist.all_reduce(x, async_op=True).wait(),
        lambda: dist.broadcast(x, 1),
        lambda: dist.reduce(x, 0),
        lambda: dist.all_gather_into_tensor(y, x),
        lambda: dist.all_gather(parts, x),
        lambda: dist.reduce_scatter_tensor(x, y),
        lambda: dist.gather(x, root, 0),
        lambda: dist.scatter(x, root, 0),
        lambda: dist.all_to_all_single(y, y.copy()),
        lambda: dist.scan(x),
        lambda: dist.barrier(),
        lambda: dist.send(x, (rank + 1) % 3),
        lambda: dist.recv(x, (rank + 1) % 3),
        lambda: dist.irecv(x).wait(),
    ]
    before = len(dist.trace_records())
    if rank < 2:  # the other rank makes none of the calls
        each_us = [estimated(call) for call in calls]
        assert min(each_us) > 0
        assert estimated(*calls) == pytest.approx(sum(each_us))
    assert estimated() == 0
    assert len(dist.trace_records()) == before
    assert x.tolist() == [1] * 4
    assert not y.any()
    dist.all_reduce(x)
    assert x.tolist() == [3] * 4


@pytest.mark.ranks(4)
def test_the_estimate_is_that_of_the_model(rank):
    n = 4 * 10**6
    x = np.zeros(n // 8)
    one = estimated(lambda: dist.all_reduce(x[:1]))
    large = estimated(lambda: dist.all_reduce(x))
    # Two phases move (p - 1) / p of the data each, at 5 GB/s.
    assert large >= 2 * 0.75 * n / 5000
    assert large > 100 * one
    by_ring = estimated(lambda: dist.all_reduce(x, algorithm="ring"))
    assert by_ring >= 2 * 0.75 * n / 5000
    assert estimated(lambda: dist.send(x, 0)) == pytest.approx(n / 5000, rel=0.1)


@pytest.mark.ranks(2, kind="both")
def test_calls_of_objects_are_errors_and_change_nothing(rank):
    group, objects, x = dist.group.WORLD, [None, None], np.ones(2)
    root = objects if rank == 0 else None
    calls = [
        lambda: dist.all_gather_object(objects, "a"),
        lambda: dist.gather_object("a", root),
        lambda: dist.broadcast_object_list(objects),
        lambda: dist.scatter_object_list(objects, root),
        lambda: dist.all_reduce_object(1, max),
        lambda: dist.send_object_list(objects, 1 - rank),
        lambda: dist.recv_object_list(objects, 1 - rank),
        lambda: dist.split_group(group, color=rank),
        lambda: dist.new_window(x),
        lambda: dist.shared_array(4),
        lambda: dist.assert_equal(x),
        dist.monitored_barrier,
        dist.Counter,
    ]
    for call in calls:
        with (
            dist._time_estimator(),
            pytest.raises(UnsupportedError, match="in a block of _time_estimator, which takes"),
        ):
            call()
    if rank == 0:  # the other ranks need not make the call
        with dist._time_estimator(), pytest.raises(InvalidArgumentError):
            dist.broadcast(x, 99)
    dist.all_reduce(x)
    assert x.tolist() == [2.0, 2.0]


@pytest.mark.ranks(2, kind="both")
@pytest.mark.parametrize("block", [dist._time_estimator, dist._coalescing_manager])
def test_calls_of_another_thread_are_made(rank, block):
    group, x = dist.group.WORLD, np.ones(2)
    for _ in range(2):  # C++ knows the call then
        dist.all_reduce(np.ones(2))
    with block(group), ThreadPoolExecutor() as pool:
        pool.submit(group.all_reduce, x).result()
        assert x.tolist() == [2.0, 2.0]


@pytest.mark.ranks(2)
def test_wrong_blocks(rank):
    group = dist.group.WORLD
    outer = [dist._time_estimator, dist._coalescing_manager, dist._time_estimator]
    inner = [dist._time_estimator, dist._time_estimator, dist._coalescing_manager]
    for first, second in zip(outer, inner, strict=True):
        with (
            first(),
            pytest.raises(
                InvalidArgumentError,
                match=r"' is in a block of calls already|' is in a coalescing block already",
            ),
            second(),
        ):
            pass
    with (
        dist._time_estimator(),
        pytest.raises(
            UnsupportedError,
            match="in a block of _time_estimator, which takes collectives and messages of arrays",
        ),
    ):
        dist.new_group([0])
    x = np.ones(2)
    with pytest.raises(ZeroDivisionError), dist._time_estimator() as found:
        1 / 0  # noqa: B018
    assert found.estimated_time is None
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0, 2.0]
