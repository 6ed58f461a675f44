"""Every store passes the public conformance suite."""

import sys
from collections.abc import Callable, Iterator

import pytest

import unisono as dist
from unisono.core.stores import FileStore, HashStore, PrefixStore, Store, TCPStore
from unisono.errors import ArgumentTypeError, InvalidArgumentError
from unisono.testing.store_suite import STORE_CHECKS, check_store


@pytest.fixture(params=["hash", "file", "tcp", "tcp on the Python server"])
def make_base(request, tmp_path, monkeypatch) -> Iterator[Callable[[], Store]]:
    """Return a factory of new, empty stores of one kind."""
    opened: list[Store] = []

    def make() -> Store:
        if request.param == "hash":
            store: Store = HashStore()
        elif request.param == "file":
            store = FileStore(tmp_path / f"store{len(opened)}")
        else:
            if request.param != "tcp":
                monkeypatch.setenv("UNISONO_ENGINE", "reference")
            store = TCPStore("127.0.0.1", 0, is_master=True)
        opened.append(store)
        return store

    yield make
    for store in opened:
        store.close()


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("prefix", [None, "p/q"])
def test_conforms(make_base, prefix, check, monkeypatch):
    # By name, since the package exports the function under the name of its module.
    suite = sys.modules["unisono.testing.store_suite"]
    monkeypatch.setattr(suite, "STORE_CHECKS", (check,))
    check_store(lambda: make_base() if prefix is None else PrefixStore(prefix, make_base()))


def test_suite_notices_a_wrong_store():
    class Forgetful(HashStore):
        def set(self, key, value):
            if key != "b/c":
                super().set(key, value)

    with pytest.raises(AssertionError, match="check of present keys"):
        check_store(Forgetful)

    class WritesWhenClosed(HashStore):
        def clone(self):
            other = super().clone()
            setattr(other, name, getattr(self, name))
            return other

    for name in ("set", "delete_key", "queue_push"):
        with pytest.raises(AssertionError, match=f"{name} on a closed clone: got .*ClosedError"):
            check_store(WritesWhenClosed)


WRONG_TYPE = {
    FileStore: "a path must be str, got ",
    TCPStore: "a host must be str, got ",
}
WRONG_TEXT = {
    FileStore: "cannot be the path of a file",
    TCPStore: "cannot be the name of a host",
}


@pytest.mark.parametrize("store", [FileStore, TCPStore])
def test_a_place_that_cannot_be_is_refused(store):
    for bad in (b"a", 5, None):
        with pytest.raises(ArgumentTypeError, match=WRONG_TYPE[store]):
            store(bad, 1)
    for bad in ("a\0b", "\ud800"):
        with pytest.raises(InvalidArgumentError, match=WRONG_TEXT[store]):
            store(bad, 1)


@pytest.mark.parametrize("host", ["a..b", "a" * 300, "a\0b", "\ud800"])
def test_a_host_name_that_cannot_be_is_refused(host):
    for is_master in (True, False):
        with pytest.raises(InvalidArgumentError, match="cannot be the name of a host"):
            dist.TCPStore(host, 1, is_master=is_master)
    with pytest.raises(InvalidArgumentError, match="cannot be the name of a host"):
        dist.init_process_group(init_method=f"tcp://{host}:1", rank=0, world_size=1)
