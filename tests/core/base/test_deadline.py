import math
from datetime import timedelta

import pytest

from unisono.core.base import deadline as module
from unisono.core.base.deadline import Deadline, to_seconds
from unisono.errors import ArgumentTypeError


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [
        (0, 0),
        (3, 3),
        (2.5, 2.5),
        (math.inf, math.inf),
        (timedelta(minutes=1, milliseconds=5), 60.005),
    ],
)
def test_to_seconds(timeout, seconds):
    assert to_seconds(timeout) == seconds


@pytest.mark.parametrize("timeout", ["3", None, True, 1j, [1]])
def test_not_a_duration(timeout):
    with pytest.raises(ArgumentTypeError) as caught:
        to_seconds(timeout, "patience")
    name = type(timeout).__name__
    assert caught.value.what == (
        f"patience must be seconds (float) or datetime.timedelta, got {name}"
    )


def test_counts_down_and_stops_at_zero(monkeypatch):
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    deadline = Deadline(5)
    assert (deadline.timeout_s, deadline.remaining(), deadline.expired()) == (5, 5, False)
    now = 103.0
    assert (deadline.remaining(), deadline.expired()) == (2, False)
    assert repr(deadline) == "<Deadline 2.000 s of 5 s left>"
    now = 105.0
    assert (deadline.remaining(), deadline.expired()) == (0, True)
    now = 999.0
    assert (deadline.remaining(), deadline.expired()) == (0, True)
    assert Deadline(math.inf).remaining() == math.inf


def test_earlier_is_before_the_deadline_but_not_at_once(monkeypatch):
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    deadline = Deadline(10)
    assert (deadline.remaining(), deadline.earlier(0.5).remaining()) == (10, 9.5)
    assert deadline.earlier(60).remaining() == 2
    now = 101.0
    assert deadline.earlier(0.5).remaining() == 8.5


@pytest.mark.parametrize(
    ("timeout", "told"),
    [
        (30, "30.0 s"),
        (0.5, "0.5 s"),
        (0.1, "0.1 s"),
        (0.02, "20 ms"),
        (0.0005, "0.5 ms"),
        (0, "0 ms"),
    ],
)
def test_a_short_time_out_is_told_in_milliseconds(timeout, told):
    assert str(Deadline(timeout)) == told
