"""What HashStore and FileStore do when a waiting thread is interrupted or closed."""

import signal
import threading

import pytest

from tests.support.calls import wait_until
from unisono.errors import ClosedError, StoreTimeoutError
from unisono.stores import FileStore, HashStore


@pytest.fixture(params=["hash", "file"])
def store(request, tmp_path):
    with HashStore() if request.param == "hash" else FileStore(tmp_path / "store") as made:
        yield made


@pytest.mark.parametrize("operation", ["get", "barrier", "queue_pop"])
def test_close_wakes_a_waiting_thread_and_takes_it_out_of_the_barrier(store, operation):
    handle = store.clone()
    calls = {
        "get": lambda: handle.get("b", 60),
        "barrier": lambda: handle.barrier("b", 2, 60),
        "queue_pop": lambda: handle.queue_pop("b", timeout=60),
    }
    outcome = []

    def body():
        with pytest.raises(ClosedError) as caught:
            calls[operation]()
        outcome.append(caught.value)

    thread = threading.Thread(target=body)
    thread.start()
    if operation == "barrier":
        assert wait_until(lambda: handle._inside)
    handle.close()
    thread.join(10)
    assert len(outcome) == 1
    with pytest.raises(StoreTimeoutError, match="1 of 2 callers"):
        store.barrier("b", 2, 0.02)


def test_interrupt_ends_a_barrier_and_leaves_it(store):
    def interrupt():
        assert wait_until(lambda: store._inside)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        store.barrier("b", 2, 60)
    thread.join()
    with pytest.raises(StoreTimeoutError, match="1 of 2 callers"):
        store.barrier("b", 2, 0.02)
