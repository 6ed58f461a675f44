"""Ranks that are killed, stopped, late, or close their window at a random moment of random calls.

`python -m tests.faults.window_chaos 100` runs so many rounds over each medium, and says how long
after the end of one rank the last of the others had its error; the tests run a few.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import unisono as dist
from tests.faults.chaos import LATE_S
from unisono.errors import CollectiveTimeoutError, PeerLostError
from unisono.testing import run

WAYS = {
    "kill": PeerLostError,
    "stop": CollectiveTimeoutError,
    "late": CollectiveTimeoutError,
    "close": PeerLostError,
}
MEDIA = {
    "shared memory": ("native", "1"),
    "messages": ("native", "0"),
    "messages in Python": ("reference", "1"),
}
"""Engine, and UNISONO_SHARED_MEMORY."""
SIZES = [1, 100, 20_000]
TIMEOUT_S = 1.5


def random_calls(rank, folder, seed, way, victim):
    """Make random calls, each with a check, until the end of one rank ends them all."""
    window = dist.new_window(np.zeros((dist.get_world_size(), max(SIZES)), np.int64))
    cells = dist.new_window(np.zeros(8, np.int64))
    dist.barrier()
    dist.group.WORLD.set_timeout(TIMEOUT_S if way in ("stop", "late") else 60)
    ends = threading.Event()
    if rank == victim:
        delay_s = float(np.random.default_rng((seed, 1)).exponential(0.02))
        threading.Timer(delay_s, _end, (folder, way, ends)).start()
    shared, number = np.random.default_rng(seed), 0
    while not ends.is_set():
        number += 1
        try:
            _one_call(rank, window, cells, shared, number)
        except (PeerLostError, CollectiveTimeoutError) as error:
            at_s = time.monotonic()
            Path(folder, f"told by {rank}").touch()
            return type(error).__name__, error.context.peers, at_s, str(error)
    if way == "close":
        window.close()
        cells.close()
    _wait_for_all(folder, dist.get_world_size() - 1)
    return None


def _end(folder, way, ends):
    Path(folder, "ended_s").write_text(repr(time.monotonic()))
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way != "stop":
        ends.set()
        return
    others = int(os.environ.get("WINDOW_CHAOS_OTHERS", "1"))
    if not os.fork():
        # Whoever stopped cannot end itself; the parent of both sees to nothing.
        _wait_for_all(folder, others)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def _wait_for_all(folder, others):
    limit_s = time.monotonic() + TIMEOUT_S + LATE_S
    while len(list(Path(folder).glob("told by *"))) < others and time.monotonic() < limit_s:
        time.sleep(0.01)


def _one_call(rank, window, cells, shared, number):
    p = dist.get_world_size()
    kind, n, owner = int(shared.integers(4)), int(shared.choice(SIZES)), int(shared.integers(p))
    shift = 1 + int(shared.integers(p - 1))
    to, source = (rank + shift) % p, (rank - shift) % p
    if kind == 0:
        window.put(np.full(n, number), to, rank * max(SIZES))
        window.signal(to)
        window.wait_signal(source)
        assert (window.local[source, :n] == number).all(), number
        window.signal(source)
        window.wait_signal(to)
    elif kind == 1:
        before = cells.fetch_add(1, owner)
        assert cells.fetch_add(1, owner) > before, number
    elif kind == 2:
        # Its own cell: no other rank changes it.
        mine, seen = np.array([number]), np.zeros(1, np.int64)
        cells.put(mine, to, 1 + rank)
        cells.accumulate(mine, to, offset=1 + rank)
        cells.get(seen, to, 1 + rank)
        assert seen[0] == 2 * number, number
        assert cells.compare_and_swap(2 * number, 0, to, 1 + rank) == 2 * number
    else:
        cells.flush()
        window.flush()


def one_round(folder, seed, way, medium):
    """Run one world to its end and check what each rank says; return how late the last one was."""
    size = 2 + seed % 3
    victim = seed // 3 % size
    dead = {victim} if way in ("kill", "stop") else set()
    engine, shares = MEDIA[medium]
    os.environ |= {"UNISONO_SHARED_MEMORY": shares, "WINDOW_CHAOS_OTHERS": str(size - 1)}
    words = str(folder), seed, way, victim
    results = run(random_calls, size, ranks="processes", engine=engine, args=words, dead=dead)
    ended_s = float(Path(folder, "ended_s").read_text())
    told = [(rank, *result) for rank, result in enumerate(results) if rank != victim]
    limit_s = LATE_S + (TIMEOUT_S if way in ("stop", "late") else 0)
    gone = {victim}
    for rank, kind, peers, at_s, text in sorted(told, key=lambda each: each[3]):
        where = (seed, way, medium, rank, kind, peers, at_s - ended_s, text)
        assert kind in (WAYS[way].__name__, "PeerLostError"), where
        # A rank that waits for one that waits for the victim names the former.
        assert peers, where
        assert rank not in peers, where
        assert way in ("stop", "late") or gone.issuperset(peers), where
        assert at_s - ended_s < limit_s, where
        gone.add(rank)
    assert any(victim in peers for _, _, peers, _, _ in told), (seed, way, medium, told)
    return max(at_s for _, _, _, at_s, _ in told) - ended_s


if __name__ == "__main__":
    import statistics
    import tempfile

    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for this in MEDIA:
        late_s = {each: [] for each in WAYS}
        for each in range(first, first + int(sys.argv[1])):
            chosen = list(WAYS)[each % 4]
            with tempfile.TemporaryDirectory() as place:
                late_s[chosen].append(one_round(place, each, chosen, this))
        for chosen, found in late_s.items():
            if found:
                middle, worst = statistics.median(found), max(found)
                count = len(found)
                print(f"{this}, {chosen}: {count} rounds, {middle:.3f} s, at most {worst:.3f} s")
