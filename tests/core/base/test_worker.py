import threading

import pytest

from unisono.core.base.threads.worker import WorkerThread

_start = threading.Thread.start


def start_and_press(thread):
    _start(thread)
    raise KeyboardInterrupt


def press_and_start(thread):
    raise KeyboardInterrupt


def test_runs_once():
    worker, ran = WorkerThread("once"), []
    worker.join()
    for _ in range(3):
        worker.start(lambda: ran.append(worker.is_here()))
    worker.join()
    assert ran == [True]
    assert not worker.is_here()
    assert worker.thread.name == "once"


@pytest.mark.parametrize("interrupted", [start_and_press, press_and_start])
def test_interrupted_at_its_start_it_runs_once(monkeypatch, interrupted):
    """Otherwise what was queued for it would wait for ever, or two would serve one queue."""
    worker, ran, go = WorkerThread("interrupted"), [], threading.Event()

    def run():
        go.wait(30)
        ran.append(worker.is_here())

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.start(run)
    worker.start(run)
    worker.start(run)
    go.set()
    worker.join()
    assert ran == [True]
