"""PrefixStore: views of another store."""

from datetime import timedelta

import pytest

from unisono.core.stores import HashStore, PrefixStore, Store
from unisono.errors import ClosedError


def test_keys_get_the_prefix():
    base = HashStore()
    outer = PrefixStore("a", base)
    inner = PrefixStore("b", outer)
    inner.set("k", "v")
    assert base.list_keys() == ["a/b/k"]
    assert outer.list_keys() == ["b/k"]
    assert inner.list_keys() == ["k"]
    assert inner.underlying_store is outer
    assert inner._underlying_non_prefix_store is base


def test_prefix_ends_at_the_slash():
    # torch compares the start of the string only, and lists "x/k" under "a" when "ax/k" exists.
    base = HashStore()
    base.set("ax/k", "v")
    base.set("a/k", "v")
    assert PrefixStore("a", base).list_keys() == ["k"]


def test_empty_prefix_is_a_slash():
    base = HashStore()
    PrefixStore("", base).set("k", "v")
    assert base.list_keys() == ["/k"]


def test_timeout_is_that_of_the_store_below():
    base = HashStore()
    view = PrefixStore("a", base)
    view.set_timeout(timedelta(seconds=7))
    assert base.timeout == view.timeout == timedelta(seconds=7)


def test_closing_a_view_keeps_the_store_open():
    base = HashStore()
    view = PrefixStore("a", base)
    clone = view.clone()
    clone.close()
    view.close()
    with pytest.raises(ClosedError):
        view.get("k")
    base.set("k", "v")
    assert base.get("k") == b"v"


def test_a_store_of_a_user_may_have_some_of_the_methods():
    class OnlyValues(Store):
        def __init__(self):
            super().__init__()
            self.values = {}

        def set(self, key, value):
            self.values[key] = value

        def get(self, key, timeout=None):
            return self.values[key]

    base = OnlyValues()
    with PrefixStore("a", base) as store:
        store.set("k", b"v")
        store.multi_set(["l"], [b"w"])
        assert base.values == {"a/k": b"v", "a/l": b"w"}
        assert store.multi_get(["l", "k"]) == [b"w", b"v"]
        for name, arguments in {
            "add": ("k", 1),
            "append": ("k", "v"),
            "barrier": ("k", 1),
            "check": (["k"],),
            "clone": (),
            "compare_set": ("k", "", ""),
            "delete_key": ("k",),
            "num_keys": (),
            "queue_len": ("k",),
            "wait": (["k"],),
        }.items():
            with pytest.raises(NotImplementedError, match=f"OnlyValues has no {name}"):
                getattr(store, name)(*arguments)


def test_the_store_below_gets_the_arguments_that_torch_gives():
    """Methods without time-outs, and values as bytes, as in torch's tests of stores in Python."""

    class Recorder(Store):
        def __init__(self):
            super().__init__()
            self.seen = []

        def get(self, key):
            self.seen.append(key)
            return b""

        def wait(self, keys):
            self.seen.append(keys)

        def multi_get(self, keys):
            self.seen.append(keys)
            return [b"x", b"y"]

        def multi_set(self, keys, values):
            self.seen.append((keys, values))

        def append(self, key, value):
            self.seen.append((key, value))

        def compare_set(self, key, expected, desired):
            self.seen.append((key, expected, desired))
            return desired

        def has_extended_api(self):
            return True

    base = Recorder()
    store = PrefixStore("p", base)
    assert store.has_extended_api()
    assert store.multi_get(["foo", "bar"]) == [b"x", b"y"]
    store.multi_set(["foo"], ["x"])
    store.append("foo", "bar")
    store.compare_set("foo", "", "bar")
    store.get("foo")
    store.wait(["foo"])
    assert base.seen == [
        ["p/foo", "p/bar"],
        (["p/foo"], [b"x"]),
        ("p/foo", b"bar"),
        ("p/foo", b"", b"bar"),
        "p/foo",
        ["p/foo"],
    ]
