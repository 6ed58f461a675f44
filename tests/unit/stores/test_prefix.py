"""PrefixStore: views of another store."""

from datetime import timedelta

import pytest

from unisono.errors import ClosedError
from unisono.stores import HashStore, PrefixStore


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
