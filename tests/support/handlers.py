"""Code that runs where a signal handler of the interpreter may run."""

import contextlib
import inspect
import os
import signal
import sys
import threading
import time


@contextlib.contextmanager
def at_each_line(modules, handler, most=100_000):
    """Call a handler before each line that this thread executes in these modules, in the block.

    That is where the interpreter runs signal handlers, too. What the handler calls has no lines.
    """
    files, left = {inspect.getfile(module) for module in modules}, most

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line" and left > 0:
            left -= 1
            handler()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def press_when_blocked(pressed, signum=signal.SIGINT, over=None):
    """Send a signal to this process once its main thread has sat in one place for a while.

    A while is so many looks, not a time: on a machine that stands still nobody gets on. The time of
    the signal is appended to `pressed`. No signal is sent once the event `over` is set.
    """
    main = threading.main_thread().ident
    seen, looks = None, 0
    while looks < 20:
        if over is not None and over.is_set():
            return
        frame = sys._current_frames()[main]
        here = (id(frame), frame.f_lasti)
        del frame
        looks = looks + 1 if here == seen else 0
        seen = here
        time.sleep(0.005)
    pressed.append(time.monotonic())
    os.kill(os.getpid(), signum)


@contextlib.contextmanager
def in_a_handler(act):
    """Call `act` in a signal handler once the main thread waits in one place inside the block."""
    over = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: act())
    thread = threading.Thread(target=press_when_blocked, args=([], signal.SIGUSR1, over))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
