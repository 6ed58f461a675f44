"""How a rank may go, other than by SIGKILL, and what the others hear of it."""

import ast
import atexit
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import unisono as dist
from tests.faults.fault_calls import BUSY_S, LEFT, attempt, store, wait_for_count
from tests.faults.scripts import LIMIT_S, outcome, ranks_of
from tests.support.calls import check_usable
from unisono.errors import WorkerFailedError
from unisono.launcher import spawn
from unisono.testing import run


def _raise(rank, folder):
    dist.init_process_group(timeout=60)
    dist.barrier()
    # The parent must not end this child before it has told what it heard.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == 1:
        store().wait(["waiting"], 60.0)
        raise ValueError("spoilt")
    store().set("waiting", "yes")
    caught = attempt(dist.barrier)
    Path(folder, "heard").write_text(f"{caught.kind} {caught.peers} {caught.text}")


def spawn_and_raise(folder):
    context = spawn(_raise, (folder,), nprocs=2, join=False, start_method="forkserver")
    # So long for the other child to tell what it heard.
    context.join(grace_period=60.0)


def _leave_with_a_send_under_way(rank, folder, count):
    dist.init_process_group(timeout=60)
    dist.barrier()
    if rank == 1:
        dist.isend(np.arange(count), 0)
        return
    box = np.zeros(count, int)
    caught = [attempt(dist.recv, box, 1), attempt(dist.barrier)]
    told = [(c.kind, c.peers, c.text) for c in caught]
    right = bool((box == np.arange(count)).all())
    Path(folder, "heard").write_text(repr((right, told)))


def spawn_and_leave(folder, count):
    spawn(_leave_with_a_send_under_way, (folder, count), nprocs=2, start_method="forkserver")


def abort(rank, who):
    """Rank 1 aborts: from a second thread while it waits, too, or while only the others do."""
    group = dist.GroupMember.WORLD
    dist.barrier()

    def end_it():
        wait_for_count("waiting", 3 if who == "other thread" else 2)
        group.abort("enough")

    waited = None
    if rank == 1 and who == "other thread":
        kept = store()
        thread = threading.Thread(target=_abort_when_all_wait, args=(kept, group))
        thread.start()
    elif rank == 1:
        end_it()
        waited = attempt(dist.barrier)
    if waited is None:
        store().add("waiting", 1)
        # Rank 1 waits for a message, or the collective would be complete.
        waited = attempt(dist.recv, np.ones(2), 0) if rank == 1 else attempt(dist.barrier)
    if rank == 1 and who == "other thread":
        thread.join()
    again = attempt(dist.barrier)
    shown = repr(group)
    store().add("heard", 1)
    wait_for_count("heard", 3)
    return waited, again, shown


def _abort_when_all_wait(kept, group):
    while kept.add("waiting", 0) < 3:
        time.sleep(0.001)
    group.abort("enough")


GOES = """
dist.init_process_group(timeout=60)
dist.barrier()
if rank == 1:
    for other in (0, 2):
        store().wait([f"waiting/{other}"], 60)
    WAY
store().set(f"waiting/{rank}", "yes")
tell(attempt(dist.all_reduce, np.ones(4)))
"""


def check_told(ends, kind, text):
    """Check what ranks 0 and 2 of three were told of rank 1."""
    for told, returncode, err in (ends[0], ends[2]):
        assert returncode == 0, err
        assert (told["kind"], told["peers"]) == (kind, [1]), told
        assert re.search(text, told["text"].splitlines()[0]), told


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("way", "kind", "text", "code"),
    [
        ("raise ValueError('no such file')", "PeerFailedError", "ValueError: no such file", 1),
        ("sys.exit(3)", "PeerLostError", LEFT, 3),
        ("sys.exit()", "PeerLostError", LEFT, 0),
        ("os._exit(4)", "PeerLostError", "rank 1 was lost: ", 4),
        (
            "dist.destroy_process_group(); sys.exit()",
            "PeerLostError",
            LEFT,
            0,
        ),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(99)", "PeerFailedError", "Interrupt", -2),
        (
            "os.kill(os.getpid(), signal.SIGTERM); time.sleep(99)",
            "PeerLostError",
            "rank 1 was",
            -15,
        ),
    ],
    ids=["raise", "sys.exit(3)", "sys.exit()", "os._exit", "destroy", "SIGINT", "SIGTERM"],
)
def test_a_script_that_goes(way, kind, text, code):
    with ranks_of(GOES.replace("WAY", way), 3) as (processes, _):
        ends = [outcome(process) for process in processes]
    assert ends[1][1] == code, ends[1]
    check_told(ends, kind, text)
    if way.startswith("raise"):
        assert ends[1][2].rstrip().endswith("ValueError: no such file")


CHILD_RAISES = """
import multiprocessing
def main():
    dist.init_process_group(timeout=60)
    dist.barrier()
    if rank == 1:
        for other in (0, 2):
            store().wait([f"waiting/{other}"], 60)
        raise ValueError("no such file")
    store().set(f"waiting/{rank}", "yes")
    tell(attempt(dist.all_reduce, np.ones(4)))
    sys.exit()
child = multiprocessing.get_context("fork").Process(target=main)
child.start()
child.join()
sys.exit(child.exitcode)
"""


