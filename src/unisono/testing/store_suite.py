"""The conformance suite of stores: every store that passes it can carry a job."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from unisono.core.stores import DEFAULT_TIMEOUT, Store
from unisono.errors import (
    ClosedError,
    InvalidArgumentError,
    QueueEmptyError,
    StoreKeyError,
    StoreTimeoutError,
)
from unisono.testing.expect import PATIENCE_S, checks_in, equal, raises

__all__ = ["STORE_CHECKS", "check_store"]

_SHORT_S = 0.05


def check_store(make_store: Callable[[], Store]) -> None:
    """Run every check of `STORE_CHECKS`, each on a new store.

    Args:
        make_store: Function that returns a new store in which `list_keys` finds no key. The suite
            closes it.

    Raises:
        AssertionError: The store behaves differently. The text names the difference.
    """
    for check in STORE_CHECKS:
        with make_store() as store:
            if store.timeout == DEFAULT_TIMEOUT:
                store.set_timeout(PATIENCE_S)
            check(store)


@contextmanager
def _thread(call: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run a call on a thread during the with block; then the list holds its result or error."""
    outcome: list[Any] = []

    def body() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        yield outcome
    finally:
        thread.join(PATIENCE_S)
        if thread.is_alive():
            raise AssertionError("a call that should have been woken still blocks")


def _check_values(store: Store) -> None:
    values: dict[str, str | bytes] = {
        "text": "v\u00e4",
        "bytes": b"\xff\x00a",
        "empty": b"",
        "": b"x",
        "k\u00fc": b"1",
    }
    for key, value in values.items():
        store.set(key, value)
        expected = value.encode() if isinstance(value, str) else value
        equal(f"get({key!r})", store.get(key), expected)
    store.set("text", bytearray(b"again"))
    equal("get after a second set", store.get("text"), b"again")
    large = bytes(range(256)) * 4096
    store.set("large", large)
    equal("get of 1 MiB", store.get("large") == large, True)


def _check_argument_types(store: Store) -> None:
    bad: Any = 5
    raises("set(k, int)", TypeError, lambda: store.set("k", bad))
    raises("set(int, v)", TypeError, lambda: store.set(bad, "v"))
    raises("get(int)", TypeError, lambda: store.get(bad))
    raises("add(k, str)", TypeError, lambda: store.add("k", "1"))  # type: ignore[arg-type]
    raises("check(str)", TypeError, lambda: store.check("k"))
    raises("wait(str)", TypeError, lambda: store.wait("k"))
    raises("timeout -1", InvalidArgumentError, lambda: store.wait(["k"], -1))
    raises("add of 2**63", InvalidArgumentError, lambda: store.add("k", 2**63))
    equal("keys after refused calls", store.list_keys(), [])


def _check_add(store: Store) -> None:
    equal("add to a missing key", store.add("n", 5), 5)
    equal("add of a negative number", store.add("n", -7), -2)
    equal("get after add", store.get("n"), b"-2")
    equal("add of 0 to a missing key", (store.add("zero", 0), store.get("zero")), (0, b"0"))
    store.set("ten", "10")
    equal("add to a number that was set", store.add("ten", 1), 11)
    for text in ("xyz", "", "12abc"):
        store.set("word", text)
        raises(f"add to {text!r}", StoreKeyError, lambda: store.add("word", 1), "word")
        equal("value after a refused add", store.get("word"), text.encode())
    store.add("n", 2**63 - 1)
    raises("add beyond 64 bits", StoreKeyError, lambda: store.add("n", 2**62))
    equal("value after an overflow", store.get("n"), str(2**63 - 3).encode())


def _check_compare_set(store: Store) -> None:
    equal("missing, empty expected", store.compare_set("c", "", "one"), b"one")
    equal("match", store.compare_set("c", "one", b"two"), b"two")
    equal("mismatch", store.compare_set("c", "one", "three"), b"two")
    equal("value after a mismatch", store.get("c"), b"two")
    equal("missing, other expected", store.compare_set("m", "exp", "v"), b"exp")
    equal("still missing", store.check(["m"]), False)
    store.set("e", "")
    equal("empty value matches", store.compare_set("e", "", "new"), b"new")


