"""All that one lent GPU can show, in 8 minutes, as a table: `make test-gpu`.

    python -m tests.adapters.nccl.gpu_check [STAGE ...]

Each stage is a process of its own with a limit, so that none takes the time of the others. Without
a GPU the stages that need none run.
"""

import os
import signal
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

from tests.adapters.nccl.test_gpu import on_ranks, what_is_held, why_no_gpu
from unisono.adapters.nccl.intra_node import VARIABLE, algorithm_of

TESTS = "tests/adapters/nccl"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
FAULTS = "killed or late or aborts or mismatch or refused or messages or groups"


class Stage(NamedTuple):
    """One row of the table: pytest's arguments, or () for the function of that name."""

    needs_gpu: bool
    limit_s: int
    pytest: tuple[str, ...] = ()
    intra_node: bool = False


STAGES = {
    "kernels": Stage(False, 60, (f"{TESTS}/test_intra_node.py", "-k", "nvrtc or choice or places")),
    "model": Stage(False, 60, (f"{TESTS}/test_kernel_model.py",)),
    "sums": Stage(True, 80, intra_node=True),
    "cube_mesh": Stage(True, 40, intra_node=True),
    "faults": Stage(True, 60, (f"{TESTS}/test_gpu.py", "-k", FAULTS), True),
    "storm": Stage(True, 45),
    "storm_intra_node": Stage(True, 45, intra_node=True),
    "plug_in": Stage(True, 60),
    # Last, because it is the longest, and has passed on a GPU before.
    "nccl": Stage(True, 150, (f"{TESTS}/test_gpu.py",)),
}
TOTAL_S = 470
"""Of all stages: those that have not begun by then are left out."""


# ---- stages ---------------------------------------------------------------------------------


def timed_us(call, rounds=7):
    """Return the median time of a call, with its kernels."""
    import torch

    taken = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    return 1e6 * statistics.median(taken)


