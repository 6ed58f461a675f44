"""A group ends: in order, because of an error, or because nobody refers to it any more.

Rank 1 makes calls for which it does not wait, and ends its group. Rank 0 comes late.
"""

import gc
import os
import subprocess
import threading
import weakref
from functools import partial

import numpy as np
import pytest

from tests.faults.fault_calls import BUSY_S
from tests.faults.scripts import Forked, outcome, ranks_of
from tests.support.together import on_threads
from unisono import HashStore, PrefixStore, ProcessGroup
from unisono.errors import PeerLostError

# So long a rank must wait for another rank that comes late. A rank that does not wait is faster.
LATE_S = 0.2

STORE = "worker/attempt_0/default_pg/0/"

NATIVE = """
dist.init_process_group(timeout=60)
make = lambda values: np.array(values, float)
outside = lambda: dist.ProcessGroup(dist.PrefixStore("mine", store()), rank, 2, timeout=60)
"""

# The function `show` runs when the process has closed its groups, which happens at its exit too.
SHOW = """
import atexit
from unisono.groups import ending
def show():
    print(json.dumps([x.tolist(), part.tolist(), [each.tolist() for each in parts]]), flush=True)
atexit.unregister(ending.close_open_groups)
atexit.register(show)
atexit.register(ending.close_open_groups)
"""

# `make_call` returns the work of a call; in the end the arrays have their values of EXPECTED.
CALLS = """
group = dist.new_group() if END == "sub-group" else outside() if END == "drop" else None
x, part, parts = make([rank + 1.0] * 3), make([rank + 1.0]), [make([5.0]), make([6.0])]
def make_call(op):
    lists, how = parts if rank == 0 else None, {"group": group, "async_op": True}
    if op == "reduce": return dist.reduce(x, 0, **how)
    if op == "broadcast": return dist.broadcast(x, 0, **how)
    if op == "gather": return dist.gather(part, lists, 0, **how)
    if op == "scatter": return dist.scatter(part, lists, 0, **how)
    if op == "barrier": return dist.barrier(**how)
dist.barrier()
"""

ENDS = """
if rank == 1:
    work = make_call(OP)
    store().set("leaves", "yes")
    if END == "destroy": dist.destroy_process_group()
    if END == "sub-group": dist.destroy_process_group(group)
    if END == "drop": del group, work
else:
    store().wait(["come"], 60)
    make_call(OP).wait()
    dist.destroy_process_group()
"""

# By operation: x, part and parts of rank 0, then those of rank 1.
ONES, TWOS, PARTS = [1.0] * 3, [2.0] * 3, [[5.0], [6.0]]
EXPECTED = {
    "reduce": [[[3.0] * 3, [1.0], PARTS], [TWOS, [2.0], PARTS]],
    "broadcast": [[ONES, [1.0], PARTS], [ONES, [2.0], PARTS]],
    "gather": [[ONES, [1.0], [[1.0], [2.0]]], [TWOS, [2.0], PARTS]],
    "scatter": [[ONES, [5.0], PARTS], [TWOS, [6.0], PARTS]],
    "barrier": [[ONES, [1.0], PARTS], [TWOS, [2.0], PARTS]],
}
WAYS = {
    "shared memory": {},
    "messages": {"UNISONO_SHARED_MEMORY": "0"},
    "reference": {"UNISONO_ENGINE": "reference"},
}


def check_a_late_rank(script, op, end, **variables):
    """Check that rank 1 ends only after rank 0 has come, and that both have their results."""
    script = f"END, OP = {end!r}, {op!r}\n" + script
    with ranks_of(script, 2, Forked, **variables) as (processes, store):
        store.wait([STORE + "leaves"], 60)
        with pytest.raises((AssertionError, subprocess.TimeoutExpired)):
            processes[1].wait(LATE_S)
        store.set(STORE + "come", "yes")
        ends = [outcome(process) for process in processes]
    assert [(code, err) for _, code, err in ends] == [(0, "")] * 2, ends
    assert [told for told, *_ in ends] == EXPECTED[op]


@pytest.mark.sweep(10)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", ["destroy", "sub-group", "drop", "exit"])
@pytest.mark.parametrize("op", EXPECTED)
def test_a_call_that_nobody_waits_for_is_finished_at_a_normal_end(op, end, way):
    check_a_late_rank(SHOW + NATIVE + CALLS + ENDS, op, end, **WAYS[way])
