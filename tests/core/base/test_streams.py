"""Streams and events on their own: order, waiting, errors, time-outs, threads."""

import threading

import pytest

from tests.support.handlers import at_each_line
from unisono.core.base.threads import streams
from unisono.core.base.threads.streams import Event, Stream, current_stream, default_stream, stream
from unisono.errors import CollectiveTimeoutError, UsageError


class Gate:
    """Something that a stream does not get past before the test says so."""

    def __init__(self, compute):
        self.open = threading.Event()
        compute.submit(lambda: self.open.wait(30))


def test_work_runs_in_order_on_another_thread_while_the_host_goes_on():
    compute, seen = Stream("compute"), []
    gate = Gate(compute)
    for number in range(5):
        compute.submit(lambda number=number: seen.append((number, threading.current_thread().name)))
    assert not compute.query()
    assert seen == []
    gate.open.set()
    compute.synchronize(30)
    assert compute.query()
    assert seen == [(number, "unisono-stream-compute") for number in range(5)]


def test_an_event_is_reached_when_the_stream_gets_to_it():
    compute = Stream()
    gate = Gate(compute)
    before, after = Event(), compute.record_event()
    assert before.query()  # never recorded
    assert not after.query()
    with pytest.raises(CollectiveTimeoutError, match=r"^stream 'stream' was not done after 0.02 s"):
        after.synchronize(0.02)
    gate.open.set()
    after.synchronize(30)
    assert after.query()


def test_one_stream_waits_for_an_event_of_another():
    first, second, seen = Stream("first"), Stream("second"), []
    gate = Gate(first)
    first.submit(seen.append, "first")
    second.wait_event(first.record_event())
    second.submit(seen.append, "second")
    third = Stream("third")
    third.wait_stream(second)
    third.submit(seen.append, "third")
    assert not third.query()
    gate.open.set()
    third.synchronize(30)
    assert seen == ["first", "second", "third"]


def test_a_wait_is_for_the_recording_at_the_time_of_the_wait():
    first, second = Stream("first"), Stream("second")
    event = first.record_event()
    second.wait_event(event)
    gate = Gate(first)
    event.record(first)
    second.synchronize(30)
    assert not event.query()
    gate.open.set()
    event.synchronize(30)


def test_the_default_stream_is_the_calling_thread():
    assert current_stream() is default_stream()
    seen, event = [], Event()
    default_stream().submit(seen.append, 1)
    assert seen == [1]
    event.record()
    assert event.query()
    compute = Stream()
    gate = Gate(compute)
    event = compute.record_event()
    with pytest.raises(CollectiveTimeoutError):
        event.wait(timeout=0.02)
    gate.open.set()
    event.wait()
    default_stream().synchronize()
    assert default_stream().query()


def test_the_current_stream_is_that_of_the_innermost_block_and_of_this_thread():
    first, second, elsewhere = Stream("first"), Stream("second"), []
    with stream(first):
        assert current_stream() is first
        with stream(second):
            assert current_stream() is second
            with stream(None):
                assert current_stream() is second
            with stream(default_stream()):
                assert current_stream() is default_stream()
            first.submit(lambda: elsewhere.append(current_stream()))
        assert current_stream() is first
    assert current_stream() is default_stream()
    first.synchronize(30)
    assert elsewhere == [default_stream()]


def test_time_between_two_events():
    compute = Stream()
    first, second = Event(enable_timing=True), Event(enable_timing=True)
    with pytest.raises(UsageError, match=r"^the first event is not recorded yet"):
        first.elapsed_time(second)
    first.record(compute)
    gate = Gate(compute)
    second.record(compute)
    first.synchronize(30)
    with pytest.raises(UsageError, match=r"^the second event is not reached yet"):
        first.elapsed_time(second)
    assert not gate.open.wait(0.02)
    gate.open.set()
    second.synchronize(30)
    assert 20 <= first.elapsed_time(second) < 30_000
    with pytest.raises(UsageError, match=r"^the second event was made without enable_timing=True"):
        first.elapsed_time(compute.record_event())


def test_an_error_skips_what_follows_until_somebody_takes_it(caplog):
    compute, other, seen = Stream("compute"), Stream("other"), []
    compute.submit(lambda: 1 / 0)
    compute.submit(seen.append, "skipped")
    event = compute.record_event()
    other.wait_event(event)
    other.submit(seen.append, "skipped, too")
    with pytest.raises(ZeroDivisionError):
        event.synchronize(30)
    with pytest.raises(ZeroDivisionError):
        other.synchronize(30)
    with pytest.raises(ZeroDivisionError):
        compute.synchronize(30)
    assert "stream 'compute' skips what follows: ZeroDivisionError" in caplog.text
    for each in (compute, other):
        each.submit(seen.append, "as good as new")
        each.synchronize(30)
    assert seen == ["as good as new"] * 2


def test_a_stream_that_waits_too_long_fails():
    slow, other, seen = Stream("slow"), Stream("other"), []
    gate = Gate(slow)
    other.wait_event(slow.record_event(), timeout=0.02)
    other.submit(seen.append, "skipped")
    with pytest.raises(CollectiveTimeoutError, match=r"^stream 'slow' was not done after 0\.02 s"):
        other.synchronize(30)
    gate.open.set()
    slow.synchronize(30)
    assert seen == []


def test_a_stream_that_would_wait_for_itself_says_so():
    compute = Stream("compute")
    compute.submit(lambda: compute.synchronize(30))
    with pytest.raises(UsageError, match=r"^stream 'compute' would wait for itself"):
        compute.synchronize(30)


def test_the_thread_ends_without_work_and_begins_again():
    compute, threads = Stream(), []
    for _ in range(2):
        compute.submit(lambda: threads.append(threading.current_thread()))
        compute.synchronize(30)
        threads[-1].join(30)
        assert not threads[-1].is_alive()
    assert threads[0] is not threads[1]


def test_a_signal_handler_at_any_line_of_a_stream_never_waits_for_its_own_thread():
    compute, seen, refused, done = Stream("compute"), [], [], []

    def handle():
        compute.submit(seen.append, "handler")
        try:
            compute.synchronize(30)
            done.append(len(seen))
        except UsageError as error:
            refused.append(str(error).splitlines()[0])

    with at_each_line([streams], handle):
        for _ in range(3):
            compute.submit(seen.append, "outer")
    compute.synchronize(30)
    assert set(refused) == {"stream 'compute' would wait for itself"}
    assert done
    assert seen.count("outer") == 3
    assert seen.count("handler") == len(refused) + len(done)
