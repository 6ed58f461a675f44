"""A group ends: in order, because of an error, or because nobody refers to it any more.

Rank 1 makes calls for which it does not wait, and ends its group. Rank 0 comes late.
"""

import gc
import re
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
from unisono.core.groups import ending
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
from unisono.core.groups import ending
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


# Rank 0 is in the call already, rank 2 comes when rank 1 has ended.
AFTER_AN_ERROR = """
if rank == 1:
    for op in ("reduce", "barrier"):
        make_call(op)
    store().wait(["waits"], 60)
    FAILS
if rank == 2:
    store().wait(["come"], 60)
else:
    store().set("waits", "yes")
tell(attempt(lambda: make_call("reduce").wait()))
# Not earlier, because its end is no matter of this test.
store().set(f"told/{rank}", "yes")
store().wait(["told/0", "told/2"], 60)
"""

FAILS = {
    "finally": ("try: 1 / 0\n    finally: CLOSE", "ZeroDivisionError: "),
    "uncaught": ("1 / 0", "ZeroDivisionError: "),
    "of unisono": ("raise dist.errors.InvalidArgumentError('x')", "InvalidArgumentError: x"),
    "exit": ("try: sys.exit(3)\n    finally: CLOSE", "SystemExit: 3"),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", ["destroy", "sub-group", "drop"])
@pytest.mark.parametrize("fails", FAILS)
def test_after_an_error_calls_are_cancelled_and_the_others_get_the_reason(fails, end, way):
    code, reason = FAILS[fails]
    close = "group.close()" if end == "drop" else "dist.destroy_process_group(group)"
    script = NATIVE.replace("rank, 2", "rank, 3") + CALLS
    script += AFTER_AN_ERROR.replace("FAILS", code.replace("CLOSE", close))
    with ranks_of(f"END = {end!r}\n" + script, 3, Forked, **WAYS[way]) as (processes, store):
        assert outcome(processes[1])[1] != 0
        store.set(STORE + "come", "yes")
        ends = [outcome(processes[rank]) for rank in (0, 2)]
    for told, code, err in ends:
        assert code == 0, err
        assert told["kind"] in ("CollectiveAbortedError", "PeerFailedError"), told
        assert told["peers"] == [1]
        wanted = rf"rank 1 (raised|closed group '.*' because of) (unisono\.errors\.)?{reason}"
        assert re.search(wanted, told["text"]), told
        assert told["ended_s"] - told["began_s"] < BUSY_S


def test_ctrl_c_ends_the_wait_for_calls():
    script = (
        NATIVE.replace("outside", "unused")
        + """
    import threading
    x = np.ones(1)
    dist.barrier()
    if rank == 1:
        dist.all_reduce(x, async_op=True)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        dist.destroy_process_group()
    else:
        store().wait(["come"], 60)
        tell(attempt(dist.all_reduce, x))
    """.replace("\n    ", "\n")
    )
    with ranks_of(script, 2, Forked) as (processes, store):
        _, code, err = outcome(processes[1])
        assert (code, "KeyboardInterrupt" in err) == (1, True)
        store.set(STORE + "come", "yes")
        told, code, err = outcome(processes[0])
    assert code == 0, err
    assert told["kind"] == "CollectiveAbortedError"
    assert "rank 1 closed group 'default' because of KeyboardInterrupt" in told["text"]


# ---- groups that are dropped ---------------------------------------------------------------


def make_two(store, name):
    def make(rank):
        group = ProcessGroup(PrefixStore(name, store), rank, 2, timeout=60)
        x = np.ones(2)
        group.all_reduce(x, async_op=True).wait()
        assert x.tolist() == [2.0] * 2
        groups[rank] = group

    groups = [None, None]
    on_threads(partial(make, 0), partial(make, 1))
    return groups


def wait_for_closers():
    for dropped in list(ending._dropped.values()):
        assert dropped.closed.wait(60)
    for thread in threading.enumerate():
        if thread.name == "unisono-closer":
            thread.join(60)


def test_the_peer_of_a_dropped_group_has_an_error_at_once(monkeypatch):
    monkeypatch.setenv("UNISONO_TRANSPORT", "tcp")
    stays, goes = make_two(HashStore(), "a")
    alive = weakref.ref(goes)
    gc.disable()
    try:
        del goes
        assert alive() is None, "a cycle keeps the group"
    finally:
        gc.enable()
    with pytest.raises(PeerLostError, match="rank 1 was lost: it left"):
        # In less than the time-out, which a busy machine does not reach.
        stays.all_reduce(np.ones(2), timeout=BUSY_S)
    stays.close()
    wait_for_closers()


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
def test_dropped_groups_leave_no_thread_and_no_descriptor(transport, monkeypatch):
    monkeypatch.setenv("UNISONO_TRANSPORT", transport)
    # The guard of all tests (conftest.py) compares threads and descriptors before and after.
    store = HashStore()
    for number in range(5):
        make_two(store, str(number))
    wait_for_closers()


def test_a_group_is_dropped_while_its_thread_holds_the_locks_of_threading():
    # `threading.enumerate` and every start of a thread take this lock.
    groups = make_two(HashStore(), "a")
    with threading._active_limbo_lock:
        groups.clear()
    wait_for_closers()


def test_the_handle_of_a_message_keeps_its_group_open():
    groups, box = make_two(HashStore(), "a"), np.zeros(3)
    work = groups[0].recv(box, 1, 5, async_op=True)
    groups[0] = None
    groups[1].send(np.arange(3.0), 0, 5)
    assert work.wait(60)
    assert box.tolist() == [0.0, 1.0, 2.0]
    del work
    groups[1].close()
    wait_for_closers()
