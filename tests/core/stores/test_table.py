"""The table behind every store: waiting and waking, without threads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.stores.table import StoreTable, checked_sum
from unisono.errors import InvalidArgumentError, StoreKeyError


def test_watch_is_notified_once_when_the_last_key_comes():
    table, woken = StoreTable(), []
    table.watch(["a", "b"], lambda: woken.append("both"))
    table.set("a", b"")
    table.delete_key("a")
    table.set("b", b"")
    assert woken == []
    table.set("a", b"")
    table.set("a", b"again")
    assert woken == ["both"]
    assert table._watches == {}


def test_wait_for_many_keys_looks_at_each_about_once(monkeypatch):
    table, woken, looks = StoreTable(), [], []
    look = StoreTable._is_ready
    monkeypatch.setattr(StoreTable, "_is_ready", lambda *args: looks.append(1) or look(*args))
    names = [f"k{i}" for i in range(200)]
    table.watch(names, lambda: woken.append(1))
    for name in names:
        assert woken == []
        table.set(name, b"")
    assert woken == [1]
    assert len(looks) < 4 * len(names)


def test_unwatch_forgets():
    table, woken = StoreTable(), []
    watch = table.watch(["a", "a"], lambda: woken.append(1))
    table.unwatch(watch)
    table.unwatch(watch)
    table.set("a", b"")
    assert woken == []
    assert table._watches == {}


def test_reserved_value_of_a_queue_is_not_ready():
    table = StoreTable()
    table.queue_push("q", b"1")
    assert table.ready(["q"])
    table.reserved["q"] += 1
    assert not table.ready(["q"])
    assert not table.missing(["q"])
    table.queue_push("q", b"2")
    assert table.ready(["q"])


def test_barrier_withdrawal():
    table, released = StoreTable(), []
    table.arrive("b", 2, "x", lambda: released.append("x"))
    assert table.withdraw("b", "x") == 1
    assert table.withdraw("b", "x") == 0
    table.arrive("b", 2, "y", lambda: released.append("y"))
    assert released == []
    text = "barrier 'b' was entered with world_size=2, now with world_size=3"
    with pytest.raises(InvalidArgumentError, match=f"^{text}"):
        table.arrive("b", 3, "z", lambda: None)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
def test_sum_is_exact_or_refused(old, amount):
    if -(2**63) <= old + amount < 2**63:
        assert checked_sum("k", b"%d" % old, amount) == old + amount
    else:
        with pytest.raises(StoreKeyError, match="64 bits"):
            checked_sum("k", b"%d" % old, amount)


@given(st.binary(max_size=80))
def test_only_integers_are_integers(value):
    try:
        expected = int(value) if b"_" not in value and value.isascii() else None
    except ValueError:
        expected = None
    if expected is None or len(value) > 64:
        with pytest.raises(StoreKeyError, match="not an integer"):
            checked_sum("k", value, 0)
    elif -(2**63) <= expected < 2**63:
        assert checked_sum("k", value, 0) == expected
