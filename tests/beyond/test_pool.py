"""`pool`: ranks that stay, their state, failures, output and memory."""

import gc
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

import unisono
import unisono as dist
from unisono.errors import ClosedError, InvalidArgumentError, WorkerFailedError

SIZE = 3


@pytest.fixture(scope="module")
def ranks():
    with unisono.pool(SIZE, replace=True) as made:
        yield made


def sum_of_ranks(k):
    x = np.full(4, dist.get_rank() + k)
    dist.all_reduce(x)
    return x


def test_run_calls_the_function_on_each_rank_of_one_group(ranks):
    expected = np.full(4, sum(rank + 5 for rank in range(SIZE)))
    for _ in range(3):
        results = ranks.run(sum_of_ranks, k=5)
        assert len(results) == len(ranks) == SIZE
        assert all(np.array_equal(each, expected) for each in results)
    assert ranks.run(os.getpid) == ranks.pids()


def test_one_rank_runs_alone_and_may_be_counted_from_the_end(ranks):
    assert ranks[1].run(dist.get_rank) == 1
    assert ranks[-1].run(dist.get_rank) == SIZE - 1
    assert [each.rank for each in ranks] == list(range(SIZE))


def remember(k):
    global kept
    kept = dist.get_rank() * k


def recall():
    return kept


def test_what_a_rank_holds_stays(ranks):
    ranks.run(remember, 10)
    assert ranks.run(recall) == [0, 10, 20]
    assert ranks[2].run(recall) == 20


class OwnError(Exception):
    pass


def fail_on(rank):
    if dist.get_rank() == rank:
        raise OwnError(f"not on rank {rank}")
    dist.barrier()


def test_the_rank_that_raised_is_named_and_the_ranks_go_on(ranks):
    ranks.run(remember, 3)
    with pytest.raises(OwnError, match="not on rank 1") as caught:
        ranks.run(fail_on, 1)
    assert caught.value.__notes__ == [f"raised on rank 1 of {SIZE}"]
    assert isinstance(caught.value.__cause__, WorkerFailedError)
    assert str(caught.value.__cause__).startswith("rank 1 of the pool raised an exception")
    assert "OwnError: not on rank 1" in str(caught.value.__cause__)
    assert ranks.run(recall) == [0, 3, 6]
    assert ranks.run(sum_of_ranks, 0)[0][0] == sum(range(SIZE))


def group_key():
    return id(dist.group.WORLD)


def undefined():
    return nothing_of_this_name  # noqa: F821


def test_an_error_on_all_ranks_leaves_their_groups(ranks):
    before = ranks.run(group_key)
    with pytest.raises(NameError, match="nothing_of_this_name"):
        ranks.run(undefined)
    assert ranks.run(group_key) == before


def killed_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_dies_is_named_and_replaced():
    with unisono.pool(SIZE, replace=True) as ranks:
        check_replacement(ranks)


def check_replacement(ranks):
    ranks.run(remember, 7)
    pids = ranks.pids()
    with pytest.raises(WorkerFailedError) as caught:
        ranks.run(killed_on, 2)
    assert str(caught.value).startswith("a rank of the pool ended: rank 2 (pid")
    assert "was killed by SIGKILL" in str(caught.value)
    assert caught.value.context.rank == 2
    assert ranks.pids()[:2] == pids[:2]
    assert ranks.pids()[2] != pids[2]
    assert (ranks[0].run(recall), ranks[1].run(recall)) == (0, 7)
    assert ranks.run(sum_of_ranks, 1)[2][0] == sum(rank + 1 for rank in range(SIZE))


def fill_row(x):
    x[dist.get_rank()] += dist.get_rank() + 1
    return x[:, 1]


def test_a_shared_array_and_its_slices_are_one_memory(ranks):
    x = ranks.shared_array((SIZE, 6), "int32")
    assert x.dtype == np.int32
    assert not x.any()
    columns = ranks.run(fill_row, x[:, ::2])
    expected = np.zeros((SIZE, 6), "int32")
    expected[:, ::2] = np.arange(1, SIZE + 1)[:, None]
    assert np.array_equal(x, expected)
    # A result is the same memory, too.
    columns[0][1] = 77
    assert x[1, 2] == 77
    # A read-only view stays read-only.
    y = x.view()
    y.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        ranks[0].run(fill_row, y)


def mapped():
    from unisono.beyond.pool import memory

    return len(memory._regions)


def test_the_memory_of_a_shared_array_goes_with_it(ranks):
    fds = len(os.listdir("/proc/self/fd"))
    before = ranks.run(mapped)
    x = ranks.shared_array(10)
    assert ranks.run(mapped) == [each + 1 for each in before]
    part = x[3:]
    del x
    gc.collect()
    assert ranks.run(mapped) == [each + 1 for each in before]
    del part
    gc.collect()
    assert ranks.run(mapped) == before
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_shared_array_of_objects_or_of_another_pool_is_refused(ranks):
    with pytest.raises(
        InvalidArgumentError, match="a shared array cannot have the dtype object: it holds objects"
    ):
        ranks.shared_array(3, object)
    with unisono.pool(1, start_method="fork") as other:
        x = other.shared_array(3)
        with pytest.raises(InvalidArgumentError, match="belongs to the pool that made it"):
            ranks[0].run(np.sum, x)


