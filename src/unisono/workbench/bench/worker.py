"""One rank of `unisono bench`: all libraries run in one process, on the same arrays, in turn.

Per size every library is first checked, then timed in rounds. In a round each library makes its
warm-up calls, then a barrier, then `iters` calls in a loop. The next round begins with the next
library. A round's time is the mean of the loop on the slowest rank. The reported time is the median
over rounds.

A process can load only one MPI library. With several there is a set of ranks for each, and the sets
take turns: while one measures a round, the ranks of the others sleep.

Other load of the machine thus affects all libraries, but not equally: a library that waits by
spinning loses more than a library that sleeps.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import unisono
from unisono.core.base import document
from unisono.core.platform.machine import allowed_cpus, bind, by_core
from unisono.core.platform.processes import parent_death_hook
from unisono.core.stores import TCPStore
from unisono.launcher.environment import LOOPBACK
from unisono.workbench.bench.data import Data, GPUData
from unisono.workbench.bench.libraries import (
    BenchLibrary,
    TimedCall,
    mpi_rank,
    no_garbage_collection,
    open_library,
    slowest,
)
from unisono.workbench.bench.plan import COPY, OPS, BenchPlan, Case, cases

QUEUE = "bench/messages"
"""Key of the queue in the store into which the ranks push JSON for the command."""

TURN = "bench/turn"
"""Prefix of the queues of the sets of ranks; a value in a queue is that set's turn to measure."""

ROUND_S = 0.005
"""Duration of one library's loop in one round, if `iters` is 0.

It is short, so that on a busy machine other processes do not disturb all rounds.
"""

MAX_ITERS = 10_000

TRIES = 3


def work(rank: int, plan: BenchPlan, port: int, host: str = LOOPBACK) -> None:
    """Measure all cases; rank 0 sends the results to the store at `host` and `port`.

    The standard output of the process is redirected to /dev/null, because Gloo writes there.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    store = TCPStore(host, port, wait_for_workers=False, timeout=plan.loop.timeout_s)
    if plan.loop.bind:
        cores = by_core(sorted(allowed_cpus()))
        bind(cores[rank % len(cores)])
    if plan.device == "cuda":
        torch = _torch()
        torch.cuda.set_device(rank % torch.cuda.device_count())
    libraries = [open_library(name, rank, plan, store) for name in ("unisono", *plan.peers)]
    ranks = _BenchRank(rank, plan, store, libraries)
    ranks.send("start", versions=ranks.versions(), group=repr(unisono.group.WORLD))
    with ranks.turn():
        pass  # All sets have loaded their libraries.
    for op in plan.ops:
        for variant in plan.variants(op):
            for case in cases(op, variant):
                ranks.send("row", **ranks.measure(case, variant))
    with ranks.turn():
        pass  # All sets have measured their last round.
    for library in libraries:
        library.close()
    store.close()


@dataclass
class _Ready:
    """A library that can run the case, and its call."""

    name: str
    call: TimedCall
    wrong: int | None
    iters: int = 1


class _BenchRank:
    """This rank: its libraries, and the store of all ranks."""

    def __init__(
        self, rank: int, plan: BenchPlan, store: TCPStore, libraries: list[BenchLibrary]
    ) -> None:
        self._rank, self._plan, self._store = rank, plan, store
        self._libraries = libraries
        self._notes: set[str] = set()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message to the command, from rank 0."""
        if self._rank == 0:
            self._store.queue_push(
                QUEUE, json.dumps({"kind": kind, "world": self._plan.loop.turn[0], **fields})
            )

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other set of ranks measures; the others wait until the block has ended."""
        mine, count = self._plan.loop.turn
        if self._rank == 0:
            self._store.queue_pop(f"{TURN}/{mine}")
        unisono.barrier()
        yield
        unisono.barrier()
        if self._rank == 0:
            self._store.queue_push(f"{TURN}/{(mine + 1) % count}", "")

    def versions(self) -> dict[str, str]:
        """Return the names and versions of all libraries."""
        return {k: v for library in self._libraries for k, v in library.versions().items()}

    def measure(self, case: Case, plan: BenchPlan) -> dict[str, Any]:
        """Measure a case; return its row with times and wrong elements per library.

        Args:
            case: Operation and size.
            plan: The plan with the type and the reduce op of the case.
        """
        op = OPS[case.op]
        on_gpu = plan.device == "cuda"
        mine = case, plan, self._rank
        with self.turn():
            data = GPUData(*mine, _torch()) if on_gpu else Data(*mine)
            ready = [r for library in self._libraries if (r := self._prepare(library, data))]
            data.fill_for_timing()
            for library in ready:
                library.iters = plan.loop.iters or self._calibrate(library.call, data)
        times_us = self._times_us(ready, data) / op.messages
        results: dict[str, Any] = {library.name: None for library in self._libraries}
        for i, library in enumerate(ready):
            results[library.name] = {
                "time_us": float(np.median(times_us[:, i])),
                "best_us": float(np.min(times_us[:, i])),
                "rounds_us": [round(float(t), 4) for t in times_us[:, i]],
                "iters": library.iters,
                "wrong": library.wrong,
            }
        return {
            "op": case.op,
            "size_bytes": case.nbytes,
            "count": case.count,
            "dtype": plan.dtype if case.op != "barrier" else "none",
            "redop": plan.redop if op.reduces else "none",
            "root": plan.root if op.rooted else -1,
            "ranks": plan.nprocs,
            "results": results,
        }

    def _prepare(self, library: BenchLibrary, data: Data) -> _Ready | None:
        """Make and check the call of a library; return None if the library cannot do it.

        A peer that fails is left out of the row, with a note. An error of unisono ends the run.
        """
        own = library.name == "unisono"
        problem = ""
        data.fill_for_check()
        unisono.barrier()
        try:
            call = library.call(data)
            call()
            data.end()
        except Exception as error:
            if own:
                raise
            problem = f"{library.name} cannot do {data.case.op}: {str(error).splitlines()[0]}"
        # If a library fails on one rank, all ranks must leave it out.
        if self._total(bool(problem)):
            self._note(problem or f"{library.name} fails on another rank in {data.case.op}")
            return None
        checks = self._plan.loop.check and library.name != COPY
        wrong = self._total(data.count_wrong()) if checks else None
        if wrong and not own:
            self._note(f"{library.name}: {wrong} WRONG elements, first in {data.case.op}")
        return _Ready(library.name, call, wrong)

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            self.send("note", text=text)

    def _total(self, number: int) -> int:
        total = np.array([number], np.int64)
        unisono.all_reduce(total)
        return int(total[0])

    def _calibrate(self, call: TimedCall, data: Data) -> int:
        """Return the number of calls that take about `ROUND_S`, equal on all ranks."""

        def loop_s(iters: int) -> float:
            unisono.barrier()
            return float(slowest([_timed_s(call, iters, data)])[0])

        return calibrated(loop_s)

    def _times_us(self, ready: list[_Ready], data: Data) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return [rounds, libraries]: the time of one call on the slowest rank."""
        rounds, count = self._plan.loop.rounds, len(ready)
        own = np.zeros((rounds, count))
        for number in range(rounds):
            with self.turn(), no_garbage_collection():
                for i in (i % count for i in range(number, number + count)):
                    library = ready[i]
                    unisono.barrier()
                    _timed_s(library.call, self._plan.loop.warmup, data)
                    unisono.barrier()
                    own[number, i] = _timed_s(library.call, library.iters, data) / library.iters
        return slowest(own) * 1e6


