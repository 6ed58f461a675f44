"""Mistakes, time-outs and lost ranks reach torch's users as torch's errors that name ranks."""

import logging
import os
import re
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

import unisono
from unisono import errors
from unisono.lowlevel import CPUOptions

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

import torch.distributed._functional_collectives as functional  # noqa: E402  needs torch
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from tests.adapters.torch.torch_world import torch_world  # noqa: E402

pytestmark = pytest.mark.usefixtures("forked_with_torch")

RANKS = 3


def line_of(call, *kinds):
    """Return the first line of the error that `call` must raise, of all the given kinds."""
    with pytest.raises(RuntimeError) as caught:
        call()
    for kind in kinds:
        assert isinstance(caught.value, kind), (type(caught.value).__mro__, kind)
    return str(caught.value).partition("\n")[0]


def works():
    dist.all_reduce(x := torch.ones(3))
    assert x[0].item() == RANKS


@pytest.mark.ranks(RANKS, kind="processes")
def test_a_mistake_is_an_error_on_all_ranks_and_the_group_goes_on(rank, tmp_path):
    # Here, because the import takes 2 s where no server has made it.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mismatch = (dist.DistBackendError, errors.CollectiveMismatchError)
    odd, x, wide = rank % 2, torch.ones(2), torch.ones(3 * RANKS + 1)
    kinds = [torch.float32, torch.int64]
    band = dist.ReduceOp.BAND
    shapes = r"float32\[2\].*float32\[3\]|float32\[3\].*float32\[2\]"
    cases = (
        (lambda: dist.all_reduce(torch.ones(2 + odd)), mismatch, shapes),
        (lambda: dist.all_reduce(torch.ones(2, dtype=kinds[odd])), mismatch, r"int64\[2\]"),
        (lambda: dist.all_reduce(x) if rank else dist.broadcast(x, 0), mismatch, r"broadcast\("),
        (
            lambda: dist.all_gather([x] * (RANKS + 1), x),
            [ValueError],
            "expected one for each of 3 ranks",
        ),
        (lambda: dist.all_to_all_single(torch.ones_like(wide), wide), [ValueError], "10 rows"),
        (
            lambda: dist.all_reduce(x, band),
            [NotImplementedError],
            "BAND is not defined on float32",
        ),
        (
            lambda: (
                functional.all_reduce(torch.ones(2 + odd), "sum", dist.group.WORLD).sum().item()
            ),
            mismatch,
            r"^all_reduce #\d+ in group 'default'",
        ),
        (lambda: unequal_ddp(rank), [], r"all_reduce\(float32\[3\], SUM\)"),
    )
    with torch_world("unisono", tmp_path) as world:
        for call, kinds_of_error, text in cases:
            assert re.search(text, line := line_of(call, *kinds_of_error)), line
            works()
        parts = DTensor.from_local(x, init_device_mesh("cpu", (RANKS,)), [Shard(0)])
        with pytest.raises(NotImplementedError, match=r"take no DTensor(.|\n)*to_local"):
            dist.all_reduce(parts)
        work = dist.all_reduce(torch.ones(2 + odd), async_op=True)
        future, seen = work.get_future(), []
        chained = future.then(lambda f: seen.append(line_of(f.value)) or 7)
        for _ in range(2):
            line = line_of(work.wait, *mismatch)
            assert re.match(r"all_reduce #\d+ in group 'default'", line)
        assert "CollectiveMismatchError: all_reduce #" in line_of(future.wait)
        with pytest.raises(RuntimeError) as caught:
            future.wait()
        # pybind11 adds the frames above that of the error.
        assert str(caught.value).partition("\n\nAt:\n")[2].count("\n  ") == 0
        assert chained.wait() == 7
        assert "CollectiveMismatchError: all_reduce #" in seen[0]
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), dist.DistBackendError)
        works()
        assert world.unisono.backends["cpu"].broken() is None


