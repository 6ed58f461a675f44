import math
import socket

import pytest

from unisono.core.base.net import silence
from unisono.core.base.net.silence import host_timeout_s, round_trip_us
from unisono.errors import InvalidArgumentError


@pytest.mark.parametrize(("text", "limit_s"), [("", 10.0), ("0", math.inf), ("2.5", 2.5)])
def test_host_timeout(monkeypatch, text, limit_s):
    monkeypatch.setenv("UNISONO_HOST_TIMEOUT", text)
    assert host_timeout_s() == limit_s


@pytest.mark.parametrize("text", ["-1", "0.5", "nan", "soon"])
def test_host_timeout_that_is_none(monkeypatch, text):
    monkeypatch.setenv("UNISONO_HOST_TIMEOUT", text)
    with pytest.raises(InvalidArgumentError, match="UNISONO_HOST_TIMEOUT="):
        host_timeout_s()


def test_round_trip_that_was_not_measured_yet_is_unknown(monkeypatch):
    # As the kernel says it of a connection without a sample.
    monkeypatch.setattr(silence, "is_local", lambda sock: False)
    with socket.socket() as unconnected:
        assert round_trip_us(unconnected) is None
