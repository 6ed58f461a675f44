"""What all stores but TCPStore do when a waiting thread is interrupted or closed."""

import contextlib
import itertools
import os
import signal
import threading

import pytest

from tests.support import services
from tests.support.calls import wait_until
from tests.support.handlers import at_each_line, in_a_handler
from unisono.core.stores import FileStore, HashStore, table_store
from unisono.core.stores.services.etcd import EtcdStore
from unisono.core.stores.services.redis import RedisStore
from unisono.core.stores.table import ChangeKind
from unisono.errors import ClosedError, StoreTimeoutError

NUMBERS = itertools.count()


@pytest.fixture(scope="module", params=["hash", "file", *services.KINDS])
def make(request, tmp_path_factory):
    """Return a function that returns a new, empty store."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "hash":
        yield HashStore
    elif request.param == "file":
        yield lambda: FileStore(folder / f"store{next(NUMBERS)}")
    else:
        with services.server_of(request.param, folder) as server:
            if request.param == "redis":
                yield lambda: RedisStore("127.0.0.1", server.port, f"p{next(NUMBERS)}")
            else:
                yield lambda: EtcdStore([("127.0.0.1", server.port)], f"p{next(NUMBERS)}")


@pytest.fixture
def store(make):
    with make() as made:
        yield made


def arrived(store):
    """Return whether a call of this handle waits inside its barrier."""
    return any(
        store._look(lambda table, each=each: table.inside(*each)) for each in list(store._inside)
    )


def in_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


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
        assert wait_until(lambda: arrived(handle))
    handle.close()
    thread.join(10)
    assert len(outcome) == 1
    with pytest.raises(StoreTimeoutError, match="1 of 2 callers"):
        store.barrier("b", 2, 0.02)


# The interrupt may come while a client of a service opens a connection.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_interrupt_ends_a_barrier_and_leaves_it(store):
    def interrupt():
        assert wait_until(lambda: arrived(store))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        store.barrier("b", 2, 60)
    thread.join()
    with pytest.raises(StoreTimeoutError, match="1 of 2 callers"):
        store.barrier("b", 2, 0.02)


def test_a_handler_closes_the_handle_on_which_its_thread_waits(store):
    handle = store.clone()
    with in_a_handler(handle.close), pytest.raises(ClosedError):
        handle.get("never", 20)


@pytest.mark.parametrize("moment", ["before", "after", "between the look and the change"])
def test_close_by_another_thread_while_a_caller_arrives(store, moment):
    handle = store.clone()
    change = handle._change

    def closing(changes):
        if changes[0].kind is not ChangeKind.ARRIVE:
            return change(changes)
        if moment == "before":
            in_a_thread(handle.close)
        elif moment != "after" and hasattr(handle, "_try_change"):
            attempt = handle._try_change

            def late(swaps):
                del handle._try_change
                in_a_thread(handle.close)
                return attempt(swaps)

            handle._try_change = late
        results = change(changes)
        if not handle._closed:
            in_a_thread(handle.close)
        return results

    handle._change = closing
    with pytest.raises(ClosedError):
        handle.barrier("b", 2, 60)
    with pytest.raises(StoreTimeoutError, match="1 of 2 callers"):
        store.barrier("b", 2, 0.02)


@pytest.mark.parametrize("operation", ["get", "barrier"])
def test_close_just_before_the_first_look(store, operation):
    """The closed handle does not wait for its time-out."""
    handle = store.clone()
    poll = handle._poll

    def closed(deadline, question):
        in_a_thread(handle.close)
        return poll(deadline, question)

    handle._poll = closed
    with pytest.raises(ClosedError):
        handle.get("b", 60) if operation == "get" else handle.barrier("b", 2, 60)


def test_a_barrier_that_times_out_while_it_is_closed_has_not_passed(store):
    handle = store.clone()

    def expired(deadline, question):
        in_a_thread(handle.close)
        return False

    handle._poll = expired
    with pytest.raises(ClosedError):
        handle.barrier("b", 2, 60)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_close_in_a_forked_child_leaves_the_caller_inside(store):
    handle = store.clone()
    thread = threading.Thread(target=handle.barrier, args=("b", 2, 60))
    thread.start()
    assert wait_until(lambda: arrived(handle))
    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            handle.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert arrived(handle)
    store.barrier("b", 2, 60)
    thread.join()
    handle.close()


def test_an_interrupt_at_any_line_leaves_no_caller_inside(store):
    for line in itertools.count():
        passed = 0

        def interrupt(line=line):
            nonlocal passed
            passed += 1
            if passed > line:
                raise KeyboardInterrupt

        ends = contextlib.suppress(KeyboardInterrupt, StoreTimeoutError)
        with ends, at_each_line([table_store], interrupt):
            store.barrier("b", 2, 0)
        with pytest.raises(StoreTimeoutError, match="1 of 2 callers"):
            store.barrier("b", 2, 0)
        if passed <= line:
            break
    assert line > 10