def calibrated(loop_s: Callable[[int], float]) -> int:
    """Return the number of calls that take about `ROUND_S`.

    Every loop runs `TRIES` times, and the fastest counts. Some calls take many times as long as
    others: the first after another library's call, and calls that another process disturbs.

    Args:
        loop_s: Function that makes the given number of calls and returns their time in seconds.
    """
    iters = 1
    while True:
        elapsed_s = max(min(loop_s(iters) for _ in range(TRIES)), 1e-7)
        if elapsed_s > ROUND_S / 4 or iters == MAX_ITERS:
            return max(1, min(MAX_ITERS, round(iters * ROUND_S / elapsed_s)))
        iters = min(MAX_ITERS, iters * max(2, min(20, round(ROUND_S / 2 / elapsed_s))))


def _torch() -> Any:
    # By name, because only benchmarks on a GPU need torch.
    return importlib.import_module("torch")


def _timed_s(call: TimedCall, iters: int, data: Data) -> float:
    start_s = time.perf_counter()
    for _ in itertools.repeat(None, iters):
        call()
    data.end()
    return time.perf_counter() - start_s


def worker_command(plan: BenchPlan, port: int, host: str, rank: int | None = None) -> list[str]:
    """Return the command line of a process that calls `work`; without `rank` MPI gives the rank."""
    words = [sys.executable, "-m", __name__, document.dumps(plan), str(port), host]
    return words if rank is None else [*words, str(rank)]


def _main() -> None:
    # This process dies with mpiexec's helper, that with mpiexec, and that with the command.
    parent_death_hook()()
    plan = document.loads(BenchPlan, sys.argv[1])
    port, host = int(sys.argv[2]), sys.argv[3]
    rank = int(sys.argv[4]) if len(sys.argv) > 4 else -1
    try:
        rank = mpi_rank(plan) if rank < 0 else rank
        work(rank, plan, port, host)
    except Exception:
        store = TCPStore(host, port, wait_for_workers=False, timeout=5.0)
        text = traceback.format_exc().rstrip()
        store.queue_push(QUEUE, json.dumps({"kind": "failure", "rank": rank, "text": text}))
        # MPI's finalization would wait for ranks that are still in a call.
        os._exit(1)


if __name__ == "__main__":
    _main()
