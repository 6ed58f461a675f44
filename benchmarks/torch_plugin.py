"""Compare the torch plug-in with Gloo: every operation and size, and steps of DDP.

    python benchmarks/torch_plugin.py [--ops all_reduce,broadcast] [--max-bytes 65536] [--no-ddp]

Both backends run in the same two processes and take turns. Times are medians on rank 0.
The overhead of communication in a step is the step's time less that of the same step without DDP.
It is computed round by round. Each round has some steps of every kind. The program prints the
median and the quartiles of the ratio to Gloo's overhead, for time and for CPU time. The ratio of
CPU time also holds on a machine with other load.

Freed memory stays in the process (see main). With glibc's defaults some kinds of steps return
large gradients to the kernel, which zeroes them again. That takes 20 ms of a step's 60.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono.parallel
import unisono.torch  # registers the backend

RANKS = 2
BACKENDS = ("unisono", "gloo")
SIZES = [8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 64 << 20]

Call = Callable[[], object]


def calls(name: str, nbytes: int, group: dist.ProcessGroup, rank: int) -> Call:
    """Return a call; `nbytes` is the size of its largest tensor on one rank."""
    n = nbytes // 4
    whole, part = torch.ones(n), torch.ones(max(1, n // RANKS))
    whole = whole[: part.numel() * RANKS] if name not in ("all_reduce", "broadcast") else whole
    peer = 1 - rank
    lists = list(whole.chunk(RANKS))

    def send_recv() -> None:
        if rank == 0:
            dist.send(whole, peer, group=group)
            dist.recv(whole, peer, group=group)
        else:
            dist.recv(whole, peer, group=group)
            dist.send(whole, peer, group=group)

    table: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_reduce async": lambda: dist.all_reduce(whole, group=group, async_op=True).wait(),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "reduce": lambda: dist.reduce(whole, 0, group=group),
        "all_gather": lambda: dist.all_gather(lists, part, group=group),
        "all_gather_single": lambda: dist.all_gather_single(whole, part, group=group),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(part, whole, group=group),
        "gather": lambda: dist.gather(part, lists if rank == 0 else None, group=group),
        "scatter": lambda: dist.scatter(part, lists if rank == 0 else None, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(
            torch.empty_like(whole), whole, group=group
        ),
        "send and back": send_recv,
        "barrier": lambda: dist.barrier(group=group),
    }
    return table[name]


OPS = [
    "all_reduce", "all_reduce async", "broadcast", "reduce", "all_gather", "all_gather_single",
    "reduce_scatter_single", "gather", "scatter", "all_to_all_single", "send and back", "barrier",
]  # fmt: skip


def medians(turns: dict[str, Call], budget_s: float, at_least: int = 7) -> dict[str, float]:
    """Return the median time of each call in microseconds; the calls take turns in blocks."""
    times: dict[str, list[float]] = {name: [] for name in turns}
    for call in turns.values():
        begin = time.perf_counter()
        call()
        call()
    once = (time.perf_counter() - begin) / 2
    # All ranks must make as many calls; rank 0's clock decides.
    count = torch.tensor([max(at_least, min(2000, int(budget_s / max(once, 1e-7))))])
    dist.broadcast(count, 0)
    blocks = 7
    for _ in range(blocks):
        for name, call in turns.items():
            for _ in range(max(1, int(count) // blocks)):
                begin = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(found) * 1e6 for name, found in times.items()}


def operations(rank: int, groups: dict[str, dist.ProcessGroup], given: argparse.Namespace) -> None:
    """Print a line for each operation and size, and the mean of all ratios."""
    ratios: list[float] = []
    log = print if rank == 0 else lambda *a, **k: None
    log(f"{'operation':22} {'bytes':>10} {'unisono us':>12} {'gloo us':>12} {'ratio':>7}")
    for name in given.ops:
        for nbytes in SIZES if name != "barrier" else [8]:
            if nbytes > given.max_bytes:
                continue
            turns = {backend: calls(name, nbytes, group, rank) for backend, group in groups.items()}
            found = medians(turns, given.seconds)
            ratio = found["unisono"] / found["gloo"]
            ratios.append(ratio)
            log(
                f"{name:22} {nbytes:10} {found['unisono']:12.1f} {found['gloo']:12.1f} {ratio:7.3f}"
                + ("  slower" if ratio > 1 else ""),
                flush=True,
            )
    if not ratios:
        return
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    log(f"geometric mean of {len(ratios)} ratios: {mean:.3f}")


def perceptron(width: int, layers: int = 8) -> nn.Module:
    """Return the same model on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def step(model: nn.Module, x: torch.Tensor) -> None:
    """Compute the gradients of one step."""
    model.zero_grad(set_to_none=True)
    model(x).sum().backward()


def block(model: nn.Module, x: torch.Tensor, steps: int) -> tuple[float, float]:
    """Return the median time and the mean CPU time of a step, in seconds."""
    dist.barrier()
    times, cpu = [], time.process_time()
    for _ in range(steps):
        begin = time.perf_counter()
        step(model, x)
        times.append(time.perf_counter() - begin)
    return statistics.median(times), (time.process_time() - cpu) / steps


def training(rank: int, groups: dict[str, dist.ProcessGroup], given: argparse.Namespace) -> None:
    """Print the time of a step with each backend and without DDP."""
    for title, width, steps in (("8 x Linear(512)", 512, 40), ("25 M parameters", 1768, 5)):
        x = torch.randn(8, width)
        models: dict[str, nn.Module] = {"alone": perceptron(width)}
        for backend, group in groups.items():
            models[backend] = DistributedDataParallel(perceptron(width), process_group=group)
        models["unisono.parallel"] = unisono.parallel.DistributedDataParallel(
            perceptron(width), process_group=groups["unisono"].unisono
        )
        # The first round warms up.
        rounds = [
            {name: block(model, x, steps) for name, model in models.items()}
            for _ in range(1 + given.rounds)
        ][1:]
        if rank == 0:
            report(title, rounds)


def report(title: str, rounds: list[dict[str, tuple[float, float]]]) -> None:
    """Print medians, and the ratios of overheads."""
    for at, what in enumerate(("time", "CPU time")):
        shown = ", ".join(
            f"{name} {statistics.median(each[name][at] for each in rounds) * 1e3:.2f} ms"
            for name in rounds[0]
        )
        print(f"DDP step, {title}, {what}: {shown}")
        for name in ("unisono", "unisono.parallel"):
            ratios = [
                (each[name][at] - each["alone"][at]) / (each["gloo"][at] - each["alone"][at])
                for each in rounds
            ]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"    overhead of {name} / gloo: {middle:.3f} ({low:.3f} to {high:.3f})", flush=True
            )


def body(rank: int, path: str, given: argparse.Namespace) -> None:
    """Run everything on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("unisono", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    operations(rank, groups, given)
    if given.ddp:
        training(rank, groups, given)
    dist.destroy_process_group()


def main() -> None:
    """Start two ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", type=lambda text: text.split(",") if text else [], default=OPS)
    parser.add_argument("--max-bytes", type=int, default=SIZES[-1])
    parser.add_argument("--seconds", type=float, default=0.3, help="for one figure")
    parser.add_argument("--rounds", type=int, default=11, help="of steps with DDP")
    parser.add_argument("--no-ddp", dest="ddp", action="store_false")
    given = parser.parse_args()
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "MALLOC_MMAP_THRESHOLD_": str(2**32),
        "MALLOC_TRIM_THRESHOLD_": str(2**32),
    }
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(body, (f"{folder}/store", given), RANKS)


if __name__ == "__main__":
    main()
