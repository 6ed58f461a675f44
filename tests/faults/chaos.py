"""Ranks that are killed, stopped or aborted at a random moment: no hang, no wrong number.

`python -m tests.faults.chaos 200` runs so many rounds, and says how long after the end of one rank
the last of the others had its error; the tests run a few.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import unisono as dist
from tests.support.operations import Operations
from unisono.errors import CollectiveAbortedError, CollectiveTimeoutError, PeerLostError
from unisono.testing import run

ENDS = {"kill": PeerLostError, "stop": CollectiveTimeoutError, "abort": CollectiveAbortedError}
CALLS = ["all_reduce", "broadcast", "all_gather", "reduce_scatter_tensor", "all_to_all_single"]
SIZES = [1, 500, 200_000, 800_000]
"""Of arrays, in numbers of 8 bytes. NumPy puts the last into huge pages, if there are any."""
TIMEOUT_S = 3.0
LATE_S = 15.0
"""What a busy machine may add to the time that a survivor takes to end."""


def random_work(rank, folder, seed, way, victim):
    """Make random calls, each with a check, until the end of one rank ends them all."""
    shared, p = np.random.default_rng(seed), dist.get_world_size()
    dist.group.WORLD.set_timeout(TIMEOUT_S if way == "stop" else 60)
    calls = 0
    try:
        dist.barrier()
        if rank == victim:
            delay_s = float(np.random.default_rng((seed, 1)).exponential(0.01))
            threading.Timer(delay_s, _end, (folder, way, p - 1)).start()
        while True:
            calls += 1
            kind, n = int(shared.integers(8)), int(shared.choice(SIZES))
            _one_call(rank, p, kind, n, calls)
    except AssertionError:
        raise
    except Exception as error:
        at_s = time.monotonic()
        Path(folder, f"told by {rank}").touch()
        return type(error).__name__, error.context.peers, at_s, calls


def _end(folder, way, others):
    Path(folder, "ended_s").write_text(repr(time.monotonic()))
    if way == "abort":
        dist.group.WORLD.abort("chaos")
        return
    if way == "stop" and not os.fork():
        # Whoever stopped cannot end itself; the parent of both sees to nothing.
        limit_s = time.monotonic() + TIMEOUT_S + LATE_S
        while len(list(Path(folder).glob("told by *"))) < others and time.monotonic() < limit_s:
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL if way == "kill" else signal.SIGSTOP)


def _one_call(rank, p, kind, n, k):
    right, left = (rank + 1) % p, (rank - 1) % p
    if kind < len(CALLS):
        calls = Operations(rank, p, n, k % p, shift=k)
        if CALLS[kind] == "all_to_all_single":
            calls.uneven = [n + r for r in range(p)]
        getattr(calls, CALLS[kind])()
        calls.check(kind, n, k)
        return
    x, y = np.full(n, rank + k), np.zeros(n, int)
    if kind == 5:
        works = [dist.irecv(y, left), dist.isend(x, right)]
        for work in works:
            work.wait()
        assert (y == left + k).all()
    elif kind == 6:
        dist.send(x, right, tag=k)
        dist.recv(y, left, tag=k)
        assert (y == left + k).all()
    else:
        arrays = [np.full(n, rank + k + i) for i in range(3)]
        works = [dist.all_reduce(x, async_op=True) for x in arrays]
        for i, work in enumerate(works):
            work.wait()
            assert (arrays[i] == sum(range(p)) + p * (k + i)).all()


def one_round(folder, seed, way):
    """Run one world to its end and check what each rank says; return how late the last one was."""
    size = 2 + seed % 3
    victim = seed // 3 % size
    dead = set() if way == "abort" else {victim}
    results = run(
        random_work, size, ranks="processes", args=(str(folder), seed, way, victim), dead=dead
    )
    ended_s = float(Path(folder, "ended_s").read_text())
    told = [(rank, *result) for rank, result in enumerate(results) if rank not in dead]
    limit_s = LATE_S + (TIMEOUT_S if way == "stop" else 0)
    # A receive does not hear of third ranks: it blames its sender, who ended because of the victim.
    gone = {victim}
    for rank, kind, peers, at_s, calls in sorted(told, key=lambda each: each[3]):
        where = (seed, way, rank, kind, peers, at_s - ended_s, calls)
        assert kind in (ENDS[way].__name__, "PeerLostError"), where
        assert way == "stop" or gone.issuperset(peers), where
        assert at_s - ended_s < limit_s, where
        gone.add(rank)
    # A rank that is a call further may blame those, too, whom the stopped one keeps in the last.
    blamed = [set(peers) for _, _, peers, _, _ in told]
    assert any(victim in peers if way == "stop" else peers == {victim} for peers in blamed), told
    return max(at_s for _, _, _, at_s, _ in told) - ended_s


if __name__ == "__main__":
    import statistics
    import tempfile

    late_s = {each: [] for each in ENDS}
    for number in range(int(sys.argv[1])):
        this = list(ENDS)[number % 3]
        with tempfile.TemporaryDirectory() as place:
            late_s[this].append(one_round(place, number, this))
        print(number, end=" ", flush=True)
    for this, found in late_s.items():
        print(f"\n{this}: {statistics.median(found):.3f} s, at most {max(found):.3f} s", end="")
    print()
