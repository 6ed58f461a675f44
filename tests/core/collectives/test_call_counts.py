"""How many Python functions, in how many files, a call passes: it must not become more."""

import sys
from pathlib import Path

import numpy as np
import pytest

import unisono as dist

ROOT = str(Path(dist.__file__).parent)

# (Python calls, files) at most. Lower them with each call that is saved.
CEILINGS = {
    "first of the group": (340, 39),
    "second of a kind": (0, 0),
    "new shape": (53, 11),
    "new shape of a broadcast": (53, 11),
    "repeated": (0, 0),
    "strided": (0, 0),
    "AVG": (0, 0),
    "scan": (0, 0),
    "exscan": (0, 0),
    "AVG, async_op and wait": (10, 6),
    "PREMUL_SUM": (0, 0),
    "strided, async_op and wait": (10, 6),
    "list of strided arrays, async_op and wait": (10, 6),
    "list of strided arrays": (0, 0),
    "input inside the output": (0, 0),
    "timeout=": (0, 0),
    "async_op and wait": (6, 4),
    "send, repeated": (0, 0),
    "send of a strided array": (0, 0),
    "recv of a shorter message": (0, 0),
    "isend": (0, 0),
    "isend of half a ring": (0, 0),
    "irecv": (0, 0),
    # Two, unless the thread that serves messages is about to end it.
    "wait of irecv": (6, 2),
    "algorithm=": (0, 0),
    "all_gather_object": (300, 44),
}


class Counter:
    """Counts the calls of unisono's Python functions in a block, on this thread."""

    def __init__(self):
        self.files = []

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def __call__(self, frame, event, argument):
        code = frame.f_code
        # The first call of a process also imports modules.
        if event == "call" and code.co_filename.startswith(ROOT) and code.co_name != "<module>":
            self.files.append(code.co_filename)


def counted(call):
    with Counter() as counter:
        call()
    return len(counter.files), len(set(counter.files))


@pytest.mark.native
@pytest.mark.ranks(2, kind="processes")
def test_python_calls_and_files(rank):
    x, y, rows = np.ones(4), np.ones(4), np.ones((4, 4))
    works, found, large = [], [None, None], np.zeros(1 << 15)
    wide, outs = np.zeros((2, 4)), [np.ones((4, 2))[:, 1] for _ in range(2)]

    # The module finds a name in Python the first time, and imports what defines it.
    all_reduce, isend, irecv = dist.all_reduce, dist.isend, dist.irecv

    def queue(op=dist.ReduceOp.SUM, x=x):
        dist.all_reduce(x, op, async_op=True).wait()

    half = dist.ReduceOp.PREMUL_SUM(0.5)

    calls = {
        "first of the group": lambda: all_reduce(x),
        "second of a kind": lambda: dist.all_reduce(y),
        "new shape": lambda: dist.all_reduce(np.zeros(8)),
        "repeated": lambda: dist.all_reduce(np.zeros(8)),
        "strided": lambda: dist.all_reduce(rows[:, 1]),
        "first AVG": lambda: dist.all_reduce(x, dist.ReduceOp.AVG),
        "AVG": lambda: dist.all_reduce(x, dist.ReduceOp.AVG),
        "first scan": lambda: dist.scan(x),
        "scan": lambda: dist.scan(y),
        "first exscan": lambda: dist.exscan(x),
        "exscan": lambda: dist.exscan(y),
        "first list": lambda: dist.all_gather(outs, rows[:, 1]),
        "list of strided arrays": lambda: dist.all_gather(outs, rows[:, 1]),
        "first of an input inside": lambda: dist.all_gather_into_tensor(wide, wide[rank]),
        "input inside the output": lambda: dist.all_gather_into_tensor(wide, wide[rank]),
        "first broadcast": lambda: dist.broadcast(x, 0),
        "new shape of a broadcast": lambda: dist.broadcast(np.zeros(8), 0),
        "timeout=": lambda: dist.all_reduce(x, timeout=5),
        "first algorithm=": lambda: dist.all_reduce(x, algorithm="ring"),
        "algorithm=": lambda: dist.all_reduce(x, algorithm="ring"),
        "async_op": queue,
        "async_op and wait": queue,
        "AVG, async_op and wait": lambda: queue(dist.ReduceOp.AVG),
        "first PREMUL_SUM": lambda: dist.all_reduce(x, half),
        "PREMUL_SUM": lambda: dist.all_reduce(x, half),
        "strided, async_op and wait": lambda: queue(x=rows[:, 1]),
        "list of strided arrays, async_op and wait": lambda: dist.all_gather(
            outs, rows[:, 1], async_op=True
        ).wait(),
        "all_gather_object": lambda: dist.all_gather_object(found, rank),
    }
    took = {name: counted(call) for name, call in calls.items()}
    if rank == 0:
        dist.send(x, 1)
        took["send, repeated"] = counted(lambda: dist.send(x, 1))
        took["send of a strided array"] = counted(lambda: dist.send(rows[:, 1], 1))
        took["isend"] = counted(lambda: works.append(isend(x, 1)))
        works[0].wait()
        for _ in range(2):
            took["isend of half a ring"] = counted(lambda: works.append(isend(large, 1)))
            works[-1].wait()
            dist.recv(y, 1)
        dist.recv(y, 1)
        for _ in range(3):
            dist.send(x, 1)
    else:
        for _ in range(4):
            dist.recv(x, 0)
        for _ in range(2):
            dist.recv(large, 0)
            dist.send(y, 0)
        took["irecv"] = counted(lambda: works.append(irecv(x, 0)))
        dist.send(y, 0)
        dist.recv(y, 0)  # and meanwhile the first message comes
        took["wait of irecv"] = counted(works[0].wait)
        took["recv of a shorter message"] = counted(
            lambda: dist.recv(np.zeros((6, 2))[:, 0], 0, partial=True)
        )
    over = {
        name: (took[name], most)
        for name, most in CEILINGS.items()
        if name in took and (took[name][0] > most[0] or took[name][1] > most[1])
    }
    assert over == {}, took
