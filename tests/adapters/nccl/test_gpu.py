"""The NCCL backend on a real GPU, which several ranks share: `make test-gpu`.

Without a GPU, torch and nccl4py these tests are skipped.
"""

import importlib.util
import os
import signal
import time
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest

import unisono as dist
from tests.support import oracle
from tests.support.operations import COLLECTIVES, Operations
from unisono.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    UnisonoError,
)
from unisono.lowlevel import CUDAStream
from unisono.testing import run


def why_no_gpu():
    """Return why these tests cannot run, or ""."""
    if os.environ.get("UNISONO_TEST_GPU") != "1":
        return "runs on a GPU only; `make test-gpu`"
    if not dist.is_nccl_available():
        return "nccl4py is not installed"
    try:
        import torch
    except ImportError as error:
        return str(error)
    return "" if torch.cuda.is_available() else "torch finds no GPU"


pytestmark = pytest.mark.skipif(bool(why_no_gpu()), reason=why_no_gpu())

# Of a call. A test may take twice as long: `unisono.testing.run` then shows where its ranks are.
LIMIT_S = 30
# NCCL refuses ranks that share a GPU unless told otherwise, and must leave room for all kernels.
SHARED = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0",
}  # fmt: skip


def on_gpu(rank, limit_s, body, *arguments):
    import torch

    os.environ |= SHARED
    torch.cuda.set_device(rank % torch.cuda.device_count())
    group = dist.new_group(backend="nccl", timeout=limit_s)
    world = dist.group.WORLD
    # Operations use the default group.
    world.backends["cuda"] = group.backends["cuda"]
    return body(rank, group, *arguments)


def on_ranks(size, body, *arguments, timeout=LIMIT_S, **how):
    # Once for all ranks of a process, because it takes seconds.
    forkserver.set_forkserver_preload(["unisono.testing.ranks", "torch"])
    given = (min(timeout, LIMIT_S), body, *arguments)
    return run(on_gpu, size, ranks="processes", args=given, timeout=timeout, **how)


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


def reductions(rank, group):
    import torch

    for dtype in oracle.DTYPES:
        given = oracle.values(dtype, rank, 7)
        part = torch.from_numpy(given.copy().view(np.uint8)).cuda()
        part = part.view(getattr(torch, dtype))
        whole = part.new_empty(2 * len(part))
        group.all_gather_into_tensor(whole, part)
        everyone = b"".join(oracle.bits(oracle.values(dtype, r, 7)) for r in range(2))
        assert whole.view(torch.uint8).cpu().numpy().tobytes() == everyone, dtype
        for op in oracle.REDUCE_OPS[dtype]:
            x = part.clone()
            group.all_reduce(x, oracle.reduce_op(op))
            got = x.view(torch.uint8).cpu().numpy().view(oracle.np_dtype(dtype))
            oracle.check((dtype, op), got, *oracle.reduction(dtype, op, 2, 7))
    one, two = (torch.tensor([v], device="cuda").to(torch.float8_e5m2) for v in (1.0, 2.0))
    x = two if rank else one
    group.all_reduce(x)
    assert x.float().item() == 3


def test_every_dtype_and_reduce_op():
    on_ranks(2, reductions)


def numba_arrays(rank, group):
    from numba import cuda

    x = cuda.to_device(np.array([rank + 1.0, 5.0]))
    group.all_reduce(x)
    assert x.copy_to_host().tolist() == [3, 10]
    table = cuda.to_device(np.arange(6.0).reshape(2, 3) + rank)
    group.all_reduce(table[:, 1])
    before = np.arange(6.0).reshape(2, 3)
    before[:, 1] += before[:, 1] + 1 - rank
    assert np.array_equal(table.copy_to_host(), before + rank)


@pytest.mark.skipif(not importlib.util.find_spec("numba"), reason="numba is not installed")
def test_arrays_of_numba():
    on_ranks(2, numba_arrays)


