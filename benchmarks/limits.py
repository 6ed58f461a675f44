"""Measure set-up, memory and waiting: the promises of the native engine besides speed.

Run one measurement from the repository root:

    python benchmarks/limits.py start [--ranks 64] [--on threads|processes]
    python benchmarks/limits.py memory [--ranks 8]
    python benchmarks/limits.py groups
    python benchmarks/limits.py wait
    python benchmarks/limits.py large
    python benchmarks/limits.py sizes [--ranks 2]
    python benchmarks/limits.py many [--ranks 2]
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import importlib
import importlib.util
import mmap
import multiprocessing
import os
import platform
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import unisono as dist
from unisono.testing import run


def start(rank: int, size: int, port: int, answers: Any) -> None:
    """Answer how long the world took to form and to pass a barrier after all processes started."""
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
    """Start `size` processes with NumPy loaded; return the answer of each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "unisono.core.c10d.lifecycle"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = context.Queue()
    processes = [
        context.Process(target=start, args=(rank, size, store.port, answers))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found = [answers.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    store.close()
    return found


def mapped_mib() -> float:
    """Return MiB of memory in the shared memory files that this process has mapped."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            ours = "memfd:unisono" in line
        elif ours and line.startswith("Pss:"):
            total += int(line.split()[1])
    return total / 1024


def memory(rank: int) -> float:
    """Use all operations that take shared memory; return this rank's share in MiB."""
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
    """Return the descriptors, threads, mappings and memory of this process."""
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "resident KiB": int(Path("/proc/self/statm").read_text().split()[1]) * 4,
    }


def groups(rank: int, count: int) -> list[dict[str, int]]:
    """Make, use, destroy sub-groups; return `held()` after a tenth of them and at the end."""
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


class Futex:
    """A word of shared memory on which a process sleeps until another process changes it."""

    def __init__(self, path: str) -> None:
        """Map the file `path`, which both processes open."""
        with open(path, "r+b") as file:
            self.word = ctypes.c_uint32.from_buffer(mmap.mmap(file.fileno(), mmap.PAGESIZE))
        call, at = ctypes.CDLL(None).syscall, ctypes.c_void_p(ctypes.addressof(self.word))
        number = ctypes.c_long({"x86_64": 202, "aarch64": 98}[platform.machine()])
        slice_s = (ctypes.c_long * 2)(0, 20_000_000)
        self._wake = functools.partial(call, number, at, 1, 1, None)
        self._sleep = functools.partial(call, number, at, 0, 0, slice_s)

    def reset(self) -> None:
        """Prepare the next round, while no process sleeps."""
        self.word.value = 0

    def wake(self) -> None:
        """Change the word, and wake the sleeper."""
        self.word.value = 1
        self._wake()

    def sleep(self) -> None:
        """Sleep in slices of 20 ms, as the engine does, until the word has changed."""
        while self.word.value == 0:
            self._sleep()


def wait(rank: int, rounds: int, folder: str) -> dict[str, tuple[float, list[float]]]:
    """Return the share of a core that a blocked rank uses, and microseconds until it is awake.

    The calls take turns, because the machine's speed changes. Two calls show the system's share:
    eight bytes through a named pipe, and the bare system call of a futex.

    Args:
        rank: 0 comes a second late; 1 waits for it.
        rounds: Number of rounds.
        folder: The folder of a pipe `fifo` and a file `word`.
    """
    x, futex = np.zeros(2), Futex(f"{folder}/word")
    pipe = open(f"{folder}/fifo", "r+b", buffering=0)  # noqa: SIM115 - until the process ends
    meets = {
        "broadcast": (functools.partial(dist.broadcast, x, 0),) * 2,
        "recv": (functools.partial(dist.send, x, 1), functools.partial(dist.recv, x, 0)),
        "pipe": (functools.partial(pipe.write, x), functools.partial(pipe.readinto, x)),
        "futex": (futex.wake, futex.sleep),
    }
    usage, late = resource.getrusage, np.zeros(1)
    found: dict[str, list[tuple[float, float, float]]] = {call: [] for call in meets}
    for _ in range(rounds):
        for call, both in meets.items():
            futex.reset()
            dist.barrier()
            if rank == 0:
                time.sleep(1)
            begin, cpu = time.monotonic(), usage(resource.RUSAGE_SELF)
            came = time.monotonic()
            both[rank]()
            end = time.monotonic()
            after = usage(resource.RUSAGE_SELF)
            used_s = after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime
            late[0] = came
            dist.broadcast(late, 0)
            found[call].append((used_s, end - begin, (end - late[0]) * 1e6))
    return {
        call: (sum(row[0] for row in rows) / sum(row[1] for row in rows), [row[2] for row in rows])
        for call, rows in found.items()
    }


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


def sizes(rank: int, count: int, folder: str) -> dict[str, float]:
    """Return microseconds per all_reduce, the median: of one size, of sizes never used before.

    If torch is installed, Gloo takes turns with unisono.
    """
    x = np.ones(1 << 19, np.float32)
    calls: dict[str, Callable[[int], object]] = {"unisono": lambda n: dist.all_reduce(x[:n])}
    if importlib.util.find_spec("torch"):
        torch: Any = importlib.import_module("torch")
        gloo: Any = importlib.import_module("torch.distributed")
        store = gloo.FileStore(f"{folder}/gloo", count)
        gloo.init_process_group("gloo", store=store, rank=rank, world_size=count)
        y = torch.from_numpy(x.copy())
        calls["Gloo"] = lambda n: gloo.all_reduce(y[:n])
    found: dict[str, list[float]] = {}
    for turn in range(300):
        for first in (1000, 300_000):
            for size, what in ((first, "again"), (first + 1 + turn, "new")):
                for library, call in calls.items():
                    dist.barrier()
                    begin = time.perf_counter()
                    call(size)
                    took_us = (time.perf_counter() - begin) * 1e6
                    name = f"{4 * first} B, {what}, {library}"
                    found.setdefault(name, []).append(took_us)
    return {name: statistics.median(took_us) for name, took_us in found.items()}


def many(rank: int) -> dict[str, float]:
    """Hold many calls and groups at once, and set many keys; check every value.

    Returns:
        Seconds for 10,000 calls in flight, 1,000 groups at once, a call on each, and 1,000 keys.
        Also the descriptors and the MiB of memory that the groups hold.
    """
    size, found = dist.get_world_size(), {}
    expected = size * (size + 1) / 2
    rows = np.full((10_000, 2), rank + 1.0)
    begin = time.monotonic()
    works = [dist.all_reduce(row, async_op=True) for row in rows]
    for work in works:
        work.wait()
    found["10,000 calls in flight, s"] = time.monotonic() - begin
    assert (rows == expected).all(), "all_reduce"
    before, begin = held(), time.monotonic()
    groups = [dist.new_group() for _ in range(1000)]
    found["1,000 groups made, s"] = time.monotonic() - begin
    begin = time.monotonic()
    for number, group in enumerate(groups):
        x = np.full(2, rank + 1.0 + number)
        dist.all_reduce(x, group=group)
        assert (x == expected + size * number).all(), f"group {number}"
    found["a call on each group, s"] = time.monotonic() - begin
    after = held()
    found["descriptors of 1,000 groups"] = after["descriptors"] - before["descriptors"]
    found["memory of 1,000 groups, MiB"] = (after["resident KiB"] - before["resident KiB"]) / 1024
    for group in groups:
        dist.destroy_process_group(group)
    store = dist.PrefixStore(f"many/{rank}", dist.group.WORLD.store)
    begin = time.monotonic()
    for number in range(1000):
        store.set(str(number), str(rank + number))
    found["1,000 keys set, s"] = time.monotonic() - begin
    assert all(store.get(str(number)) == str(rank + number).encode() for number in range(1000))
    dist.barrier()
    return found


def main() -> None:
    """Run one measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "what", choices=["start", "memory", "groups", "wait", "large", "sizes", "many"]
    )
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--on", choices=["threads", "processes"], default="processes")
    asked = parser.parse_args()
    if asked.what == "start":
        answers = start_all(asked.ranks or 64)
        there, done = (max(each) for each in zip(*answers, strict=True))
        print(
            f"{len(answers)} processes: world after {there:.2f} s, through a barrier {done:.2f} s"
        )
    elif asked.what == "memory":
        shares = run(memory, asked.ranks or 8, ranks="processes", timeout=120)
        print(f"{len(shares)} processes: {sum(shares):.1f} MiB of shared memory in all")
    elif asked.what == "groups":
        for first, last in run(groups, 2, ranks=asked.on, args=(1000,), timeout=300):
            print("after 100:", first, "after 1000:", last)
    elif asked.what == "wait":
        with tempfile.TemporaryDirectory() as folder:
            os.mkfifo(f"{folder}/fifo")
            Path(f"{folder}/word").write_bytes(bytes(mmap.PAGESIZE))
            found = run(wait, 2, ranks="processes", args=(10, folder), timeout=120)[1]
        for call, (share, woken_us) in found.items():
            woken = f"{statistics.median(woken_us):.0f} us ({min(woken_us):.0f} at best)"
            print(f"{call}: {100 * share:.2f} % of a core, woken after {woken}")
    elif asked.what == "many":
        for rank, limits in enumerate(run(many, asked.ranks or 2, ranks="processes", timeout=300)):
            print(f"rank {rank}:", ", ".join(f"{what} {n:.3g}" for what, n in limits.items()))
    elif asked.what == "sizes":
        count = asked.ranks or 2
        with tempfile.TemporaryDirectory() as folder:
            found = run(sizes, count, ranks="processes", args=(count, folder), timeout=120)[0]
        for name, took_us in found.items():
            print(f"{name}: {took_us:.1f} us")
    else:
        print(f"{max(run(large, 2, ranks=asked.on, args=(5 << 30,), timeout=600)):.1f} s")


if __name__ == "__main__":
    main()
