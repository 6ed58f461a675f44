"""The NCCL backend on a real GPU, which several ranks share: `make test-gpu`.

Without a GPU, torch and nccl4py these tests are skipped.
"""

import os
import signal
import time

import numpy as np
import pytest

import unisono as dist
from tests.support.operations import COLLECTIVES, Operations
from unisono.errors import CollectiveMismatchError, UnisonoError
from unisono.testing import run


def why_no_gpu():
    """Return why these tests cannot run, or ""."""
    if os.environ.get("UNISONO_TEST_GPU") != "1":
        return "UNISONO_TEST_GPU is not 1; make test-gpu sets it"
    if not dist.is_nccl_available():
        return "nccl4py is not installed"
    try:
        import torch
    except ImportError as error:
        return str(error)
    return "" if torch.cuda.is_available() else "torch finds no GPU"


pytestmark = pytest.mark.skipif(bool(why_no_gpu()), reason=why_no_gpu())

LIMIT_S = 60
# NCCL refuses ranks that share a GPU unless told otherwise, and must leave room for all kernels.
SHARED = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0",
}  # fmt: skip


def on_gpu(rank, body, *arguments):
    import torch

    os.environ |= SHARED
    torch.cuda.set_device(rank % torch.cuda.device_count())
    group = dist.new_group(backend="nccl", timeout=LIMIT_S)
    world = dist.group.WORLD
    # Operations use the default group.
    world.backends["cuda"] = group.backends["cuda"]
    return body(rank, group, *arguments)


def on_ranks(size, body, *arguments, timeout=LIMIT_S, **how):
    return run(on_gpu, size, ranks="processes", args=(body, *arguments), timeout=timeout, **how)


class OnTorch(Operations):
    def write(self, before, after):
        import torch

        x = torch.from_numpy(before.copy()).cuda()
        self.made.append((x, after))
        return x

    def check(self, *what):
        self.made = [(x.cpu().numpy(), after) for x, after in self.made]
        super().check(*what)


class OnCuPy(Operations):
    def write(self, before, after):
        import cupy

        x = cupy.asarray(before)
        self.made.append((x, after))
        return x

    def check(self, *what):
        self.made = [(x.get(), after) for x, after in self.made]
        super().check(*what)


def matrix(rank, group, kind, how):
    calls = kind(rank, group.size(), **how)
    for name in COLLECTIVES:
        getattr(calls, name)()
    calls.check(how)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "how",
    [{}, {"root": 1, "dtype": np.float32, "op": dist.ReduceOp.AVG, "modulus": 100},
     {"uneven": [3, 0, 5, 2], "op": dist.ReduceOp.MAX}, {"in_place": True},
     {"dtype": np.int16, "modulus": 50}, {"op": dist.ReduceOp.BXOR}, {"count": 300_000}],
)  # fmt: skip
def test_every_operation_on_tensors(size, how):
    how = how | ({"uneven": how["uneven"][:size]} if "uneven" in how else {})
    on_ranks(size, matrix, OnTorch, how)


def test_every_operation_on_cupy_arrays():
    pytest.importorskip("cupy")
    on_ranks(2, matrix, OnCuPy, {})


def strided(rank, group):
    import torch

    table = torch.arange(12.0, device="cuda").reshape(3, 4) + rank
    group.all_reduce(table[:, 1])
    assert table[:, 1].tolist() == [2 * x + 1 for x in (1, 5, 9)]
    assert table[:, 0].tolist() == [x + rank for x in (0, 4, 8)]
    half = torch.full((5,), rank + 0.5, dtype=torch.bfloat16, device="cuda")
    group.all_reduce(half, dist.ReduceOp.PREMUL_SUM(0.5))
    assert half.tolist() == [1.0] * 5


def test_strided_tensors_and_bfloat16():
    on_ranks(2, strided)


def mismatch(rank, group):
    import torch

    group.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    begun_s = time.monotonic()
    work = group.all_reduce(torch.ones(3 + rank % 2, device="cuda"), async_op=True)
    with pytest.raises(CollectiveMismatchError) as caught:
        work.wait(LIMIT_S)
    assert "called all_reduce(float32[3], SUM)" in caught.value.what
    return time.monotonic() - begun_s


def test_a_mismatch_is_named_on_all_ranks():
    for taken_s in on_ranks(3, mismatch):
        assert taken_s < 5


def struck(rank, group, how):
    """Rank 1 is killed or stopped between two calls; the others name it."""
    import torch

    x, pids = torch.ones(1 << 20, device="cuda"), [None] * 3
    group.all_reduce(x)
    torch.cuda.synchronize()
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), how)

    def calls():
        while True:
            group.all_reduce(x, async_op=True, timeout=3).wait(LIMIT_S)

    with pytest.raises(UnisonoError) as caught:
        calls()
    if rank == 0 and how == signal.SIGSTOP:
        os.kill(pids[1], signal.SIGCONT)
    return caught.value.what


@pytest.mark.parametrize(("how", "dead"), [(signal.SIGKILL, (1,)), (signal.SIGSTOP, ())])
def test_a_killed_or_stopped_rank_is_named(how, dead):
    texts = on_ranks(3, struck, how, dead=dead)
    assert all("rank 1" in texts[rank] for rank in (0, 2))


def storm(rank, group, rounds):
    import torch

    x = torch.ones(1000, device="cuda")
    for turn in range(rounds):
        part = dist.new_group(backend="nccl")
        part.all_reduce(x)
        if turn % 2:
            work = part.all_reduce(x, async_op=True)
            part.abort("storm")
            work.exception()
        dist.destroy_process_group(part)
    dist.barrier()


def test_aborts_in_series():
    on_ranks(2, storm, 20)


@pytest.mark.whole("1,000 communicators, some minutes")
@pytest.mark.timeout(1300)
def test_a_thousand_groups():
    # The whole run may take twice as long as a call.
    on_ranks(2, storm, 1000, timeout=600)


def data_parallel(rank, group):
    import torch

    from unisono.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2).cuda())
    out = model(torch.full((3, 4), rank + 1.0, device="cuda")).sum()
    out.backward()
    grads = [p.grad.cpu().numpy() for p in model.parameters()]
    assert np.allclose(grads[0], 3 * 1.5)


def test_data_parallel_training():
    on_ranks(2, data_parallel)
