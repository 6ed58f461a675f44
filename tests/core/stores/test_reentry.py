"""A signal handler that calls a store inside a call of its own thread."""

import threading

import pytest

from tests.support.handlers import at_each_line, in_a_handler
from unisono.core.stores import FileStore, HashStore, TCPStore, table_store
from unisono.core.stores import hash as hash_store
from unisono.core.stores.files import log
from unisono.core.stores.files import store as file_store
from unisono.core.stores.tcp import client, connection
from unisono.errors import UsageError

KINDS = ["hash", "file", "tcp"]
MODULES = [hash_store, log, file_store, table_store, client, connection]
LIMIT_S = 20.0


@pytest.fixture(params=KINDS)
def store(request, tmp_path):
    made = {
        "hash": HashStore,
        "file": lambda: FileStore(tmp_path / "store"),
        "tcp": lambda: TCPStore("127.0.0.1", 0, is_master=True),
    }[request.param]()
    yield made
    made.close()


def test_a_handler_uses_the_store_on_which_its_thread_waits(store):
    def use():
        assert store.add("count", 2) == 2
        assert store.get("count", LIMIT_S) == b"2"
        store.set("late", "here")

    with in_a_handler(use):
        assert store.get("late", LIMIT_S) == b"here"


def test_a_handler_uses_the_store_at_any_line_or_is_refused_at_once(store):
    """No call waits for its own thread, and none of the calls loses a value."""
    done, refused = [], []

    def use():
        try:
            done.append(store.add("theirs", 1))
        except UsageError as error:
            refused.append("is in a call of this thread already" in str(error))

    def call():
        with at_each_line(MODULES, use, 300):
            for _ in range(5):
                mine.append(store.add("mine", 1))
                store.set("key", "value")
                assert store.get("key", LIMIT_S) == b"value"
        mine.append(store.add("mine", 0))

    mine = []
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert mine == [1, 2, 3, 4, 5, 5]
    assert done == list(range(1, len(done) + 1))
    assert store.add("theirs", 0) == len(done) > 0
    assert all(refused)
    assert bool(refused) == (not isinstance(store, TCPStore))
