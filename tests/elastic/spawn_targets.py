"""Functions for the children of `spawn`; a module of its own, so that they load little."""

import json
import os
import signal
import subprocess
import sys

CHILD = [sys.executable, "-S", "-c", "import signal; signal.pause()"]


def write_environment(rank, folder):
    (folder / f"{rank}.json").write_text(json.dumps(dict(os.environ)))


def meet_in_store(rank, folder):
    from unisono.stores import TCPStore

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    world_size = int(os.environ["WORLD_SIZE"])
    store.set(f"rank{rank}", str(rank))
    found = [store.get(f"rank{r}").decode() for r in range(world_size)]
    (folder / str(rank)).write_text(" ".join(found))
    store.close()


def fail_on_rank_1(rank, kind):
    if rank == 1:
        if kind == "raise":
            raise ValueError("boom " + "x" * 200_000)
        if kind == "exit":
            sys.exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def lose_a_peer(rank, fifo):
    """Rank 0 reports a lost peer and is gone before rank 1, the cause, says a word."""
    from unisono.errors import PeerLostError

    if rank == 0:
        open(fifo, "w")
        raise PeerLostError("rank 1 is gone")
    if rank == 1:
        with open(fifo) as pipe:
            pipe.read()
        raise ValueError("the cause")
    signal.pause()


def wait_for_release(rank, fifo):
    with open(fifo) as pipe:
        pipe.read()


def announce_and_wait(rank):
    print(os.getpid(), flush=True)
    signal.pause()


def fork_a_grandchild_and_die(rank, fifo):
    """The grandchild holds every inherited descriptor open until the fifo's writer is gone."""
    if os.fork() == 0:
        with open(fifo) as pipe:
            pipe.read()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
