"""Measure what the recorder costs: small all_reduces, and steps of data-parallel training.

    unisono run --nproc-per-node 2 benchmarks/recorder.py [ROUNDS]

Groups with and without a recorder take turns in the same processes. A round has a block of calls
on each group. For each kind of call, rank 0 prints the best and the median time without and with
the recorder. The last column is the median over the rounds of the ratio of both.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono.parallel import DistributedDataParallel as UnisonoDDP

# Of each kind. The place of a group in memory changes the time of a small call by some percent.
GROUPS = 4
WIDTH = 512


def small(count: int) -> Callable[[Any], Callable[[], object]]:
    """Return a function from a group to an all_reduce of `count` float64 numbers."""
    data = np.ones(count)
    return lambda group: lambda: unisono.all_reduce(data, unisono.ReduceOp.MAX, group.unisono)


def step(wrap: Callable[[nn.Module, Any], nn.Module]) -> Callable[[Any], Callable[[], object]]:
    """Return a function from a group to a step of training, without the optimizer."""
    x = torch.randn(8, WIDTH)

    def of_group(group: Any) -> Callable[[], object]:
        torch.manual_seed(0)
        model = wrap(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)]), group)

        def run() -> None:
            model.zero_grad(set_to_none=True)
            model(x).sum().backward()

        return run

    return of_group


def block_us(call: Callable[[], object], count: int) -> float:
    """Return the time of a call."""
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count * 1e6


def measure(calls: list[Callable[[], object]], count: int, rounds: int) -> str:
    """Return a row; calls with an odd index are recorded."""
    found: list[tuple[float, float]] = []
    for k in range(-1, rounds):
        times = [0.0] * len(calls)
        for i in range(len(calls))[:: 1 if k % 2 else -1]:
            times[i] = block_us(calls[i], count)
        if k >= 0:  # the first round warms up
            found.append((statistics.median(times[0::2]), statistics.median(times[1::2])))
    off, on = zip(*found, strict=True)
    ratio = statistics.median(recorded / plain for plain, recorded in found)
    columns = [min(off), min(on), statistics.median(off), statistics.median(on)]
    return "".join(f"{value:11.3f}" for value in (*columns, ratio))


def main() -> None:
    """Print the table on rank 0."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    torch.set_num_threads(1)
    torch_dist.init_process_group("unisono")
    groups = []
    for i in range(2 * GROUPS):
        os.environ["UNISONO_TRACE"] = str(i % 2)  # read when a group is made
        groups.append(torch_dist.new_group())
    kinds = {
        "all_reduce, 8 B": (small(1), 1500, GROUPS),
        "all_reduce, 4 KiB": (small(512), 800, GROUPS),
        "DDP step, torch": (step(lambda m, g: DistributedDataParallel(m, process_group=g)), 10, 1),
        "DDP step, unisono": (step(lambda m, g: UnisonoDDP(m, process_group=g.unisono)), 10, 1),
    }
    log = print if torch_dist.get_rank() == 0 else lambda *words: None
    log(f"{'us':20}{'off best':>11}{'on best':>11}{'off':>11}{'on':>11}{'ratio':>11}")
    for name, (make, count, pairs) in kinds.items():
        calls = [make(group) for group in groups[: 2 * pairs]]
        log(f"{name:20}{measure(calls, count, rounds)}")
    torch_dist.destroy_process_group()


if __name__ == "__main__":
    main()