def _check_keys(store: Store) -> None:
    before = store.num_keys()
    equal("check([])", store.check([]), True)
    store.wait([])
    store.set("a", "1")
    store.set("b/c", "2")
    equal("check of present keys", store.check(["a", "b/c"]), True)
    equal("check with a missing key", store.check(["a", "z"]), False)
    equal("check with a time-out", store.check(["a"], 60.0), True)
    store.wait(["a", "b/c"])
    equal("list_keys", sorted(store.list_keys()), ["a", "b/c"])
    equal("num_keys", store.num_keys() - before, 2)
    equal("delete_key", store.delete_key("a"), True)
    equal("delete_key again", store.delete_key("a"), False)
    equal("check after delete_key", store.check(["a"]), False)
    equal("num_keys after delete_key", store.num_keys() - before, 1)
    as_bytes: Any = b"b/c"
    equal("a key as bytes", (store.get(as_bytes), store.check([as_bytes])), (b"2", True))
    store.queue_push(as_bytes, "1")
    equal("a queue as bytes", store.queue_pop(as_bytes), b"1")
    store.barrier(as_bytes, 1)
    not_text: Any = b"\xff"
    raises("get(b'\\xff')", InvalidArgumentError, lambda: store.get(not_text), "UTF-8")
    raises("get of a surrogate", InvalidArgumentError, lambda: store.get("\ud800"), "UTF-8")
    raises("set of one", InvalidArgumentError, lambda: store.set("k", "\ud800"), "UTF-8")


def _check_append_and_multi(store: Store) -> None:
    store.append("ap", "a")
    store.append("ap", b"bc")
    equal("append", store.get("ap"), b"abc")
    store.multi_set(["m1", "m2"], ["x", b"y"])
    equal("multi_get", store.multi_get(["m2", "m1", "m2"]), [b"y", b"x", b"y"])
    equal("multi_get([])", store.multi_get([]), [])
    store.multi_set([], [])
    raises("multi_set 2:1", InvalidArgumentError, lambda: store.multi_set(["a", "b"], ["x"]))
    equal("check after a refused multi_set", store.check(["a"]), False)


def _check_queues(store: Store) -> None:
    equal("queue_len of nothing", store.queue_len("q"), 0)
    for value in ("1", b"", "3"):
        store.queue_push("q", value)
    equal("queue_len", store.queue_len("q"), 3)
    equal("check of a queue", store.check(["q"]), True)
    equal("a queue is no key", store.list_keys(), [])
    equal("oldest first", [store.queue_pop("q") for _ in range(3)], [b"1", b"", b"3"])
    equal("check of an emptied queue", store.check(["q"]), False)
    raises("pop, not blocking", QueueEmptyError, lambda: store.queue_pop("q", block=False), "q")
    raises("pop", StoreTimeoutError, lambda: store.queue_pop("q", timeout=_SHORT_S), "q")
    store.set("both", "value")
    store.queue_push("both", "queued")
    equal("one name twice", (store.get("both"), store.queue_pop("both")), (b"value", b"queued"))


def _check_timeouts(store: Store) -> None:
    store.set("here", "1")
    keys = ["lost1", "here", "lost2"]
    waits: dict[str, Callable[[], object]] = {
        "wait": lambda: store.wait(keys, _SHORT_S),
        "multi_get": lambda: store.multi_get(keys, timedelta(seconds=_SHORT_S)),
    }
    for what, call in waits.items():
        raises(what, StoreTimeoutError, call, "lost1'", "lost2'", "0.05 s")
    raises("get", StoreTimeoutError, lambda: store.get("lost1", 0), "lost1'")
    raises("barrier", TimeoutError, lambda: store.barrier("b", 2, _SHORT_S), "b'", "of 2")
    store.set_timeout(_SHORT_S)
    equal("timeout", store.timeout, timedelta(seconds=_SHORT_S))
    raises("get, own timeout", StoreTimeoutError, lambda: store.get("lost1"), "0.05 s")
    raises("set_timeout(-1)", InvalidArgumentError, lambda: store.set_timeout(-1))


