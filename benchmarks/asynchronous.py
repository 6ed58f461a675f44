"""Measure asynchronous calls: what issuing one costs its thread, and a call with its wait.

    python benchmarks/asynchronous.py [--calls 4000] [--rounds 9]

Two processes make the calls, and unisono's own API, the torch plug-in and Gloo take turns. "issue"
is the CPU time of the issuing thread per call, with `--calls` calls in flight. "all_reduce and
wait" is the time of a call of 8 bytes with its wait, then the CPU time of its thread. All figures
are medians over the rounds on rank 0, in microseconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import unisono
import unisono.torch  # registers the backend

RANKS = 2


def issuers(groups: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return a function per way that issues one reduce and returns its work."""
    own = groups["unisono"].unisono
    array, tensor = np.ones(2, np.float32), torch.ones(2)
    ways: dict[str, Callable[[], Any]] = {
        "unisono": lambda: unisono.reduce(array, 0, group=own, async_op=True)
    }
    for name, group in groups.items():
        title = "plug-in" if name == "unisono" else name
        ways[title] = partial(dist.reduce, tensor, 0, group=group, async_op=True)
    return ways


def watched(issue: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that issues one call and returns its future."""
    return lambda: issue().get_future()


def waited_for(issue: Callable[[], Any]) -> None:
    """Make one call and wait for it."""
    issue().wait()


def in_flight(issue: Callable[[], Any], count: int) -> float:
    """Return the CPU time per call of this thread, while all calls are in flight."""
    begin = time.thread_time()
    works = [issue() for _ in range(count)]
    took = time.thread_time() - begin
    for work in works:
        work.wait()
    return took / count


def one_by_one(call: Callable[[], Any], count: int) -> tuple[float, float]:
    """Return the time and the CPU time of this thread, per call with its wait."""
    begin, cpu = time.perf_counter(), time.thread_time()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count, (time.thread_time() - cpu) / count


def waits(groups: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return a function per way that makes one all_reduce of 8 bytes and waits."""
    own = groups["unisono"].unisono
    array, tensor = np.ones(2, np.float32), torch.ones(2)
    ways: dict[str, Callable[[], Any]] = {
        "unisono": lambda: unisono.all_reduce(array, group=own, async_op=True).wait()
    }
    for name, group in groups.items():
        title = "plug-in" if name == "unisono" else name
        call = partial(dist.all_reduce, tensor, group=group, async_op=True)
        ways[title] = partial(waited_for, call)
    return ways


def body(rank: int, path: str, given: argparse.Namespace) -> None:
    """Run everything on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("unisono", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    groups = {name: dist.new_group(backend=name) for name in ("unisono", "gloo")}
    issued: dict[str, list[float]] = {}
    waited: dict[str, list[tuple[float, float]]] = {}
    for at in range(1 + given.rounds):
        for name, issue in issuers(groups).items():
            for title, way in ((name, issue), (f"{name} with get_future", watched(issue))):
                dist.barrier()
                issued.setdefault(title, []).append(in_flight(way, given.calls if at else 64))
        for name, call in waits(groups).items():
            dist.barrier()
            waited.setdefault(name, []).append(one_by_one(call, given.calls // 4 if at else 64))
    dist.barrier()
    if rank == 0:
        # The first round warms up.
        for name, found in issued.items():
            print(f"issue {name:26} {statistics.median(found[1:]) * 1e6:7.1f}")
        for name, pairs in waited.items():
            wall, cpu = (statistics.median(each[i] for each in pairs[1:]) * 1e6 for i in (0, 1))
            print(f"all_reduce and wait {name:12} {wall:7.1f} {cpu:7.1f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start two ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=4000, help="in flight")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(body, (f"{folder}/store", given), RANKS)


if __name__ == "__main__":
    main()
