"""Waits in C++, and what Python raises meanwhile."""

import itertools
import linecache
import os
import signal
import sys
import threading

import numpy as np
import pytest

import unisono as dist
from tests.support.transport_worlds import WAYS, connected, use_native
from unisono.core.base.deadline import Deadline
from unisono.core.base.seam import cpp as extension
from unisono.core.engines import is_native_built
from unisono.core.transports import Key, native_messages
from unisono.core.transports.messages import Cancelled, Purpose

pytestmark = pytest.mark.skipif(not is_native_built(), reason="the C++ engine is not built")

CONTEXT, TAG, INFO = 7, 1, 5
KEY = Key(CONTEXT, Purpose.P2P, TAG)


@pytest.fixture
def pair():
    """The messages of two ranks, both in this process."""
    nonces = [os.urandom(16) for _ in range(2)]
    both = [extension.Messages(rank, 2) for rank in range(2)]
    fds = [messages.create(nonce, -1) for messages, nonce in zip(both, nonces, strict=True)]
    known = [(os.getpid(), fd, nonce, 0) for fd, nonce in zip(fds, nonces, strict=True)]
    for messages in both:
        messages.introduce(known, False, False)
    yield both
    for messages in both:
        messages.close(0.0)


class Ended(BaseException):
    """As KeyboardInterrupt, which would end the tests if it got loose."""


def test_a_signal_does_not_spoil_the_end(pair):
    def end(*_):
        raise Ended

    data = bytes(4_000_000)

    def close():
        # More than the ring takes, so that closing waits for rank 1.
        pair[0].start_send(1, CONTEXT, TAG, INFO, data)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        assert pair[0].close(0.2) == []
        while True:  # where the interpreter looks for signals
            pass

    before = signal.signal(signal.SIGALRM, end)
    try:
        with pytest.raises(Ended):
            close()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_what_ends_programs_ends_a_wait_although_a_callback_raised_it(pair):
    def stuck(ranks, sends, context):
        assert (ranks, sends, context) == ([0], False, 0)
        raise Ended

    pair[1].set_stuck(stuck)
    number = pair[1].start_recv(0, CONTEXT, TAG, INFO, bytearray(8), [])[0]
    with pytest.raises(Ended):
        pair[1].wait(number, 60.0, [])
    assert pair[1].cancel(number, []) == extension.CANCELLED


def test_what_ends_programs_is_raised_after_a_wait_that_has_ended(pair):
    data, box = b"12345678", bytearray(8)

    def stuck(ranks, sends, context):
        pair[0].start_send(1, CONTEXT, TAG, INFO, data)
        raise Ended

    pair[1].set_stuck(stuck)
    number = pair[1].start_recv(0, CONTEXT, TAG, INFO, box, [])[0]

    def wait():
        pair[1].wait(number, 60.0, [])
        for _ in range(1_000_000):  # where the interpreter looks for signals
            pass

    with pytest.raises(Ended):
        wait()
    assert box == data


def test_a_callback_that_fails_is_reported_and_the_wait_goes_on(pair, monkeypatch):
    told, data = [], b"12345678"
    monkeypatch.setattr(sys, "unraisablehook", lambda said: told.append(said.exc_value))

    def stuck(ranks, sends, context):
        pair[0].start_send(1, CONTEXT, TAG, INFO, data)
        raise ValueError("spoilt")

    pair[1].set_stuck(stuck)
    box = bytearray(8)
    number = pair[1].start_recv(0, CONTEXT, TAG, INFO, box, [])[0]
    assert pair[1].wait(number, 60.0, []) == extension.OK
    assert box == data
    assert [str(each) for each in told] == ["spoilt"]


@pytest.fixture
def world():
    """The transports of two ranks, both in this process, with messages in C++."""
    world = connected("inproc", 2)
    use_native(world, WAYS["rings"])
    yield world
    for transport in world:
        transport.close()


def test_a_message_that_came_as_its_wait_was_interrupted_has_ended(world):
    box = bytearray(8)

    def stuck(ranks, sends, context):
        world[0].send(1, KEY, memoryview(b"12345678"))
        raise Ended

    world[1].messages.native.set_stuck(stuck)
    received = world[1].recv(0, KEY, memoryview(box))
    with pytest.raises(Ended):
        received.wait_until(Deadline(60.0))
    assert received.wait_until(Deadline(0.0))
    assert received.error is None
    assert box == b"12345678"


class Interruption:
    """Raises `Ended` at the n-th line of native_messages.py that this thread comes to.

    Not as a lock is taken or given back, where the interpreter looks for no signals.
    """

    def __init__(self, n):
        self.left = n

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind, error, where):
        sys.settrace(None)
        return kind is Ended

    def _trace(self, frame, event, arg):
        if frame.f_code.co_filename != native_messages.__file__:
            return None
        line = linecache.getline(native_messages.__file__, frame.f_lineno)
        if event == "line" and not line.strip().startswith("with "):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise Ended
        return self._trace

    @property
    def came(self):
        return self.left <= 0


def test_a_wait_that_is_interrupted_anywhere_loses_no_message(world, monkeypatch):
    monkeypatch.setattr(native_messages, "_LOOK_S", 0.01)
    for n in itertools.count(1):
        box = bytearray(8)
        received = world[1].recv(0, KEY, memoryview(box))
        others = []
        other = threading.Thread(target=_wait, args=(received, others))
        if n % 2:
            other.start()
        world[0].send(1, KEY, memoryview(b"12345678"))
        with Interruption(n) as interruption:
            received.wait_until(Deadline(60.0))
        if n % 2:
            other.join()
            assert others == [True]
        assert received.wait_until(Deadline(60.0))
        assert received.error is None
        assert box == b"12345678"
        assert not world[1].messages._open
        if not interruption.came and n % 2 == 0:
            break
    assert n > 5


def test_a_cancel_that_is_interrupted_anywhere_ends_the_receive(world):
    for n in itertools.count(1):
        received = world[1].recv(0, KEY, memoryview(bytearray(8)))
        with Interruption(n) as interruption:
            world[1].cancel(received)
        world[1].cancel(received)
        assert received.done()
        assert isinstance(received.error, Cancelled)
        assert not world[1].messages._open
        if not interruption.came:
            break
    assert n > 5


@pytest.mark.ranks(2)
def test_a_receive_that_was_interrupted_as_it_began_takes_no_message(rank):
    messages = dist.group.WORLD.backends["cpu"]._comm.transport.messages
    dist.barrier()
    if rank == 0:
        dist.recv(np.zeros(1), 1)
        dist.send(np.full(3, 7.0), 1)
        return
    dead, box = np.zeros(3), np.zeros(3)
    begun = messages._begun
    messages._begun = _raise
    with pytest.raises(Ended):
        dist.irecv(memoryview(dead), 0)
    messages._begun = begun
    assert messages.native.number_of(dead) == 0
    dist.send(np.zeros(1), 0)
    dist.recv(box, 0)
    assert (box == 7).all()
    assert not dead.any()
    assert not messages._held


def _wait(received, ends):
    ends.append(received.wait_until(Deadline(60.0)))


def _raise(*_):
    raise Ended