@pytest.mark.ranks(2, kind="processes")
def test_an_overlap_names_the_users_calls_and_is_logged_in_another_thread(rank, tmp_path):
    here, x = r"test_failures\.py:\d+", torch.ones(3)
    logged = logging.Handler()
    logged.emit = lambda record: logged.lines.append(record.getMessage())
    logged.lines = []
    with torch_world("unisono", tmp_path) as world:
        if rank == 1:
            dist.all_reduce(x)
        else:
            inside, go_on = threading.Event(), threading.Event()
            world.unisono.register_pre_hook(1, lambda call: inside.set() or go_on.wait(30))
            logging.getLogger("unisono").addHandler(logged)
            with ThreadPoolExecutor(1, "saver") as saver, ThreadPoolExecutor(1, "late") as late:
                first = saver.submit(lambda: dist.all_reduce(x))
                assert inside.wait(30)
                try:
                    line = line_of(lambda: dist.all_gather_object([None] * 2, 1), errors.UsageError)
                    assert not logged.lines
                    # No frame of this thread is the user's.
                    error = [late.submit(dist.barrier).exception() for _ in range(2)][1]
                finally:
                    go_on.set()
                first.result()
            world.unisono.unregister_pre_hook(1)
            of_first = rf"all_reduce at {here} \(thread 'saver_0'\)"
            of_main = rf"all_gather_object on group 'default' at {here} \(thread 'MainThread'\)"
            assert re.fullmatch(f"{of_main} overlaps {of_first}", line), line
            assert logged.lines == [str(error)]
            assert isinstance(error, dist.DistBackendError)
            assert isinstance(error, errors.UsageError)
            called = r"barrier on group 'default' at \w+\.py:\d+ \(thread 'late_0'\)"
            assert re.match(f"{called} overlaps {of_first}\n", str(error)), error
            assert "process_group=dist.new_group()" in str(error)
        assert x.tolist() == [2, 2, 2]
        dist.barrier()


@pytest.mark.ranks(2, kind="processes")
def test_unisonos_functions_take_torchs_groups(rank, tmp_path):
    with torch_world("unisono", tmp_path):
        every, alone = dist.group.WORLD, dist.new_group([1])
        for _ in range(3):  # C++ learns the call
            unisono.all_reduce(x := torch.ones(3), group=every)
            assert x.tolist() == [2, 2, 2]
        assert unisono.get_rank(every) == rank
        unisono.barrier(group=every)
        unisono.assert_equal({"x": x}, group=every)
        assert unisono.stats(every).operations["all_reduce"].calls == 3
        assert unisono.get_rank(alone) == rank - 1
        hook = unisono.NanCheckHook.attach(every)
        x[1] = float("nan") if rank else 1
        with pytest.raises(RuntimeError, match="rank 1 gives NaN to all_reduce") as caught:
            dist.all_reduce(x)
        if rank == 0:
            assert caught.value.hint.startswith("the call is wrong on the rank that refused it;")
        hook.remove()
        assert unisono.FlightRecorderHook.attach(every).records() == []
        plain = dist.new_group(backend="gloo")
        with pytest.raises(errors.ArgumentTypeError, match="which is not over a group of unisono"):
            unisono.stats(plain)


