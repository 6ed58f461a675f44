"""Set-up, memory and waiting: what the native engine promises besides speed.

python benchmarks/limits.py start [--ranks 64] [--on threads|processes]
python benchmarks/limits.py memory [--ranks 8]
python benchmarks/limits.py groups
python benchmarks/limits.py wait
python benchmarks/limits.py large
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import resource
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import unisono as dist
from unisono.testing import run


def start(rank: int, size: int, port: int, answers: Any) -> None:
    """Say how long the world took to come up and pass a barrier, once all processes were there."""
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    store.barrier("all processes are there", size, 600)
    begin = time.monotonic()
    dist.init_process_group(store=dist.PrefixStore("world", store), rank=rank, world_size=size)
    there_s = time.monotonic() - begin
    dist.barrier()
    answers.put((there_s, time.monotonic() - begin))
    store.barrier("all have answered", size, 600)
    dist.destroy_process_group()
    store.close()


def start_all(size: int) -> list[tuple[float, float]]:
    """Start so many processes, with NumPy loaded already; return what each says."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "unisono.groups.lifecycle"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = context.Queue()
    processes = [
        context.Process(target=start, args=(rank, size, store.port, answers))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    told = [answers.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    store.close()
    return told


def mapped_mib() -> float:
    """Return MiB of shared memory files that this process has mapped and that take memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            ours = "memfd:unisono" in line
        elif ours and line.startswith("Pss:"):
            total += int(line.split()[1])
    return total / 1024


def memory(rank: int) -> float:
    """Use everything that takes shared memory; return this rank's share in MiB."""
    p = dist.get_world_size()
    x = np.ones(4 << 20, np.float32)
    for _ in range(3):
        dist.all_reduce(x)
    works = [dist.irecv(np.empty_like(x), r) for r in range(p) if r != rank]
    works += [dist.isend(x, r) for r in range(p) if r != rank]
    for work in works:
        work.wait()
    dist.barrier()
    share = mapped_mib()
    dist.barrier()
    return share


def held() -> dict[str, int]:
    """Return what this process holds."""
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "resident KiB": int(Path("/proc/self/statm").read_text().split()[1]) * 4,
    }


def groups(rank: int, count: int) -> list[dict[str, int]]:
    """Make, use, destroy sub-groups; return what is held after a tenth of them and at the end."""
    found = []
    x = np.ones(8, np.float32)
    for i in range(count):
        group = dist.new_group()
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=group, async_op=True).wait()
        if rank == 0:
            dist.send(x, 1, group)
        elif rank == 1:
            dist.recv(x, 0, group)
        dist.destroy_process_group(group)
        x[:] = 1
        if i + 1 in (count // 10, count):
            dist.barrier()
            found.append(held())
    return found


def wait(rank: int, rounds: int, call: str, fifo: str) -> tuple[float, list[float]]:
    """Return the share of a core that a blocked rank uses, and microseconds until it is awake.

    Args:
        rank: 0 comes a second late; 1 waits for it.
        rounds: How often.
        call: "broadcast", "recv", or "pipe": eight bytes through a named pipe, for comparison.
        fifo: Path of that pipe.
    """
    x, shared = np.zeros(2), []
    pipe = open(fifo, "r+b", buffering=0)  # noqa: SIM115 - until the process ends
    meet = {
        "broadcast": lambda: dist.broadcast(x, 0),
        "recv": lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0),
        "pipe": lambda: pipe.write(x) if rank == 0 else pipe.readinto(x),
    }[call]
    usage = resource.getrusage
    used_s = waited_s = 0.0
    for _ in range(rounds):
        dist.barrier()
        if rank == 0:
            time.sleep(1)
            x[0] = time.monotonic()
            meet()
        else:
            begin, cpu = time.monotonic(), usage(resource.RUSAGE_SELF)
            meet()
            end, after = time.monotonic(), usage(resource.RUSAGE_SELF)
            shared.append((end - x[0]) * 1e6)
            used_s += after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime
            waited_s += end - begin
    return used_s / max(waited_s, 1e-9), shared


def large(rank: int, nbytes: int) -> float:
    """Reduce, broadcast and send an array of more than 4 GiB; return seconds."""
    begin = time.monotonic()
    x = np.full(nbytes, rank + 1, np.uint8)
    dist.all_reduce(x)
    assert x[0] == x[-1] == x[nbytes // 2] == 3, "all_reduce"
    x[-1] = rank
    dist.broadcast(x, 1)
    assert x[-1] == 1, "broadcast"
    if rank == 0:
        x[-1] = 77
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
        assert x[-1] == 77, "send"
    return time.monotonic() - begin


def main() -> None:
    """Run one measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["start", "memory", "groups", "wait", "large"])
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--on", choices=["threads", "processes"], default="processes")
    asked = parser.parse_args()
    if asked.what == "start":
        told = start_all(asked.ranks or 64)
        there, done = (max(each) for each in zip(*told, strict=True))
        print(f"{len(told)} processes: world after {there:.2f} s, through a barrier {done:.2f} s")
    elif asked.what == "memory":
        told = run(memory, asked.ranks or 8, ranks="processes", timeout=120)
        print(f"{len(told)} processes: {sum(told):.1f} MiB of shared memory in all")
    elif asked.what == "groups":
        for first, last in run(groups, 2, ranks=asked.on, args=(1000,), timeout=300):
            print("after 100:", first, "after 1000:", last)
    elif asked.what == "wait":
        with tempfile.TemporaryDirectory() as folder:
            os.mkfifo(fifo := f"{folder}/fifo")
            for call in ("broadcast", "recv", "pipe"):
                args = (10, call, fifo)
                share, woken_us = run(wait, 2, ranks="processes", args=args, timeout=60)[1]
                woken = f"{statistics.median(woken_us):.0f} us ({min(woken_us):.0f} at best)"
                print(f"{call}: {100 * share:.2f} % of a core, woken after {woken}")
    else:
        print(f"{max(run(large, 2, ranks=asked.on, args=(5 << 30,), timeout=600)):.1f} s")


if __name__ == "__main__":
    main()