def pair(a, b=0):
    if a < 0:
        raise OwnError(f"task {a}")
    return a, b, os.getpid()


@pytest.mark.parametrize("chunksize", [1, 4])
def test_map_keeps_the_order_and_uses_free_ranks(ranks, chunksize):
    found = ranks.map(pair, iter(range(20)), range(100, 200), chunksize=chunksize)
    assert [each[:2] for each in found] == [(i, 100 + i) for i in range(20)]
    assert {each[2] for each in found} <= set(ranks.pids())


def test_map_reports_the_task_that_failed(ranks):
    with pytest.raises(OwnError, match="task -1") as caught:
        ranks.map(pair, [0, 1, 2, -1, *range(4, 50)])
    assert "in task 3" in caught.value.__notes__[0]
    assert ranks.map(pair, []) == []
    with pytest.raises(InvalidArgumentError, match="the function or its arguments cannot be sent"):
        ranks.map(id, [0, 1, threading.Lock(), 3])
    assert ranks.map(pair, [1])[0][0] == 1


def say(text):
    print(text, dist.get_rank())
    os.write(2, b"error\n")


def test_output_is_shown_by_rank_before_the_call_returns(ranks, capsys):
    ranks.run(say, "hello")
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(
        line
        for rank in range(SIZE)
        for line in (f"[rank {rank}] hello {rank}", f"[rank {rank}] error")
    )


def test_a_cell_runs_in_the_main_module_of_each_rank(ranks, capsys):
    ranks.cell("import unisono as dist\nx = dist.get_rank() * 2\n")
    ranks.cell("x + 1")
    assert sorted(capsys.readouterr().out.splitlines()) == [
        f"[rank {rank}] {rank * 2 + 1}" for rank in range(SIZE)
    ]
    with pytest.raises(ZeroDivisionError) as caught:
        ranks.cell("def f():\n    return 1 / 0\nf()")
    assert "return 1 / 0" in str(caught.value.__cause__)


def wait_for_ever(path):
    open(f"{path}/{dist.get_rank()}", "w").close()
    if dist.get_rank():
        dist.barrier()
    else:
        time.sleep(1000)


def interrupt_when(count, path):
    while len(os.listdir(path)) < count:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_ends_the_calls_and_not_the_ranks(ranks, tmp_path):
    pids = ranks.pids()
    ranks.run(remember, 2)
    thread = threading.Thread(target=interrupt_when, args=(SIZE, tmp_path))
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        ranks.run(wait_for_ever, str(tmp_path))
    thread.join()
    assert ranks.pids() == pids
    assert ranks.run(recall) == [0, 2, 4]
    assert ranks.run(sum_of_ranks, 0)[1][0] == sum(range(SIZE))


def unloadable():
    return type("Local", (), {"__reduce__": lambda self: (int, ("x",))})()


def test_what_cannot_be_sent_or_loaded_is_an_error_of_its_own(ranks):
    with pytest.raises(InvalidArgumentError, match="the function or its arguments cannot be sent"):
        ranks.run(print, threading.Lock())
    with pytest.raises(InvalidArgumentError, match=r"the result of rank . cannot be sent"):
        ranks.run(threading.Lock)
    with pytest.raises(InvalidArgumentError, match="the result of rank 1 cannot be loaded: ValueE"):
        ranks[1].run(unloadable)
    assert ranks.run(dist.get_world_size) == [SIZE] * SIZE


def test_without_replacement_a_lost_rank_ends_the_pool():
    fds = len(os.listdir("/proc/self/fd"))
    with unisono.pool(2, start_method="fork") as pair_of_ranks:
        with pytest.raises(WorkerFailedError, match=r"a rank of the pool ended: rank 1"):
            pair_of_ranks.run(killed_on, 1)
        with pytest.raises(ClosedError, match=r"the pool makes no calls any more: rank 1 \(pid"):
            pair_of_ranks.run(dist.get_rank)
    with pytest.raises(ClosedError, match="the pool is closed"):
        pair_of_ranks.run(dist.get_rank)
    pair_of_ranks.close()
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_cell_without_a_pool_is_refused():
    module = sys.modules[unisono.pool.__module__]
    newest, module._newest = module._newest, None
    try:
        with pytest.raises(unisono.errors.UsageError, match="there is no pool"):
            module._run_cell("", "1")
    finally:
        module._newest = newest


@pytest.mark.parametrize("nprocs", [0, "2"])
def test_wrong_numbers_of_ranks(nprocs):
    with pytest.raises((InvalidArgumentError, TypeError), match="nprocs must be"):
        unisono.pool(nprocs)