def messages(rank, group):
    import torch

    other = 1 - rank
    for tag in range(3):
        x = torch.full((4,), tag + 10.0, device="cuda") if rank == 0 else torch.zeros(4).cuda()
        dist.send(x, 1, group, tag) if rank == 0 else dist.recv(x, 0, group, tag)
        assert x.tolist() == [tag + 10] * 4
    out, table = torch.zeros(3).cuda(), torch.zeros(3, 2).cuda()
    ops = [
        dist.P2POp(dist.isend, torch.tensor([rank, 7.0, 9.0]).cuda(), other, group),
        dist.P2POp(dist.irecv, out, other, group),
        dist.P2POp(dist.irecv, table[:, 1], other, group),
        dist.P2POp(dist.isend, torch.full((3,), rank + 1.0).cuda(), other, group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert out.tolist() == [other, 7, 9]
    assert table.tolist() == [[0, other + 1]] * 3
    sums = [torch.full((n,), rank + 1.0).cuda() for n in (2, 3)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for x in sums:
            dist.all_reduce(x, group=group)
    manager.wait()
    assert [x.tolist() for x in sums] == [[3, 3], [3, 3, 3]]


def test_messages_and_coalesced_calls():
    on_ranks(2, messages)


def streams(rank, group):
    """The host runs ahead: rank 1 enters only after rank 0 has seen its call incomplete."""
    import torch

    group.all_reduce(torch.zeros(1, device="cuda"))
    compute, other = (CUDAStream(torch.cuda.Stream()) for _ in range(2))
    x, y = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    if rank == 1:
        dist.barrier()
    with dist.stream(compute):
        torch.cuda._sleep(100_000_000)
        x.fill_(rank + 1.0)
        work = group.all_reduce(x, async_op=True)
    if rank == 0:
        assert not work.is_completed()
        dist.barrier()
    with dist.stream(other):
        work.wait()
        y.copy_(x)
        event = other.record_event()
    event.synchronize(LIMIT_S)
    assert y.eq(3).all().item()
    compute.synchronize(LIMIT_S)
    assert work.wait(LIMIT_S)
    # Memory of a tensor that is dropped in the call stays until the call has ended.
    for turn in range(50):
        group.all_reduce(torch.full((100_000,), 1.0, device="cuda"), async_op=True)
        filled = torch.full((100_000,), -1.0, device="cuda")
        x = torch.full((100_000,), turn + 1.0, device="cuda")
        group.all_reduce(x)
        assert x.eq(2 * turn + 2).all().item()
        assert filled.eq(-1).all().item()


def test_streams_and_memory():
    on_ranks(2, streams)


def groups(rank, group):
    import torch

    pair = dist.new_group([0, 2], backend="nccl")
    if rank != 1:
        x = torch.full((5,), rank + 1.0, device="cuda")
        pair.all_reduce(x)
        assert x.tolist() == [4] * 5
    everyone = [None] * 3
    dist.all_gather_object(everyone, {"rank": rank}, group)
    assert everyone == [{"rank": r} for r in range(3)]
    if rank != 2:
        smaller = dist.shrink_group([2], group=group)
        x = torch.full((5,), rank + 1.0, device="cuda")
        smaller.all_reduce(x)
        assert x.tolist() == [3] * 5


def test_sub_groups_and_shrunk_groups():
    on_ranks(3, groups)


def checked_before(rank, _):
    import torch

    os.environ["UNISONO_CHECK"] = "before"
    group = dist.new_group(backend="nccl")
    assert "check=before" in repr(group)
    group.all_reduce(torch.ones(1, device="cuda"))
    x = torch.ones(3 + rank % 2, device="cuda")
    with pytest.raises(CollectiveMismatchError, match="does not match"):
        group.all_reduce(x)
    assert set(x.tolist()) == {1}
    x = torch.full((2,), 2.0, device="cuda")
    group.all_reduce(x)
    assert x.tolist() == [6, 6]


def test_checked_before_a_mismatch_changes_nothing():
    on_ranks(3, checked_before)


def late(rank, group, folder):
    import torch

    x = torch.ones(1000, device="cuda")
    group.all_reduce(x)
    torch.cuda.synchronize()
    if rank == 2:
        # In user code until the others have raised.
        until_s = time.monotonic() + LIMIT_S
        while len(list(Path(folder).iterdir())) < 2 and time.monotonic() < until_s:
            time.sleep(0.01)
        return ""
    work = group.all_reduce(x, async_op=True, timeout=1)
    with pytest.raises(CollectiveTimeoutError) as caught:
        work.wait(LIMIT_S)
    Path(folder, str(rank)).touch()
    # The kernels have ended: the GPU is free, and the other ranks go on.
    torch.cuda.synchronize()
    again = dist.new_group([0, 1], backend="nccl", use_local_synchronization=True)
    x = torch.full((3,), rank + 1.0, device="cuda")
    again.all_reduce(x)
    assert x.tolist() == [3] * 3
    return caught.value.what


def test_a_late_rank_is_named_and_the_others_go_on(tmp_path):
    for what in on_ranks(3, late, str(tmp_path))[:2]:
        assert "timed out after 1.0 s" in what
        assert "rank 2 never entered it" in what


def refused(rank, group):
    import torch

    with pytest.raises(InvalidArgumentError, match="overlaps itself"):
        group.all_reduce(torch.zeros(1, device="cuda").expand(3))
    with pytest.raises(ArgumentTypeError):
        group.all_reduce([torch.zeros(1, device="cuda")])
    x = torch.full((1,), rank + 1.0, device="cuda")
    group.all_reduce(x)
    assert x.item() == 3


def test_what_is_refused_leaves_the_group_usable():
    on_ranks(2, refused)


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
    if how == signal.SIGKILL:
        smaller = dist.shrink_group([1], group=group)
        x = torch.full((1000,), rank + 1.0, device="cuda")
        smaller.all_reduce(x)
        assert x.eq(4).all().item()
    return caught.value.what


@pytest.mark.parametrize(("how", "dead"), [(signal.SIGKILL, (1,)), (signal.SIGSTOP, ())])
def test_a_killed_or_stopped_rank_is_named(how, dead):
    texts = on_ranks(3, struck, how, dead=dead)
    assert all("rank 1" in texts[rank] for rank in (0, 2))


def what_is_held():
    """Return the number of open files of this rank, and the bytes of the GPU that are in use."""
    import torch

    torch.cuda.synchronize()
    dist.barrier()
    free, total = torch.cuda.mem_get_info()
    return len(os.listdir("/proc/self/fd")), total - free


def storm(rank, group, rounds):
    import torch

    x, left = torch.ones(1000, device="cuda"), []
    for turn in range(rounds):
        if turn == rounds // 2:
            left.append(what_is_held())
        part = dist.new_group(backend="nccl")
        part.all_reduce(x)
        if turn % 2:
            work = part.all_reduce(x, async_op=True)
            part.abort("storm")
            work.exception()
        dist.destroy_process_group(part)
    (files, memory), (files_then, memory_then) = what_is_held(), left[0]
    assert files <= files_then + 4
    assert memory <= memory_then + (64 << 20)


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
