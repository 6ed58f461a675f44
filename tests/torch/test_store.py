"""torch's stores behind the adapter: the part of the conformance suite that ranks need to meet."""

import sys

import pytest

from unisono.errors import StoreKeyError
from unisono.testing.check_store import STORE_CHECKS, check_store

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
    monkeypatch.setattr(sys.modules["unisono.testing.check_store"], "STORE_CHECKS", (check,))
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
