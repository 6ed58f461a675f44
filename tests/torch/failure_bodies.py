"""What goes wrong, and how torch's users hear of it."""

import os
import signal
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from tests.torch.torch_world import torch_world
from unisono import errors


def said(call, *kinds):
    """Return the first line of the error that `call` must raise, of all the given kinds."""
    with pytest.raises(RuntimeError) as caught:
        call()
    for kind in kinds:
        assert isinstance(caught.value, kind), (type(caught.value).__mro__, kind)
    return str(caught.value).partition("\n")[0]


def mistakes(rank, path):
    """Return what each mistake said; the group must be usable after each."""
    with torch_world("unisono", path) as world:
        size = dist.get_world_size()
        mismatch = (dist.DistBackendError, errors.CollectiveMismatchError)

        def works():
            x = torch.ones(3)
            dist.all_reduce(x)
            assert x[0].item() == size

        heard = {}
        heard["shape"] = said(lambda: dist.all_reduce(torch.ones(2 + rank % 2)), *mismatch)
        works()
        heard["dtype"] = said(
            lambda: dist.all_reduce(torch.ones(2, dtype=[torch.float32, torch.int64][rank % 2])),
            *mismatch,
        )
        works()
        x = torch.ones(2)
        heard["op"] = said(
            lambda: dist.broadcast(x, 0) if rank == 0 else dist.all_reduce(x), *mismatch
        )
        works()
        heard["list"] = said(lambda: dist.all_gather([x] * (size + 1), x), ValueError)
        works()
        wide = torch.ones(3 * size + 1)
        heard["divide"] = said(
            lambda: dist.all_to_all_single(torch.ones_like(wide), wide), ValueError
        )
        works()
        heard["dtype none has"] = said(
            lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND), NotImplementedError
        )
        works()
        work = dist.all_reduce(torch.ones(2 + rank % 2), async_op=True)
        future = work.get_future()
        seen = []
        chained = future.then(lambda f: seen.append(said(f.value)) or 7)
        heard["async"] = said(work.wait, *mismatch)
        heard["again"] = said(work.wait, *mismatch)
        heard["future"] = said(future.wait)
        assert chained.wait() == 7
        heard["then"] = seen[0]
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), dist.DistBackendError)
        works()
        heard["functional"] = said(
            lambda: (
                functional.all_reduce(torch.ones(2 + rank % 2), "sum", dist.group.WORLD)
                .sum()
                .item()
            ),
            *mismatch,
        )
        works()
        heard["ddp"] = said(lambda: unequal_ddp(rank))
        works()
        assert world.unisono.backends["cpu"].broken() is None
        return heard


def unequal_ddp(rank):
    """Reduce gradients while one rank calls something else in their place."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    loss = model(torch.ones(1, 4)).sum()
    if rank == 1:
        dist.all_reduce(torch.ones(3))
    loss.backward()


def waits(rank, path):
    """Return what time-outs, aborted and closed groups say."""
    with torch_world("unisono", path):
        size = dist.get_world_size()
        timeout = (dist.DistBackendError, errors.CollectiveTimeoutError)
        heard = {}
        if rank == 0:
            x = torch.zeros(1)
            work = dist.irecv(x, src=1, tag=9)
            heard["wait"] = said(lambda: work.wait(timedelta(milliseconds=50)), *timeout)
        dist.barrier()
        if rank == 1:
            dist.send(torch.tensor([5.0]), dst=0, tag=9)
        if rank == 0:
            assert work.wait()
            assert (x.item(), work.source_rank()) == (5.0, 1)
        del_works(rank, size)
        heard["chain"] = chained(size)
        group = dist.new_group(timeout=timedelta(seconds=1.0))
        if rank != size - 1:
            heard["late"] = said(lambda: dist.barrier(group=group), *timeout)
        dist.barrier()
        group = dist.new_group()
        if rank != size - 1:
            heard["monitored"] = said(
                lambda: group.monitored_barrier(timedelta(seconds=0.5), True), *timeout
            )
        dist.barrier(group=group)
        # Of the world: who is still in the other one would hear of the abort there.
        dist.barrier()
        if rank == 0:
            group.abort()
        else:
            aborted = (dist.DistBackendError, errors.CollectiveAbortedError)
            heard["abort"] = said(lambda: dist.barrier(group=group), *aborted)
        dist.barrier()
        group = dist.new_group()
        dist.destroy_process_group(group)
        heard["closed"] = said(
            lambda: group.allreduce([torch.ones(1)]), dist.DistError, errors.ClosedError
        )
        return heard


def del_works(rank, size):
    """Drop works that are under way; everything goes on."""
    x, y = torch.ones(1000), torch.zeros(1000)
    dist.all_reduce(x, async_op=True)
    dist.isend(torch.full((1000,), float(rank)), (rank + 1) % size, tag=3)
    last = dist.irecv(y, (rank - 1) % size, tag=3)
    last.wait()
    assert y[0].item() == (rank - 1) % size
    dist.barrier()
    assert x[0].item() == size
    del_tensor(rank, size)


def del_tensor(rank, size):
    """Drop a tensor with its work while the others are not there yet: the call still needs it."""
    for _ in range(2):  # the second time the call is repeated in C++
        x = torch.ones(1000)
        if rank == 0:
            alive = weakref.ref(x)
            dist.all_reduce(x, async_op=True)
            del x
            assert alive() is not None
            for peer in range(1, size):
                dist.send(torch.ones(1), peer, tag=4)
        else:
            dist.recv(torch.zeros(1), 0, tag=4)
            dist.all_reduce(x)
            assert x[0].item() == size
        dist.barrier()


def chained(size):
    """Wait for another operation in what is chained to one, twice over."""

    def second(future):
        y = 2 * future.value()[0]
        return dist.all_reduce(y, async_op=True).get_future().then(third).wait()

    def third(future):
        z = future.value()[0] + 1
        dist.all_reduce(z, async_op=True).get_future().wait()
        return z

    x = torch.ones(2)
    z = dist.all_reduce(x, async_op=True).get_future().then(second).wait()
    return [z[0].item(), (2 * size * size + 1) * size]


def killed(rank, path):
    """Die in the middle of training; return what the others heard and how long it took."""
    with torch_world("unisono", path):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(64, 64))
        x = torch.ones(2, 64)
        model(x).sum().backward()

        def die(grad):
            if rank == 1:
                with open(f"{path}-died", "w") as file:
                    file.write(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

        model.module.weight.register_hook(die)
        text = said(lambda: train_on(model, x))
        heard_at = time.time()
        with open(f"{path}-died") as file:
            return text, heard_at - float(file.read())


def train_on(model, x):
    for _ in range(3):
        model(x).sum().backward()