def unequal_ddp(rank):
    """Reduce gradients while one rank calls something else in their place."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    loss = model(torch.ones(1, 4)).sum()
    if rank == 1:
        dist.all_reduce(torch.ones(3))
    loss.backward()


@pytest.mark.native
@pytest.mark.ranks(RANKS, kind="processes")
def test_a_sub_group_of_two_engines_is_refused_by_all(rank, tmp_path):
    mine = CPUOptions(engine="reference") if rank == 1 else None
    with torch_world("unisono", tmp_path):
        group = dist.new_group(pg_options=mine)
        for _ in range(2):
            with pytest.raises(errors.UnsupportedError, match=r"one engine, .*reference on rank 1"):
                dist.all_reduce(torch.ones(1), group=group)
        dist.all_reduce(x := torch.ones(1))
        assert x.item() == RANKS


@pytest.mark.ranks(RANKS, kind="processes")
def test_waits_end_with_errors_that_name_the_late_ranks(rank, tmp_path):
    timeout = (dist.DistBackendError, errors.CollectiveTimeoutError)
    with torch_world("unisono", tmp_path):
        if rank == 0:
            x = torch.zeros(1)
            work = dist.irecv(x, src=1, tag=9)
            line = line_of(lambda: work.wait(timedelta(milliseconds=50)), *timeout)
            assert "was not done after 0.05 s of waiting; it goes on" in line
        dist.barrier()
        if rank == 1:
            dist.send(torch.tensor([5.0]), dst=0, tag=9)
        if rank == 0:
            assert work.wait()
            assert (x.item(), work.source_rank()) == (5.0, 1)
        drop_works(rank)
        assert chained() == (2 * RANKS * RANKS + 1) * RANKS
        group = dist.new_group(timeout=timedelta(seconds=1.0))
        if rank != RANKS - 1:
            line = line_of(lambda: dist.barrier(group=group), *timeout)
            assert re.search("ranks? [^:]*2 (never entered it|.*did not answer)", line), line
        dist.barrier()
        group = dist.new_group()
        if rank != RANKS - 1:
            wait = timedelta(seconds=0.5)
            line = line_of(lambda: group.monitored_barrier(wait, True), *timeout)
            # On a busy machine the report of rank 0 may come late.
            assert re.search("ranks? [^:]*[02] never entered it", line), line
        dist.barrier(group=group)
        # In the world: a rank that is still in the barrier of the group would see the abort there.
        dist.barrier()
        if rank == 0:
            group.abort()
        else:
            aborted = (dist.DistBackendError, errors.CollectiveAbortedError)
            line = line_of(lambda: dist.barrier(group=group), *aborted)
            assert "abort() was called on rank 0" in line
        dist.barrier()
        group = dist.new_group()
        dist.destroy_process_group(group)
        closed = (dist.DistError, errors.ClosedError)
        assert "destroyed" in line_of(lambda: group.allreduce([torch.ones(1)]), *closed)


def drop_works(rank):
    """Drop works that are under way, and the tensor of one; everything goes on."""
    x, y = torch.ones(1000), torch.zeros(1000)
    dist.all_reduce(x, async_op=True)
    dist.isend(torch.full((1000,), float(rank)), (rank + 1) % RANKS, tag=3)
    dist.irecv(y, (rank - 1) % RANKS, tag=3).wait()
    assert y[0].item() == (rank - 1) % RANKS
    dist.barrier()
    assert x[0].item() == RANKS
    for _ in range(2):  # the second time the call is repeated in C++
        x = torch.ones(1000)
        if rank == 0:
            # The other ranks are not there yet: the call still needs the memory.
            alive = weakref.ref(x.untyped_storage())
            dist.all_reduce(x, async_op=True)
            del x
            assert alive() is not None
            for peer in range(1, RANKS):
                dist.send(torch.ones(1), peer, tag=4)
        else:
            dist.recv(torch.zeros(1), 0, tag=4)
            dist.all_reduce(x)
            assert x[0].item() == RANKS
        dist.barrier()


def chained():
    """Wait for another operation in what is chained to one, twice over."""

    def second(future):
        y = 2 * future.value()[0]
        return dist.all_reduce(y, async_op=True).get_future().then(third).wait()

    def third(future):
        z = future.value()[0] + 1
        dist.all_reduce(z, async_op=True).get_future().wait()
        return z

    work = dist.all_reduce(torch.ones(2), async_op=True)
    return work.get_future().then(second).wait()[0].item()


@pytest.mark.ranks(RANKS, kind="processes", dead=[1])
def test_a_rank_killed_in_training_is_named(rank, tmp_path):
    died = tmp_path / "died"

    def die(grad):
        if rank == 1:
            died.write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def train():
        for _ in range(3):
            model(x).sum().backward()

    with torch_world("unisono", tmp_path):
        torch.manual_seed(0)
        model, x = DistributedDataParallel(torch.nn.Linear(64, 64)), torch.ones(2, 64)
        model(x).sum().backward()
        model.module.weight.register_hook(die)
        line = line_of(train)
        assert time.time() - float(died.read_text()) < 20  # of a time-out of 60 s
    assert "PeerLostError: " in line
    assert "rank 1 was lost" in line
