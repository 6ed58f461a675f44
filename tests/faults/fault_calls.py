"""Every operation as one call, and what became of a call: shared by the bodies of all tests."""

import os
import socket
import threading
import time
from dataclasses import dataclass, field

import numpy as np

import unisono as dist
from tests.support import operations
from tests.support.operations import Operations
from unisono.core.base.threads.completion import Completion
from unisono.core.engines.native_queue import QueuedCall
from unisono.core.transports.tcp import link
from unisono.errors import UnisonoError

# The longest any rank may take to hear of a failure, in seconds; the library's own promise.
NOTICE_S = 1.0

# What a busy machine may add to any bound: processors, virtual ones above all, have been seen to
# stand still for seconds. Far less than the time-outs that it must not be taken for.
BUSY_S = 15.0


# What is said of a rank that closed its group, by good-bye.
LEFT = "rank 1 was lost: it left"


@dataclass
class Caught:
    """How one call ended. Times are those of the machine's monotonic clock."""

    kind: str
    text: str
    peers: tuple[int, ...]
    usable: bool | None
    began_s: float
    ended_s: float = field(default_factory=time.monotonic)

    @property
    def took_s(self):
        return self.ended_s - self.began_s


def attempt(call, *args, **how):
    """Make a call and return how it ended."""
    began_s = time.monotonic()
    try:
        call(*args, **how)
    except UnisonoError as error:
        context = error.context
        return Caught(type(error).__name__, str(error), context.peers, context.usable, began_s)
    except KeyboardInterrupt:
        return Caught("KeyboardInterrupt", "", (), None, began_s)
    return Caught("", "", (), None, began_s)


def _caller(name):
    """Return a function that makes a call of this name in a group."""
    return lambda group, **how: getattr(
        Operations(group.rank(), group.size(), ranks=group.ranks, how={"group": group, **how}), name
    )()


COLLECTIVES = {name: _caller(name) for name in operations.COLLECTIVES}


def groups_for(names, ranks=None, timeout=None):
    """Return one new group for each name: a group that broke is of no use to the next call."""
    return {name: dist.new_group(ranks, timeout=timeout, group_desc=name) for name in names}


def calls_in(groups):
    """Return {name: call} of all collectives, each in the group of its name."""
    return {n: lambda n=n, **how: COLLECTIVES[n](groups[n], **how) for n in COLLECTIVES}


def attempt_at_once(calls, entered=lambda: None):
    """Make all calls at the same time, each on a thread; return how each ended.

    `entered` is called when all threads are about to make theirs.
    """
    results = {}
    ready = threading.Barrier(len(calls) + 1)

    def make(name, call):
        ready.wait()
        results[name] = attempt(call)

    threads = [threading.Thread(target=make, args=item, daemon=True) for item in calls.items()]
    for thread in threads:
        thread.start()
    ready.wait()
    entered()
    for thread in threads:
        thread.join()
    return results


def attempt_async(calls, entered=lambda: None):
    """Start all calls with async_op, then wait for each; return how each ended."""
    results = {}
    works = {name: call(async_op=True) for name, call in calls.items()}
    entered()
    for name, work in works.items():
        results[name] = attempt(work.wait)
    return results


def store():
    """Return the store of the world: the one way to talk past the links."""
    return dist.GroupMember.WORLD.store


def pids():
    """Return the process ids of all ranks."""
    found = np.zeros(dist.get_world_size(), np.int64)
    dist.all_gather_into_tensor(found, np.array([os.getpid()], np.int64))
    return found.tolist()


def wait_for_count(key, count):
    """Wait until `count` ranks have added themselves."""
    end_s = time.monotonic() + 60.0
    while store().add(key, 0) < count:
        if time.monotonic() > end_s:
            raise TimeoutError(f"{key}: not {count} in time")


class Doom:
    """Kills or stops this process at the n-th thing that happens in it.

    What counts: beginning to wait for a transfer, the end of one, and every piece of a message
    that a socket takes or gives. So the end comes before, between or inside messages.
    """

    def __init__(self, count, act):
        self._left = count
        self._lock = threading.Lock()
        self._act = act
        for cls, name in [
            (Completion, "finish"),
            (Completion, "wait_until"),
            (QueuedCall, "wait_well"),
            (QueuedCall, "release"),
            (link, "sendmsg"),
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


def calls_take_s():
    """Return how long the slowest rank takes for all calls now; the same on all ranks."""
    groups = groups_for(COLLECTIVES)
    began_s = time.monotonic()
    attempt_at_once(calls_in(groups))
    slowest_s = np.array([time.monotonic() - began_s])
    dist.all_reduce(slowest_s, dist.ReduceOp.MAX)
    return float(slowest_s[0])
