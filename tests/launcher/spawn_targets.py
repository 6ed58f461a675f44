"""Functions for the children of `spawn`; a module of its own, so that they load little."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time


def meet(rank, folder):
    """Write down the environment, and what the ranks put into the parent's store."""
    from unisono.core.stores import TCPStore

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set(f"rank{rank}", str(rank))
    found = [store.get(f"rank{r}").decode() for r in range(int(os.environ["WORLD_SIZE"]))]
    store.close()
    (folder / f"{rank}.json").write_text(json.dumps([dict(os.environ), found]))


def fail_on_rank_1(rank, kind):
    if rank == 1:
        if kind == "raise":
            raise ValueError("boom " + "x" * 200_000)
        if kind == "cancel":
            raise asyncio.CancelledError("boom")
        if kind == "exit":
            sys.exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def outlive_rank_1(rank, fifo):
    """Rank 0 fails once the parent knows that rank 1 has ended well."""
    if rank == 1:
        with open(fifo, "w") as pipe:
            pipe.write(str(os.getpid()))
        return
    with open(fifo) as pipe:
        pid = int(pipe.read())
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            time.sleep(0.001)
    raise ValueError("alone")


def wait_for_release(rank, fifo):
    with open(fifo) as pipe:
        pipe.read()


def announce_and_wait(rank):
    # print() may write the line end apart, after another rank's number.
    os.write(1, f"{os.getpid()}\n".encode())
    signal.pause()


def fork_a_grandchild_and_die(rank, fifo):
    """Leave a grandchild that holds every inherited descriptor open; write down its number."""
    grandchild = os.fork()
    if grandchild == 0:
        signal.alarm(60)
        signal.pause()
    with open(fifo, "w") as pipe:
        pipe.write(f"{grandchild}\n")
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_a_signal(rank):
    signal.pause()


def fail_or_wait(rank, fifo):
    if rank == 1:
        sys.exit(3)
    wait_for_release(rank, fifo)


def fail_or_stay(rank, fifo):
    """Rank 1 fails when rank 0 does not end at SIGTERM any more."""
    if rank == 1:
        with open(fifo) as pipe:
            pipe.read()
        sys.exit(3)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(fifo, "w"):
        pass
    while True:
        signal.pause()
