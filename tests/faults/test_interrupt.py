"""Ctrl-C inside every call that blocks: it comes through at once, and the others hear of it."""

import gc
import os
import re
import signal
import threading
import time
import weakref

import numpy as np
import pytest

import unisono as dist
from tests.faults.fault_calls import BUSY_S, LEFT, attempt, store
from tests.support.handlers import press_when_blocked
from unisono.core.engines import is_native_built
from unisono.core.transports.native_messages import NativeMessages
from unisono.core.transports.tcp.transport import TCPTransport
from unisono.testing import run

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
    thread = threading.Thread(target=press_when_blocked, args=(pressed,))
    thread.start()
    caught = attempt(call, *args)
    thread.join()
    caught.began_s = pressed[0]
    return caught


@pytest.mark.ranks(2, kind="processes")
def test_interrupted_recv_leaves_its_memory_alone(rank):
    dist.barrier()
    if rank == 0:
        store().wait(["interrupted"], 60.0)
        dist.send(np.full(3, 5.0), 1)
    else:
        box, fresh = np.zeros(3), np.zeros(3)
        assert interrupted(dist.recv, box, 0).kind == "KeyboardInterrupt"
        store().set("interrupted", "yes")
        # What the interrupted receive waited for.
        dist.recv(fresh, 0)
        assert (box.tolist(), fresh.tolist()) == ([0.0] * 3, [5.0] * 3)
    dist.barrier()


@pytest.mark.skipif(not is_native_built(), reason="the C++ engine is not built")
@pytest.mark.ranks(2, kind="processes")
def test_interrupt_in_a_callback_is_not_lost(rank):
    """Press Ctrl-C on rank 1 in what C++ calls while it waits."""
    dist.barrier()
    if rank == 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        notice = TCPTransport.notice_end
        TCPTransport.notice_end = lambda *_: signal.raise_signal(signal.SIGINT)
        caught = attempt(dist.recv, np.zeros(3), 0, timeout=10)
        TCPTransport.notice_end = notice
        assert caught.kind == "KeyboardInterrupt", caught
    dist.barrier()


@pytest.mark.skipif(not is_native_built(), reason="the C++ engine is not built")
@pytest.mark.ranks(2, kind="processes")
def test_interrupt_at_the_start_of_a_message_frees_nothing(rank):
    """Ctrl-C when C++ has begun a message and Python does not know of it yet.

    Each message has its memory still, or needs none: a receive that ended.
    """
    begin, kept, ended = NativeMessages._begun, [], []
    native = dist.group.WORLD.backends["cpu"]._comm.transport.messages.native

    def press(self, transfer, told):
        raise KeyboardInterrupt

    dist.barrier()
    for call in (dist.irecv, dist.isend):
        for kind in (np.ndarray, np.matrix):
            if rank == 1:
                NativeMessages._begun = press
                memory = np.ones(4_000_000)
                kept.append(weakref.ref(memory))
                try:
                    call(memory.view(kind), 0)
                except KeyboardInterrupt:
                    NativeMessages._begun = begin
                ended.append(call is dist.irecv and native.number_of(memory) == 0)
                del memory
    gc.collect()
    dist.barrier()
    assert all(ref() is not None or over for ref, over in zip(kept, ended, strict=True))
    assert len(kept) == 4 * rank


# What the others get. A collective cannot end without this rank; a receive, or a wait in the
# store, concerns nobody else until the rank goes down with it.
HEARD = {
    "all_reduce": ("CollectiveAbortedError", "KeyboardInterrupt on rank 1"),
    "barrier": ("CollectiveAbortedError", "KeyboardInterrupt on rank 1"),
    "wait": ("PeerFailedError", "rank 1 raised KeyboardInterrupt"),
    "recv": ("PeerFailedError", "rank 1 raised KeyboardInterrupt"),
    "recv any": ("PeerFailedError", "rank 1 raised KeyboardInterrupt"),
    # A rank that connects to it while it leaves finds its port closing.
    "new world": ("PeerLostError", rf"{LEFT}|rank 1 was lost: \S+: Connection reset by peer"),
    "store": ("PeerFailedError", "rank 1 raised KeyboardInterrupt"),
}


@pytest.mark.parametrize("name", list(BLOCKING))
def test_interrupt_in_a_blocking_call(name):
    results = run(interrupt, 3, ranks="processes", args=(name,), timeout=60.0)
    assert results[1].kind == "KeyboardInterrupt", results[1]
    assert results[1].took_s < BUSY_S
    kind, text = HEARD[name]
    for caught in (results[0], results[2]):
        assert (caught.kind, caught.peers) == (kind, (1,)), caught
        assert re.search(text, caught.text.splitlines()[0]), caught
        if name != "new world":
            assert caught.ended_s - results[1].began_s < BUSY_S


def interrupt_unknown(rank):
    """Interrupt a probe and a receive of unknown size, which must then take no message."""
    ended = []
    dist.barrier()
    for number, call in enumerate((dist.probe, dist.recv_array)):
        if rank == 1:
            ended.append(interrupted(call).kind)
            store().set(f"interrupted {number}", "yes")
            ended.append(dist.recv_array(0).array.tolist())
        else:
            store().wait([f"interrupted {number}"], 60.0)
            dist.send(np.full(2, number), 1)
        dist.barrier()
    return ended


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_interrupted_probe_and_recv_array_take_no_message(engine):
    _, ended = run(interrupt_unknown, 2, ranks="processes", engine=engine)
    assert ended == ["KeyboardInterrupt", [0, 0], "KeyboardInterrupt", [1, 1]]


@pytest.mark.ranks(2, kind="processes", timeout=60.0)
def test_interrupt_ends_the_wait_for_a_call_but_not_the_call(rank):
    """Press Ctrl-C on rank 1 while it waits for a call that rank 0 has not made."""
    x = np.full(2, rank + 1.0)
    dist.barrier()
    if rank == 0:
        store().wait(["interrupted"], 60.0)
    work = dist.all_reduce(x, async_op=True)
    if rank == 1:
        caught = interrupted(work.wait)
        store().set("interrupted", "yes")
        assert caught.kind == "KeyboardInterrupt", caught
        assert caught.took_s < BUSY_S
    work.wait()
    assert x.tolist() == [3.0, 3.0]
