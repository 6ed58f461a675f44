"""The C++ queue of a group: the thread that serves it, and calls that it drops at its end."""

import queue
import threading
import time

import pytest

from unisono.core.base.seam import cpp as engine
from unisono.core.base.seam import is_native_built
from unisono.core.platform.proc import read_text

pytestmark = pytest.mark.skipif(not is_native_built(), reason="the C++ engine is not built")


def test_calls_that_the_end_of_the_queue_drops_are_over():
    turn, calls = engine.CallQueue(), [engine.QueuedCall() for _ in range(3)]
    numbers = [turn.push(call) for call in calls]
    assert not any(map(turn.is_over, numbers))
    assert turn.close() == numbers[0]
    assert all(map(turn.is_over, numbers))


@pytest.mark.alone
def test_a_call_wakes_the_thread_that_serves():
    turn, call, served = engine.CallQueue(), engine.QueuedCall(), queue.Queue()
    thread = threading.Thread(target=lambda: served.put(turn.serve()))
    thread.start()
    try:
        looks = 0
        while looks < 20:
            asleep = ") S " in read_text(f"/proc/self/task/{thread.native_id}/stat")
            looks = looks + 1 if asleep else 0
            time.sleep(0.005)
        number = turn.push(call)
        # Without the wake-up the thread looks again after 10 s.
        assert served.get(timeout=8.0)[:2] == (turn.FOREIGN, number)
        turn.finish(number)
    finally:
        turn.close()
        thread.join()
