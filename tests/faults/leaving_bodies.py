"""Ranks that leave, abort, give up, or are interrupted."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np

import unisono as dist
from tests.faults.fault_calls import attempt, store
from tests.faults.killed_bodies import wait_for_count
from unisono.launcher import spawn
from unisono.transports.native_messages import NativeMessages
from unisono.transports.tcp.transport import TCPTransport


def destroy_early(rank):
    dist.barrier()
    if rank == 1:
        wait_for_count("waiting", 2)
        dist.destroy_process_group()
        return None
    store().add("waiting", 1)
    results = attempt(dist.all_reduce, np.ones(2)), attempt(dist.barrier)
    # Or this rank would be the next to leave.
    store().add("heard", 1)
    wait_for_count("heard", 2)
    return results


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


def recv_late(rank):
    box = np.zeros(3)
    timed_out = [
        attempt(dist.recv, box, 1 - rank, timeout=0.2),
        attempt(dist.recv, box, None, timeout=0.2),
    ]
    dist.barrier()
    # What was given up must not take this message, or write to that memory.
    fresh = np.zeros(3)
    works = [dist.isend(np.full(3, 7.0), 1 - rank), dist.irecv(fresh, 1 - rank)]
    for work in works:
        work.wait()
    assert fresh.tolist() == [7.0] * 3
    assert box.tolist() == [0.0] * 3
    x = np.full(4, rank + 1.0)
    dist.all_reduce(x)
    return timed_out, x.tolist()


BLOCKING = {
    "all_reduce": lambda box: dist.all_reduce(box),
    "barrier": lambda box: dist.barrier(),
    "wait": lambda box: dist.irecv(box, 0).wait(),
    "recv": lambda box: dist.recv(box, 0),
    "recv any": lambda box: dist.recv(box),
    "new world": lambda box: dist.init_process_group(
        init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", rank=1, world_size=3, timeout=30
    ),
    "store": lambda box: store().wait(["never"], 30.0),
}


def interrupt(rank, name):
    """Press Ctrl-C on rank 1 when its main thread is inside a blocking call."""
    box = np.ones(2)
    # A clone outlives the world, which one of the cases destroys.
    kept = store().clone()
    dist.barrier()
    if rank != 1:
        if rank == 0:
            # Or the call would be complete.
            kept.wait(["interrupted"], 60.0)
        caught = attempt(BLOCKING["barrier"] if name == "barrier" else BLOCKING["all_reduce"], box)
        kept.add("heard", 1)
        kept.close()
        return caught
    if name == "new world":
        dist.destroy_process_group()
    caught = interrupted(BLOCKING[name], box)
    kept.set("interrupted", "yes")
    if name in ("wait", "recv", "recv any", "store"):
        # What an uncaught one does; the call itself harms nobody.
        dist.GroupMember.WORLD.report_failure("KeyboardInterrupt")
    # Only now may this rank leave: the others shall hear of the interrupt, not of that.
    while kept.add("heard", 0) < 2:
        time.sleep(0.001)
    kept.close()
    return caught


def interrupted(call, *args):
    """Make a call and press Ctrl-C when it blocks; the result begins at the press."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pressed = []
    thread = threading.Thread(target=_press_when_blocked, args=(pressed,))
    thread.start()
    caught = attempt(call, *args)
    thread.join()
    caught.began_s = pressed[0]
    return caught


def interrupt_recv(rank):
    """Interrupt a receive, then send what it waited for: nothing may write to its memory."""
    dist.barrier()
    if rank == 0:
        store().wait(["interrupted"], 60.0)
        dist.send(np.full(3, 5.0), 1)
        dist.barrier()
        return None
    box, fresh = np.zeros(3), np.zeros(3)
    caught = interrupted(dist.recv, box, 0)
    store().set("interrupted", "yes")
    dist.recv(fresh, 0)
    dist.barrier()
    return caught, box.tolist(), fresh.tolist()


def interrupt_callback(rank):
    """Press Ctrl-C on rank 1 in what C++ calls while it waits."""
    dist.barrier()
    caught = None
    if rank == 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        notice = TCPTransport.notice_end
        TCPTransport.notice_end = lambda *_: signal.raise_signal(signal.SIGINT)
        caught = attempt(dist.recv, np.zeros(3), 0, timeout=10)
        TCPTransport.notice_end = notice
    dist.barrier()
    return caught


def interrupt_start(rank):
    """Ctrl-C when C++ has begun a message and Python does not know of it yet.

    Returns for each message whether it has its memory still, or needs none: a receive that ended.
    """
    begin, kept, ended = NativeMessages._begin, [], []
    native = dist.group.WORLD.backends["cpu"]._comm.transport.messages.native

    def press(self, transfer, told):
        raise KeyboardInterrupt

    dist.barrier()
    for call in (dist.irecv, dist.isend):
        for kind in (np.ndarray, np.matrix):
            if rank == 1:
                NativeMessages._begin = press
                memory = np.ones(4_000_000)
                kept.append(weakref.ref(memory))
                try:
                    call(memory.view(kind), 0)
                except KeyboardInterrupt:
                    NativeMessages._begin = begin
                ended.append(call is dist.irecv and native.number_of(memory) == 0)
                del memory
    gc.collect()
    dist.barrier()
    return [ref() is not None or over for ref, over in zip(kept, ended, strict=True)]


def _press_when_blocked(pressed):
    """Send SIGINT to this process once its main thread has sat in one place for a while.

    A while is so many looks, not a time: on a machine that stands still nobody gets on.
    """
    main = threading.main_thread().ident
    seen, looks = None, 0
    while looks < 20:
        frame = sys._current_frames()[main]
        here = (id(frame), frame.f_lasti)
        del frame
        looks = looks + 1 if here == seen else 0
        seen = here
        time.sleep(0.005)
    pressed.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)


def fork_and_end(rank, how):
    """A child of a fork ends the group for itself only; sums before and after it."""
    sums = [np.full(3, float(rank)) for _ in range(4)]
    dist.all_reduce(sums[0])
    dist.all_reduce(sums[1])
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
        # Who waits for long looks whether the others are still there.
        time.sleep(0.1)
    dist.barrier()
    dist.all_reduce(sums[2])
    sums[3] = dist.all_reduce(sums[3], async_op=True).wait() and sums[3]
    return [each.tolist() for each in sums]
