"""wait_any and wait_all."""

import threading

import numpy as np
import pytest

import unisono as dist
from unisono.errors import (
    ArgumentTypeError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    UsageError,
)


@pytest.mark.ranks(2, kind="both")
def test_wait_any_returns_in_the_order_of_arrival(rank):
    order = [3, 1, 2, 0]
    if rank == 1:
        for tag in order:
            dist.send(np.array([float(tag)]), 0, tag=tag)
            dist.recv(np.zeros(1), 0, tag=9)
        return
    boxes = [np.zeros(1) for _ in order]
    works = {tag: dist.irecv(boxes[tag], 1, tag=tag) for tag in range(4)}
    seen = []
    while works:
        tags = list(works)
        tag = tags[dist.wait_any([works[t] for t in tags], timeout=30)]
        assert boxes[tag][0] == tag
        del works[tag]
        seen.append(tag)
        dist.send(np.zeros(1), 1, tag=9)
    assert seen == order


@pytest.mark.ranks(2, kind="both")
def test_a_limit_that_passes_damages_no_work(rank):
    if rank == 1:
        dist.recv(np.zeros(1), 0, tag=1)
        dist.send(np.ones(1), 0)
        dist.send(np.ones(1), 0, tag=2)
        return
    x, y = np.zeros(1), np.zeros(1)
    works = [dist.irecv(x, 1), dist.irecv(y, 1, tag=2)]
    with pytest.raises(CollectiveTimeoutError, match=r"none of 2 works was done after 0\.02 s"):
        dist.wait_any(works, 0.02)
    with pytest.raises(CollectiveTimeoutError, match=r"2 of 2 works were not done after 0\.02 s"):
        dist.wait_all(works, 0.02)
    dist.send(np.zeros(1), 1, tag=1)
    dist.wait_all([*works, None], 30)
    assert dist.wait_any(works) == 0
    assert x[0] == y[0] == 1


@pytest.mark.ranks(2, kind="both")
def test_the_time_outs_of_the_works_count(rank):
    if rank == 1:
        dist.recv(np.zeros(1), 0)
        dist.send(np.zeros(1), 0, tag=2)
        return
    short = dist.irecv(np.zeros(1), 1, tag=1, timeout=0.05)
    long = dist.irecv(np.zeros(1), 1, tag=2, timeout=60)
    with pytest.raises(CollectiveTimeoutError, match=r"recv\(.*tag=1\)"):
        dist.wait_any([long, short])
    assert not long.is_completed()
    other = dist.irecv(np.zeros(1), 1, tag=3, timeout=0.05)
    with pytest.raises(CollectiveTimeoutError, match=r"recv\(.*tag=3\)"):
        dist.wait_all([other, short])
    dist.send(np.zeros(1), 1)
    dist.wait_all([long])


@pytest.mark.ranks(1, 3)
def test_waits_for_collectives(rank):
    p = dist.get_world_size()
    arrays = [np.full(5, float(i)) for i in range(6)]
    works = [dist.all_reduce(x, async_op=True) for x in arrays]
    assert dist.wait_any(works, 30) in range(6)
    dist.wait_all(works)
    assert all((x == i * p).all() for i, x in enumerate(arrays))


@pytest.mark.ranks(1, 3)
def test_bad_arguments_and_waits_that_cannot_end_are_refused(rank):
    with pytest.raises(InvalidArgumentError, match="works is empty"):
        dist.wait_any([])
    dist.wait_all([])
    with pytest.raises(ArgumentTypeError, match="works must be a list of Work"):
        dist.wait_any([np.ones(1)])
    told = []
    ended = threading.Event()
    work = dist.all_reduce(np.ones(1), async_op=True)

    def wait_here(future):
        other = dist.all_reduce(np.ones(1), async_op=True)
        for call in (dist.wait_any, dist.wait_all):
            try:
                call([other])
            except UsageError as error:
                told.append(error.what)
        ended.set()

    work.get_future().add_done_callback(wait_here)
    assert ended.wait(30)
    dist.barrier()
    assert all("would wait for itself" in text for text in told)
