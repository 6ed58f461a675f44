"""All that one lent GPU can show, in 8 minutes, as a table: `make test-gpu`.

    python -m tests.adapters.nccl.gpu_check [--logs FOLDER] [STAGE ...]

Each stage is a process of its own with a limit, so that none takes the time of the others, and
writes into a file of its own, which is there whatever happens. Without a GPU the stage that needs
none runs.
"""

import argparse
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.adapters.nccl.test_gpu import on_ranks, what_is_held, why_no_gpu
from unisono.adapters.nccl.intra_node import VARIABLE, algorithm_of

TESTS = "tests/adapters/nccl"
PYTEST = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
FAULTS = "killed or late or mismatch or refused or messages or groups"


class Stage(NamedTuple):
    """One row of the table: pytest's arguments, or () for the function of that name."""

    needs_gpu: bool
    limit_s: int
    pytest: tuple[str, ...] = ()
    intra_node: bool = False


# First what no GPU has shown yet. The rest may be left out if the time is over.
STAGES = {
    "sums": Stage(True, 90, intra_node=True),
    "storm": Stage(True, 60),
    "faults": Stage(True, 110, (f"{TESTS}/test_gpu.py", "-k", FAULTS), True),
    "storm_intra_node": Stage(True, 60, intra_node=True),
    "cube_mesh": Stage(True, 60, intra_node=True),
    "plug_in": Stage(True, 60),
    "nccl": Stage(True, 200, (f"{TESTS}/test_gpu.py",)),
    "kernels": Stage(False, 60, (f"{TESTS}/test_intra_node.py", f"{TESTS}/test_kernel_model.py",
                                 "-k", "nvrtc or choice or places or kernel_model")),
}  # fmt: skip
TOTAL_S = 470
"""Of all stages: those that have not begun by then are left out."""
_SHOWN = 3000
"""Of the end of a log, characters."""


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
    """Print for each size the kernel and the times; return what was wrong."""
    import torch

    import unisono as dist

    assert "intra_node=no (not connected)" in repr(group)
    if cube is not None:
        from unisono.adapters.nccl.gpu import GPU

        GPU.links = lambda self, uuids: cube[rank]
    group.all_reduce(torch.ones(1, device="cuda"))
    assert "intra_node=yes" in repr(group), repr(group)
    os.environ[VARIABLE] = "0"
    plain, wrong = dist.new_group(backend="nccl", timeout=20), []
    generator = torch.Generator().manual_seed(rank)
    torch.set_num_threads(2)  # of the checks: 8 ranks share the cores
    for nbytes in sizes:
        kernel = algorithm_of(nbytes, is_cube=cube is not None)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)[: None if kernel else 1]:
            given = torch.randn(nbytes // dtype.itemsize, generator=generator).to(dtype)
            expected = given.clone()
            schedule = "cube_mesh" if kernel == "cube_mesh" else "rank_order"
            dist.all_reduce(expected, algorithm=schedule)
            x, y = given.cuda(), given.cuda()
            group.all_reduce(x)
            plain.all_reduce(y)
            for name, got, exact in (("nccl", y, False), (kernel or "nccl", x, bool(kernel))):
                if not (bad := differing(got.cpu(), expected, exact)):
                    continue
                wrong.append(f"rank {rank}: {name} of {nbytes} B of {dtype}: {bad}")
                print(wrong[-1])
        x = torch.zeros(nbytes // 4, device="cuda")
        times = [timed_us(partial(each.all_reduce, x)) for each in (group, plain)]
        if rank == 0:
            took = f"{times[0]:9.0f} us, NCCL {times[1]:9.0f} us"
            print(f"{group.size()} ranks {nbytes:>9} B {kernel or 'nccl':>9}: {took}")
    files, memory = what_is_held()
    print(f"rank {rank}: {files} files open, {memory >> 20} MiB of the GPU in use")
    return wrong


def differing(got, expected, exact):
    """Return which elements differ, or ""."""
    import torch

    same = got == expected if exact else torch.isclose(got, expected, rtol=0.05, atol=0.1)
    if same.all():
        return ""
    at = (~same).nonzero().flatten().tolist()
    first = f"{got[at[0]].item()!r}, expected {expected[at[0]].item()!r}"
    return f"{len(at)} of {len(got)} elements differ, {at[0]} to {at[-1]}; the first is {first}"


def sums():
    """Against the CPU's bits and NCCL, 8 B to 64 MiB."""
    sizes = [8, 64, 4096, 32 << 10, 256 << 10, (256 << 10) + 16, 2 << 20, 10 << 20, 64 << 20]
    wrong = []
    for size in (2, 4):
        try:
            wrong += on_ranks(size, compared, sizes, None, timeout=20)
        except Exception as error:
            wrong.append(f"{size} ranks: {error}")
            print(wrong[-1])
    assert not any(wrong), wrong


def cube_mesh():
    """As `sums`, with the links of a DGX-1 given to 8 ranks that share the GPU."""
    quads = [sum(1 << b for b in range(8) if b != a and (b // 4 == a // 4 or b == a ^ 4))
             for a in range(8)]  # fmt: skip
    wrong = on_ranks(8, compared, [8, 4096, 256 << 10], quads, timeout=25)
    assert not any(wrong), wrong


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
        at = [time.monotonic()]
        part = dist.new_group(backend="nccl", timeout=20)
        at.append(time.monotonic())
        part.all_reduce(x)
        at.append(time.monotonic())
        if len(taken) % 2:
            work = part.all_reduce(x, async_op=True)
            part.abort("storm")
            work.exception()
        at.append(time.monotonic())
        dist.destroy_process_group(part)
        at.append(time.monotonic())
        taken.append(at[-1] - at[0])
        if rank == 0:
            parts = zip(("group", "first sum", "abort", "destroy"), at, at[1:], strict=False)
            steps = ", ".join(f"{name} {b - a:.3f}" for name, a, b in parts)
            memory = torch.cuda.mem_get_info()
            print(
                f"round {len(taken)}: {taken[-1]:.3f} s: {steps}; "
                f"{len(os.listdir('/proc/self/fd'))} files, "
                f"{memory[1] - memory[0] >> 20} MiB in use"
            )


def storm():
    """Groups that are made, and every second aborted, one after another."""
    taken, held = on_ranks(2, aborted_groups, 25, timeout=25)[0]
    for name, times in (("destroyed", taken[::2]), ("aborted", taken[1::2])):
        first, last = (statistics.median(each) for each in (times[:10], times[-10:]))
        print(f"{len(times)} {name}: the first ten take {first:.3f} s each, the last {last:.3f} s")
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
        run(under_torch, 2, ranks="processes", args=(folder,), timeout=25)
    print("DDP and FSDP2 on CUDA tensors have the weights of the CPU")


# ---- the table ------------------------------------------------------------------------------


def command_of(name):
    if stage := STAGES[name].pytest:
        return [*PYTEST, *stage]
    # Not as the main module, whose functions other processes cannot import.
    return [sys.executable, "-c", f"from tests.adapters.nccl import gpu_check; gpu_check.{name}()"]


def ended(command, log, limit_s, intra_node=False):
    """Run a stage, which writes into a file; return its result."""
    env = os.environ | {
        "UNISONO_TEST_GPU": "1",
        VARIABLE: str(int(intra_node)),
        # What was printed before an end by force, and where each thread was then.
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    with (
        log.open("wb") as out,
        subprocess.Popen(
            command, env=env, stdout=out, stderr=out, start_new_session=True
        ) as process,
    ):
        try:
            return "passed" if process.wait(limit_s) == 0 else "FAILED"
        except subprocess.TimeoutExpired:
            # It and its ranks.
            os.killpg(process.pid, signal.SIGABRT)
            time.sleep(3)
            os.killpg(process.pid, signal.SIGKILL)
            return f"NOT ENDED in {limit_s:.0f} s"


def facts():
    """Print the versions that a result depends on."""
    import nccl.core
    import torch

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(driver.stdout.strip() or torch.cuda.get_device_name())
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, nccl4py "
          f"{nccl.core.__version__}, NCCL {nccl.core.get_version()}", flush=True)  # fmt: skip


def main(arguments):
    parser = argparse.ArgumentParser(prog="gpu_check")
    parser.add_argument("--logs", type=Path, default=Path("build/gpu-check"))
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    options = parser.parse_args(arguments)
    if unknown := set(options.stages) - set(STAGES):
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    options.logs.mkdir(parents=True, exist_ok=True)
    os.environ["UNISONO_TEST_GPU"] = "1"
    why, begun = why_no_gpu(), time.monotonic()
    print(f"no GPU: {why}" if why else "a GPU is here", flush=True)
    if not why:
        try:
            facts()
        except Exception as error:
            print(f"versions: {error!r}")
    rows, failed = [], False
    for name in options.stages or STAGES:
        stage = STAGES[name]
        left_s = TOTAL_S - (time.monotonic() - begun)
        if (stage.needs_gpu and why) or left_s < 10:
            rows.append((name, 0.0, "needs a GPU" if why else "left out: no time"))
            failed |= not why
            continue
        start, log = time.monotonic(), options.logs / f"{name}.log"
        limit_s = min(stage.limit_s, left_s)
        result = ended(command_of(name), log, limit_s, stage.intra_node)
        rows.append((name, time.monotonic() - start, result))
        failed |= result != "passed"
        # The end of a test's output has its errors; if it passed there is nothing in it.
        shown = 300 if result == "passed" and stage.pytest else _SHOWN
        text = log.read_text(errors="replace").strip()[-shown:]
        print(f"---- {name}: {result}", text, sep="\n", flush=True)
    print(f"\n{'stage':<18}{'seconds':>8}  result, all output is in {options.logs}")
    for name, taken_s, result in rows:
        print(f"{name:<18}{taken_s:>8.1f}  {result}")
    return int(failed)


if __name__ == "__main__":
    # The core of a process with a GPU takes long to write.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.exit(main(sys.argv[1:]))
