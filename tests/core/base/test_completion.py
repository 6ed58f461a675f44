import asyncio
import inspect
import logging
import math
import sys
import threading
import time

import pytest

from tests.support.together import on_threads
from unisono.core.base.deadline import Deadline
from unisono.core.base.threads.completion import Completion, Pending
from unisono.errors import InternalError


def test_only_the_first_end_counts():
    completion = Completion()
    assert not completion.done()
    first = ValueError("first")
    assert completion.finish(first)
    assert not completion.finish(None)
    assert completion.done()
    assert completion.error is first
    assert completion.wait_until(None)


def test_no_call_counts_as_ended_that_goes_on():
    with pytest.raises(InternalError, match="a call goes on although its deadline has passed"):
        Pending(deadline=Deadline(0.0)).wait_or_expire(None)


def test_callbacks_run_once_in_order():
    completion = Completion()
    seen = []
    completion.add_callback(lambda c: seen.append(("a", c is completion)))
    completion.add_callback(lambda c: seen.append(("b", c.done())))
    completion.finish()
    completion.finish()
    completion.add_callback(lambda c: seen.append(("late", True)))
    assert seen == [("a", True), ("b", True), ("late", True)]


def test_a_callback_that_raises_stops_nobody(caplog):
    completion = Completion()
    seen = []
    completion.add_callback(lambda c: 1 / 0)
    completion.add_callback(seen.append)
    with caplog.at_level(logging.ERROR, "unisono"):
        completion.finish()
        completion.add_callback(lambda c: 1 / 0)
    assert seen == [completion]
    assert caplog.text.count("ZeroDivisionError: division by zero") == 2


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, asyncio.CancelledError])
def test_what_is_no_exception_stops_no_callback(error, caplog):
    completion, seen = Completion(), []

    def end(_):
        raise error

    completion.add_callback(end)
    completion.add_callback(seen.append)
    with caplog.at_level(logging.ERROR, "unisono"):
        completion.finish()
        completion.add_callback(end)
    assert seen == [completion]
    assert caplog.text.count("a callback raised") == 2


def test_ctrl_c_in_a_callback_is_raised_after_the_others_have_run():
    completion, seen = Completion(), []

    def press(_):
        raise KeyboardInterrupt

    completion.add_callback(press)
    completion.add_callback(seen.append)
    with pytest.raises(KeyboardInterrupt):
        completion.finish()
    assert completion.done()
    assert seen == [completion]
    with pytest.raises(KeyboardInterrupt):
        completion.add_callback(press)


def finished_with_a_handler(at):
    """Finish a completion with callbacks; at a line of it a handler uses it, too.

    Returns:
        Who was called back, and whether there was such a line.
    """
    completion, seen, lines, handled = Completion(), [], 0, False

    def handle(frame, event, _):
        nonlocal lines, handled
        if frame.f_code.co_filename != inspect.getfile(Completion):
            return None
        lines += event == "line"
        if event == "line" and lines == at:
            # What a trace function calls is not traced.
            handled = True
            completion.add_callback(lambda _: seen.append("handler"))
            completion.finish(KeyError())
        return handle

    sys.settrace(handle)
    try:
        completion.add_callback(lambda _: seen.append("early"))
        completion.finish(ValueError())
        completion.add_callback(lambda _: seen.append("late"))
    finally:
        sys.settrace(None)
    assert completion.wait_until(Deadline(0))
    return sorted(seen), handled


def test_a_signal_handler_may_use_the_completion_at_any_line():
    at = 1
    while (found := finished_with_a_handler(at))[1]:
        assert found[0] == ["early", "handler", "late"], at
        at += 1
    assert found[0] == ["early", "late"]
    assert at > 15


def test_a_callback_may_use_the_completion():
    completion = Completion()
    seen = []

    def callback(done):
        done.add_callback(lambda _: seen.append(done.wait_until(None)))
        done.finish(ValueError())

    completion.add_callback(callback)
    completion.finish()
    assert seen == [True]
    assert completion.error is None


@pytest.mark.parametrize("timeout", [0, 0.01])
def test_wait_ends_at_its_deadline(timeout):
    completion = Completion()
    begin = time.monotonic()
    assert not completion.wait_until(Deadline(timeout))
    assert time.monotonic() - begin < 15
    completion.finish()
    assert completion.wait_until(Deadline(0))


@pytest.mark.parametrize("seconds", [None, math.inf, 1e12, 20])
def test_every_waiter_wakes(seconds):
    deadline = None if seconds is None else Deadline(seconds)
    completion = Completion()
    woken = []
    threads = [
        threading.Thread(target=lambda: woken.append(completion.wait_until(deadline)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    completion.finish()
    for thread in threads:
        thread.join(20)
    assert woken == [True] * 8


def test_one_of_many_ends_it():
    for _ in range(50):
        assert on_threads(*[Completion().finish] * 4).count(True) == 1
