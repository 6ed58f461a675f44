"""Ranks that are killed, stopped, or forked."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np

import unisono as dist
from tests.faults.fault_calls import (
    COLLECTIVES,
    attempt,
    attempt_async,
    attempt_at_once,
    groups_for,
    pids,
    store,
)
from unisono.base.completion import Completion

ANY_SOURCE = "recv from any"
RECV = "recv"


def die(folder):
    """Write down the time and be killed."""
    Path(folder, "died_s").write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def kill_while_all_wait(rank, folder, victim, mode, members=None):
    """Kill a rank that never came while the others wait in every operation there is."""
    names = [*COLLECTIVES, RECV, ANY_SOURCE]
    groups = groups_for(names, members, 60.0)
    waiting = [r for r in members or range(dist.get_world_size()) if r != victim]
    dist.barrier()
    if rank == victim:
        store().wait([f"waiting/{r}" for r in waiting], 60.0)
        die(folder)
    if rank not in waiting:
        wait_for_count("heard", len(waiting))
        return None
    calls = {n: (lambda n=n, **how: COLLECTIVES[n](groups[n], **how)) for n in COLLECTIVES}
    source = groups[RECV].group_rank(victim)
    box = np.zeros(2)
    calls[RECV] = lambda **how: groups[RECV].recv(box, source, **how)
    calls[ANY_SOURCE] = lambda **how: groups[ANY_SOURCE].recv(box, None, **how)
    run = attempt_async if mode == "async" else attempt_at_once
    results = run(calls, lambda: store().set(f"waiting/{rank}", "yes"))
    results["again"] = attempt(calls["all_reduce"])
    results["on a fresh group"] = attempt(dist.barrier)
    # A rank that leaves is lost as well; first let everybody hear of the one that was killed.
    store().add("heard", 1)
    wait_for_count("heard", len(waiting))
    return results


class Doom:
    """Kills or stops this process at the n-th thing that happens in it.

    What counts: beginning to wait for a transfer, the end of one, and every piece of a message
    that a socket takes or gives. So the end comes before, between or inside messages.
    """

    def __init__(self, count, act):
        self._left = count
        self._lock = threading.Lock()
        self._act = act
        import socket

        for cls, name in [
            (Completion, "finish"),
            (Completion, "wait_until"),
            (socket.socket, "sendmsg"),
            (socket.socket, "recv_into"),
        ]:
            self._wrap(cls, name)

    def _wrap(self, cls, name):
        inner = getattr(cls, name)

        def counted(*args, **how):
            self._tick()
            return inner(*args, **how)

        setattr(cls, name, counted)

    def call_off(self):
        """Let it live, if it does still."""
        with self._lock:
            self._left = 0

    def _tick(self):
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._act()


def kill_inside(rank, folder, victim, moment, count):
    """Kill a rank in the middle of large async all_reduces; return the first failure."""
    world_size = dist.get_world_size()
    want = np.full(count, world_size * (world_size + 1) / 2)
    dist.barrier()
    if rank == victim:
        Doom(moment, lambda: die(folder))
    right = True
    while right:
        x = np.full(count, rank + 1.0)
        caught = attempt(lambda x=x: dist.all_reduce(x, async_op=True).wait())
        if caught.kind:
            break
        right = np.array_equal(x, want)
    after = attempt(dist.barrier)
    store().add("heard", 1)
    wait_for_count("heard", world_size - 1)
    return caught, right, after


def chaos(rank, folder, seed):
    """Lose one rank after another at random moments; the others go on without it."""
    rng = random.Random(seed)
    members = list(range(dist.get_world_size()))
    told = []
    while len(members) > 1:
        victim, moment, count = rng.choice(members), rng.randrange(1, 120), rng.randrange(1, 60_000)
        order = [rng.choice(["all_reduce", "broadcast", "all_gather"]) for _ in range(7)]
        group = dist.new_group(members, timeout=60.0, use_local_synchronization=True)
        if rank == victim:
            Doom(moment, lambda: os.kill(os.getpid(), signal.SIGKILL))
        right, caught = until_it_fails(group, members, order, count)
        told.append((victim, members, right, caught))
        members = [member for member in members if member != victim]
    return told


def until_it_fails(group, members, order, count):
    """Make calls until one fails; return whether every number was right, and the failure."""
    for turn in range(10_000):
        op = order[turn % len(order)]
        mine, all_values = members.index(group.ranks[group.rank()]), [m + turn for m in members]
        x = np.full(count, float(all_values[mine]))
        want = np.full(count, float(sum(all_values)))
        if op == "all_reduce":
            call, got = (lambda x=x: group.all_reduce(x)), x
        elif op == "broadcast":
            root = turn % len(members)
            want[:] = all_values[root]
            call, got = (lambda x=x, root=root: group.broadcast(x, root)), x
        else:
            got = np.zeros(count * len(members))
            want = np.repeat(np.array(all_values, float), count)
            call = lambda x=x, got=got: group.all_gather_into_tensor(got, x)  # noqa: E731
        if turn % 3 == 2:
            wait_for = call
            call = lambda wait_for=wait_for: wait_for().wait()  # noqa: E731
        caught = attempt(call)
        if caught.kind:
            return True, caught
        if not np.array_equal(got, want):
            return False, caught
    return True, caught


def stop_inside(rank, victim, moment, timeout_s):
    """Stop a rank in the middle of large all_reduces; wake it when the others have given up."""
    everybody, world_size = pids(), dist.get_world_size()
    dist.barrier()
    doom = None
    if rank == victim:
        doom = Doom(moment, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    right = True
    while right:
        x = np.ones(300_000)
        caught = attempt(dist.all_reduce, x, timeout=timeout_s)
        if caught.kind:
            break
        right = bool((x == world_size).all())
    if doom is not None:
        # If a call failed before its time, nobody would wake it any more.
        doom.call_off()
    if rank != victim:
        store().add("gave up", 1)
        if rank == min(r for r in range(world_size) if r != victim):
            wait_for_count("gave up", world_size - 1)
            os.kill(everybody[victim], signal.SIGCONT)
    after = attempt(dist.barrier)
    store().barrier("end", world_size, 60.0)
    return caught, right, after


def wait_for_count(key, count):
    """Wait until `count` ranks have added themselves."""
    end_s = time.monotonic() + 60.0
    while store().add(key, 0) < count:
        if time.monotonic() > end_s:
            raise TimeoutError(f"{key}: not {count} in time")