def _check_wake_ups(store: Store) -> None:
    writes: dict[str, Callable[[], object]] = {
        "set": lambda: store.set("set", "1"),
        "add": lambda: store.add("add", 1),
        "append": lambda: store.append("append", "1"),
        "compare_set": lambda: store.compare_set("compare_set", "", "1"),
        "multi_set": lambda: store.multi_set(["x", "multi_set"], ["1", "1"]),
    }
    for key, write in writes.items():
        with _thread(lambda key=key: store.get(key)) as outcome:  # type: ignore[misc]
            # The same handle, because a wait must not block other threads.
            equal(f"check beside a wait for {key!r}", store.check([key]), False)
            write()
        equal(f"get woken by {key}", outcome, [b"1"])
    with _thread(lambda: store.queue_pop("queue")) as outcome:
        store.queue_push("queue", "1")
    equal("queue_pop woken by queue_push", outcome, [b"1"])
    with _thread(lambda: store.get("cas")) as outcome:
        equal("compare_set that stores nothing", store.compare_set("cas", "x", "y"), b"x")
        store.set("cas", "real")
    equal("get beside a failed compare_set", outcome, [b"real"])


def _check_threads(store: Store) -> None:
    handles = [store, store, store.clone(), store.clone()]
    seen: list[int] = []
    popped: list[bytes] = []

    def work(handle: Store) -> None:
        for _ in range(20):
            seen.append(handle.add("count", 1))
        popped.append(handle.queue_pop("jobs"))
        handle.append("log", "x")

    threads = [threading.Thread(target=work, args=(handle,), daemon=True) for handle in handles]
    for thread in threads:
        thread.start()
    for number in range(len(handles)):
        store.queue_push("jobs", str(number))
    for thread in threads:
        thread.join(PATIENCE_S)
    equal("every sum seen once", sorted(seen), list(range(1, 81)))
    equal("every job popped once", sorted(popped), [b"0", b"1", b"2", b"3"])
    equal("appends", store.get("log"), b"xxxx")
    for clone in handles[2:]:
        clone.close()


def _check_barrier(store: Store) -> None:
    store.barrier("alone", 1)
    raises("barrier of 0", InvalidArgumentError, lambda: store.barrier("b", 0))
    arrived: list[int] = []
    torn: list[int] = []
    clones = [store.clone() for _ in range(2)]

    def work(handle: Store) -> None:
        for round_number in range(5):
            arrived.append(round_number)
            handle.barrier("b", 3)
            if arrived.count(round_number) != 3:
                torn.append(round_number)

    with _thread(lambda: work(store)), _thread(lambda: work(clones[0])):
        work(clones[1])
    equal("rounds that a barrier let through early", torn, [])
    raises("one of two", StoreTimeoutError, lambda: store.barrier("late", 2, _SHORT_S))
    # A caller whose barrier timed out must not complete the barrier of later callers.
    raises("again", StoreTimeoutError, lambda: clones[0].barrier("late", 2, _SHORT_S))
    for clone in clones:
        clone.close()


def _check_handles(store: Store) -> None:
    clone = store.clone()
    equal("timeout of a clone", clone.timeout, store.timeout)
    clone.set("k", "v")
    equal("get of what a clone set", store.get("k"), b"v")
    clone.close()
    equal("get after a clone was closed", store.get("k"), b"v")
    raises("get on a closed clone", ClosedError, lambda: clone.get("k"))
    raises("set on a closed clone", ClosedError, lambda: clone.set("k", "late"))
    equal("get after a refused set", store.get("k"), b"v")
    raises("pickle", TypeError, lambda: pickle.dumps(store), "cannot be pickled")


def _check_writes_on_a_closed_handle(store: Store) -> None:
    store.set("k", "1")
    closed = store.clone()
    closed.close()
    writes: dict[str, Callable[[], object]] = {
        "add": lambda: closed.add("k", 1),
        "append": lambda: closed.append("k", "1"),
        "compare_set": lambda: closed.compare_set("k", "1", "2"),
        "delete_key": lambda: closed.delete_key("k"),
        "multi_set": lambda: closed.multi_set(["k", "n"], ["2", "2"]),
        "queue_push": lambda: closed.queue_push("q", "1"),
        "barrier": lambda: closed.barrier("b", 1),
        "clone": closed.clone,
    }
    for name, write in writes.items():
        raises(f"{name} on a closed clone", ClosedError, write)
    equal("keys after refused writes", (store.list_keys(), store.get("k")), (["k"], b"1"))
    equal("queue after a refused push", store.queue_len("q"), 0)


STORE_CHECKS = checks_in(globals())