def compared(rank, group, sizes, cube):
    """Return rows: size, dtype, kernel, microseconds with IntraNodeComm and with NCCL."""
    import torch

    import unisono as dist

    assert "intra_node=no (not connected)" in repr(group)
    if cube is not None:
        from unisono.adapters.nccl.gpu import GPU

        GPU.links = lambda self, uuids: cube[rank]
    group.all_reduce(torch.ones(1, device="cuda"))
    assert "intra_node=yes" in repr(group), repr(group)
    os.environ[VARIABLE] = "0"
    plain, rows = dist.new_group(backend="nccl", timeout=60), []
    generator = torch.Generator().manual_seed(rank)
    for nbytes in sizes:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            given = torch.randn(nbytes // dtype.itemsize, generator=generator).to(dtype)
            kernel = algorithm_of(nbytes, is_cube=cube is not None)
            expected = given.clone()
            schedule = "cube_mesh" if kernel == "cube_mesh" else "rank_order"
            dist.all_reduce(expected, algorithm=schedule)
            x, y = given.cuda(), given.cuda()
            group.all_reduce(x)
            plain.all_reduce(y)
            assert torch.allclose(y.cpu(), expected, rtol=0.05, atol=0.1), (nbytes, dtype)
            same = torch.equal(x.cpu(), expected)
            assert same or kernel is None, (nbytes, dtype, kernel)
            if dtype is torch.float32:
                times = [timed_us(lambda g=g, x=x: g.all_reduce(x.zero_())) for g in (group, plain)]
                rows.append((nbytes, kernel or "nccl", *times))
    files, memory = what_is_held()
    return rows, files, memory


def show(size, result):
    rows, files, memory = result
    for nbytes, kernel, ours, nccl in rows:
        print(f"{size} ranks {nbytes:>9} B {kernel:>9}: {ours:9.0f} us, NCCL {nccl:9.0f} us")
    print(f"{size} ranks: {files} files open, {memory >> 20} MiB of the GPU in use")


def sums():
    """Against the CPU's bits and NCCL, 8 B to 64 MiB."""
    sizes = [8, 64, 4096, 32 << 10, 256 << 10, (256 << 10) + 16, 2 << 20, 10 << 20, 64 << 20]
    for size in (2, 4):
        show(size, on_ranks(size, compared, sizes, None)[0])


def cube_mesh():
    """As `sums`, with the links of a DGX-1 given to 8 ranks that share the GPU."""
    quads = [sum(1 << b for b in range(8) if b != a and (b // 4 == a // 4 or b == a ^ 4))
             for a in range(8)]  # fmt: skip
    show(8, on_ranks(8, compared, [8, 4096, 256 << 10], quads)[0])


def aborted_groups(rank, group, limit_s):
    """Return the seconds of each round, and what the process holds at first and at last."""
    import torch

    import unisono as dist

    x, taken, until = torch.ones(1000, device="cuda"), [], time.monotonic() + limit_s
    held = []
    while True:
        # Rank 0 decides for all.
        goes_on = [time.monotonic() < until and len(taken) < 120]
        dist.broadcast_object_list(goes_on, 0)
        if len(taken) == 6 or not goes_on[0]:
            held.append(what_is_held())
        if not goes_on[0]:
            return taken, held
        begun = time.monotonic()
        part = dist.new_group(backend="nccl")
        part.all_reduce(x)
        if len(taken) % 2:
            work = part.all_reduce(x, async_op=True)
            part.abort("storm")
            work.exception()
        dist.destroy_process_group(part)
        taken.append(time.monotonic() - begun)


def storm():
    """Groups that are made, and every second aborted, one after another."""
    taken, held = on_ranks(2, aborted_groups, 25)[0]
    for name, times in (("destroyed", taken[::2]), ("aborted", taken[1::2])):
        shown = " ".join(f"{each:.2f}" for each in times)
        print(f"{len(times)} {name}, seconds each: {shown}")
    (files, memory), (files_then, memory_then) = held[-1], held[0]
    print(f"files {files_then} -> {files}, memory {memory_then >> 20} -> {memory >> 20} MiB")
    assert files <= files_then + 4
    assert memory <= memory_then + (64 << 20)


storm_intra_node = storm


def trained(kind, device):
    """Return the weights of a small model after three steps on each rank's data."""
    import torch
    import torch.distributed as torch_dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(5)
    rank = torch_dist.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    model.to(device)
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh(device, (torch_dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        data = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        model(data.to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [p.full_tensor() if kind == "fsdp2" else p for p in model.parameters()]
    return [p.detach().cpu() for p in whole]


def under_torch(rank, folder):
    import torch

    import unisono as dist
    from tests.adapters.torch.torch_world import torch_world

    # torch's NCCL may be too old to let ranks share a GPU, but takes them for several hosts.
    os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    torch.cuda.set_device(0)
    with torch_world("cpu:unisono,cuda:nccl", folder):
        for kind in ("ddp", "fsdp2"):
            near, far = trained(kind, "cpu"), trained(kind, "cuda")
            for a, b in zip(near, far, strict=True):
                assert torch.allclose(a, b, atol=1e-4), (kind, a, b)
    return dist.get_rank()


def plug_in():
    """DDP and FSDP2 on CUDA tensors under torch, against the same on the CPU."""
    import tempfile

    from unisono.testing import run

    with tempfile.TemporaryDirectory() as folder:
        run(under_torch, 2, ranks="processes", args=(folder,), timeout=50)
    print("DDP and FSDP2 on CUDA tensors have the weights of the CPU")


# ---- the table ------------------------------------------------------------------------------


def run_stage(name, limit_s):
    """Return what a stage printed, and its result."""
    stage = STAGES[name]
    # Not as the main module, whose functions other processes cannot import.
    function = f"from tests.adapters.nccl import gpu_check; gpu_check.{name}()"
    command = [*PYTEST, *stage.pytest] if stage.pytest else [sys.executable, "-c", function]
    env = os.environ | {"UNISONO_TEST_GPU": "1", VARIABLE: str(int(stage.intra_node))}
    with subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, _ = process.communicate(timeout=limit_s)
            return out, "passed" if process.returncode == 0 else "FAILED"
        except subprocess.TimeoutExpired:
            # It and its ranks.
            os.killpg(process.pid, signal.SIGKILL)
            return process.communicate()[0], f"NOT ENDED in {limit_s:.0f} s"


def main(names):
    os.environ["UNISONO_TEST_GPU"] = "1"
    why, begun = why_no_gpu(), time.monotonic()
    print(f"no GPU: {why}" if why else "a GPU is here", flush=True)
    rows, failed = [], False
    for name in names or STAGES:
        stage = STAGES[name]
        left_s = TOTAL_S - (time.monotonic() - begun)
        if (stage.needs_gpu and why) or left_s < 10:
            rows.append((name, 0.0, "needs a GPU" if why else "left out: no time"))
            failed |= not why
            continue
        start = time.monotonic()
        out, result = run_stage(name, min(stage.limit_s, left_s))
        rows.append((name, time.monotonic() - start, result))
        failed |= result != "passed"
        lines = out.strip().splitlines()
        print(f"---- {name}", *lines[-(12 if result == "passed" else 60) :], sep="\n", flush=True)
    print(f"\n{'stage':<18}{'seconds':>8}  result")
    for name, taken_s, result in rows:
        print(f"{name:<18}{taken_s:>8.1f}  {result}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
