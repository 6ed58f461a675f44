"""torch's stores behind the adapter: the part of the conformance suite that ranks need to meet."""

import sys
import threading
from functools import partial

import pytest

import unisono
from tests.support.together import on_threads
from unisono.core.base import log
from unisono.core.base.net import unencrypted
from unisono.errors import (
    RendezvousError,
    StoreKeyError,
    StoreTimeoutError,
    UnisonoError,
    UnsupportedError,
)
from unisono.testing.store_suite import STORE_CHECKS, check_store

torch = pytest.importorskip("torch")
torch_dist = pytest.importorskip("torch.distributed")

from unisono.torch import TorchStore  # noqa: E402  needs torch

CHECKS = [
    check
    for check in STORE_CHECKS
    if check.__name__
    in {
        "_check_values",
        "_check_argument_types",
        "_check_compare_set",
        "_check_timeouts",
        "_check_barrier",
        "_check_handles",
    }
]


@pytest.fixture(scope="module", autouse=True)
def _what_torch_opens_once():
    """Let torch open what its first server opens and keeps, so that no test is blamed for it."""
    make("tcp")


def make(kind: str) -> TorchStore:
    if kind == "tcp":
        server = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return TorchStore(server)
    store = torch_dist.HashStore()
    return TorchStore(torch_dist.PrefixStore("a/b", store) if kind == "prefix" else store)


def test_every_check_was_found():
    assert len(CHECKS) == 6


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", ["hash", "prefix", "tcp"])
def test_conforms(kind, check, monkeypatch):
    monkeypatch.setattr(sys.modules["unisono.testing.store_suite"], "STORE_CHECKS", (check,))
    check_store(lambda: make(kind))


def test_a_number_is_counted_and_a_word_is_refused_by_its_key():
    store = make("hash")
    assert [store.add("n", 2), store.add("n", -3)] == [2, -1]
    store.set("word", "x")
    with pytest.raises(StoreKeyError, match="'word'"):
        store.add("word", 1)


def test_the_host_of_the_server_is_known_through_prefixes():
    server = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nested = torch_dist.PrefixStore("a", torch_dist.PrefixStore("b", server))
    assert TorchStore(nested).host == "127.0.0.1"
    assert make("hash").host is None


def test_a_store_of_torch_on_another_host_is_refused(monkeypatch):
    """By the rank that calls it; the rank that has it learns of that."""
    server = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("UNISONO_TLS", "on")
    monkeypatch.setenv("UNISONO_TOKEN", "of the job")
    caller = []
    monkeypatch.setattr(
        unencrypted, "_is_here", lambda host, port: threading.get_ident() not in caller
    )

    def rank_thread(rank):
        inner = server
        if rank == 1:
            caller.append(threading.get_ident())
            inner = torch_dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        store = TorchStore(torch_dist.PrefixStore("a", inner))
        with pytest.raises(UnisonoError) as caught:
            unisono.ProcessGroup(store, rank, 2, timeout=20)
        return type(caught.value), caught.value.what

    text = (
        f"the connection of torch's TCPStore to 127.0.0.1:{server.port} is not encrypted by "
        "unisono, which UNISONO_TLS=on forbids"
    )
    assert on_threads(*(partial(rank_thread, rank) for rank in range(2))) == [
        (RendezvousError, f"rank 0 of 2 cannot meet rank 1: {text}"),
        (UnsupportedError, text),
    ]


def test_a_store_of_torch_on_another_host_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(unencrypted, "_is_here", lambda host, port: False)
    monkeypatch.setattr(log, "_logged", set())
    monkeypatch.setenv("UNISONO_TLS", "auto")
    store, elsewhere = make("hash"), make("tcp")
    for token, count in (("", 0), ("of the job", 1)):
        monkeypatch.setenv("UNISONO_TOKEN", token)
        for each in (store, elsewhere, elsewhere):
            each.check_encryption()
        assert len(caplog.messages) == count
    assert "torch's TCPStore" in caplog.text


class Memory(torch_dist.Store):
    """A torch store in Python, with bytes in the memory of this process.

    Args:
        place: What all handles share.
    """

    def __init__(self, place):
        super().__init__()
        self.place = place

    def set(self, key, value):
        assert (type(key), type(value)) == (str, bytes)
        with self.place:
            self.place.values[key] = value
            self.place.notify_all()

    def get(self, key):
        self.wait([key], self.timeout)
        return self.place.values[key]

    def wait(self, keys, timeout):
        with self.place:
            there = lambda: all(key in self.place.values for key in keys)  # noqa: E731
            if not self.place.wait_for(there, timeout.total_seconds()):
                raise LookupError(f"no {keys}")


class Countable(Memory):
    def add(self, key, amount):
        with self.place:
            total = int(self.place.values.get(key, b"0")) + amount
            self.set(key, str(total).encode())
            return total


class Pollable(Countable):
    wait = torch_dist.Store.wait

    def get(self, key):
        return self.place.values[key]

    def check(self, keys):
        with self.place:
            return all(key in self.place.values for key in keys)

    def compare_set(self, key, expected, desired):
        assert (type(expected), type(desired)) == (bytes, bytes)
        with self.place:
            found = self.place.values.get(key, b"")
            if found == expected:
                self.set(key, desired)
                return desired
            return found or expected


@pytest.mark.parametrize("kind", [Memory, Countable, Pollable])
@pytest.mark.parametrize("has_prefix", [False, True])
def test_ranks_meet_in_a_store_in_python_with_some_operations_only(kind, has_prefix):
    place = threading.Condition()
    place.values = {}
    results = {}

    def run(rank):
        # Each world has numbers of its own in the store.
        for _ in range(2):
            made = kind(place)
            store = torch_dist.PrefixStore("p", made) if has_prefix else made
            group = unisono.ProcessGroup(TorchStore(store), rank, 2, timeout=60)
            x = torch.tensor([rank + 1.0])
            group.all_reduce(x)
            results[rank] = x.item()
            group.barrier()
            group.close()

    both = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert results == {0: 3.0, 1: 3.0}


def test_what_a_store_in_python_lacks_and_raises():
    place = threading.Condition()
    place.values = {}
    store = TorchStore(Memory(place))
    assert not store.check(["k"])
    with pytest.raises(StoreTimeoutError, match="'k'"):
        store.wait(["k"], 0.15)
    with pytest.raises(UnsupportedError, match="lacks an operation"):
        store.add("k", 1)
    assert store.compare_set("k", "", b"\xff") == b"\xff"
    assert store.compare_set("k", "", "2") == b"\xff"
    assert store.multi_get(["k", "k"]) == [b"\xff"] * 2