def test_a_child_of_multiprocessing_that_raises():
    with ranks_of(CHILD_RAISES, 3) as (processes, _):
        ends = [outcome(process) for process in processes]
    assert [code for _, code, _ in ends] == [0, 1, 0], ends
    assert ends[0][2] == ends[2][2] == ""
    check_told(ends, "PeerFailedError", "rank 1 raised ValueError: no such file")


CHILD_LIVES_ON = """
dist.init_process_group(timeout=60)
dist.barrier()
if rank == 1:
    for other in (0, 2):
        store().wait([f"waiting/{other}"], 60)
    if os.fork() == 0:
        from unisono.errors import ClosedError
        caught = [attempt(dist.barrier), attempt(dist.send, np.ones(1), 0)]
        caught += [attempt(dist.recv, np.ones(1), 0), attempt(dist.barrier, async_op=True)]
        dist.destroy_process_group()
        print(json.dumps([os.getpid(), *map(vars, caught)]), flush=True)
        signal.alarm(60)
        signal.pause()
    store().wait(["kill me"], 60)
    os.kill(os.getpid(), signal.SIGKILL)
store().set(f"waiting/{rank}", "yes")
caught = attempt(dist.all_reduce, np.ones(4))
tell(caught)
"""


def test_a_forked_child_has_no_group_and_does_not_hide_its_parents_death():
    with ranks_of(CHILD_LIVES_ON, 3) as (processes, store):
        child, *told = json.loads(processes[1].stdout.readline())
        try:
            assert [caught["kind"] for caught in told] == ["ClosedError"] * 4, told
            assert "parent of this fork" in told[0]["text"]
            store.set("worker/attempt_0/default_pg/0/kill me", "yes")
            for rank in (0, 2):
                caught, returncode, err = outcome(processes[rank])
                assert returncode == 0, err
                assert (caught["kind"], caught["peers"]) == ("PeerLostError", [1]), caught
            os.kill(child, 0)  # it still lives
        finally:
            os.kill(child, signal.SIGKILL)
        assert processes[1].wait(LIMIT_S) == -signal.SIGKILL


@pytest.mark.parametrize("how", ["abort", "destroy", "exit"])
@pytest.mark.ranks(3, kind="processes")
def test_what_a_forked_child_does_to_its_copy_of_a_group_concerns_nobody(rank, how):
    """A child of a fork ends the group for itself only; sums before and after it."""
    for _ in range(2):
        check_usable()
    child = os.fork() if rank == 1 else None
    if child == 0:
        # Neither abort() nor the exit may speak for the parent.
        try:
            if how == "abort":
                dist.GroupMember.WORLD.abort("of the child")
            elif how == "destroy":
                dist.destroy_process_group()
            else:
                atexit._run_exitfuncs()
        finally:
            os._exit(0)
    if child is not None:
        os.waitpid(child, 0)
        wait_for_count("waits", 2)
        # Who waits for long looks whether the others are still there.
        time.sleep(0.1)
    else:
        store().add("waits", 1)
    dist.barrier()
    check_usable()
    x = np.full(3, float(rank))
    dist.all_reduce(x, async_op=True).wait()
    assert x.tolist() == [3.0] * 3


def test_a_spawned_child_that_raises_says_why(tmp_path, capfd):
    with pytest.raises(WorkerFailedError) as caught:
        spawn_and_raise(str(tmp_path))
    assert "ValueError: spoilt" in str(caught.value).splitlines()[0]
    assert str(caught.value).rstrip().endswith("ValueError: spoilt")
    heard = (tmp_path / "heard").read_text()
    assert heard.startswith("PeerFailedError (1,) ")
    assert "ValueError: spoilt" in heard.splitlines()[0]
    # The parent tells the traceback; nobody tells it twice.
    assert capfd.readouterr().err == ""


def test_a_spawned_child_that_returns_loses_no_message(tmp_path):
    spawn_and_leave(str(tmp_path), 2_000_000)
    right, told = ast.literal_eval((tmp_path / "heard").read_text())
    assert right
    assert told[0] == ("", (), "")
    kind, peers, text = told[1]
    assert (kind, peers) == ("PeerLostError", (1,))
    assert re.search(LEFT, text)


@pytest.mark.parametrize("ranks", ["threads", "processes"])
@pytest.mark.parametrize("who", ["other thread", "other rank"])
def test_abort_ends_every_wait(ranks, who):
    results = run(abort, 3, ranks=ranks, args=(who,))
    for rank, (waited, again, shown) in enumerate(results):
        for caught in (waited, again):
            assert (caught.kind, caught.peers) == ("CollectiveAbortedError", (1,)), (rank, caught)
            assert "enough on rank 1" in caught.text
            assert caught.usable is False
        assert "broken: enough" in shown
        assert again.took_s < BUSY_S


def test_init_without_the_rank_that_runs_the_store():
    script = """
if rank != 0:
    tell(attempt(dist.init_process_group, timeout=1.0))
"""
    # An empty variable counts as unset: rank 0 would run the store. The port stays ours.
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        with ranks_of(script, 2, TORCHELASTIC_USE_AGENT_STORE="", MASTER_PORT=port) as (
            processes,
            _,
        ):
            told, returncode, err = outcome(processes[1])
    assert returncode == 0, err
    assert told["kind"] in ("StoreConnectionError", "StoreTimeoutError", "RendezvousError"), told
    assert f"127.0.0.1:{port}" in told["text"].splitlines()[0]
    assert told["ended_s"] - told["began_s"] < 1.0 + BUSY_S
