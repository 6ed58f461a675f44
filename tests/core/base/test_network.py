"""The networks of this host, and what variables of other libraries say about them."""

import socket

import pytest

from unisono.core.base.net import interfaces as network
from unisono.core.base.net.interfaces import (
    chosen_hosts,
    interfaces,
    reachable_hosts,
    spans_hosts,
)
from unisono.core.transports.tcp.address import local_hosts

THERE = {
    "lo": ["127.0.0.1", "::1"],
    "docker0": ["172.17.0.1"],
    "eth0": ["10.0.0.1", "fd00::1"],
    "eth1": ["10.1.0.1"],
    "eth10": ["10.2.0.1"],
}
VARIABLES = (
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "UNISONO_TOKEN"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def there(monkeypatch):
    monkeypatch.setattr(network, "interfaces", lambda: dict(THERE))


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(
    ("gloo", "nccl", "expected"),
    [
        ("eth1", "", ["10.1.0.1"]),
        ("eth1,eth0", "", ["10.1.0.1", "10.0.0.1", "fd00::1"]),
        ("eth1", "eth0", ["10.1.0.1"]),
        # Gloo's names are whole, NCCL's are prefixes.
        ("eth", "", []),
        ("", "eth1", ["10.1.0.1", "10.2.0.1"]),
        ("", "=eth1", ["10.1.0.1"]),
        ("", "=eth1,eth0", ["10.1.0.1", "10.0.0.1", "fd00::1"]),
        ("", "^docker,lo", ["10.0.0.1", "fd00::1", "10.1.0.1", "10.2.0.1"]),
        ("", "^=docker0,eth1,lo", ["10.0.0.1", "fd00::1", "10.2.0.1"]),
        ("", "^docker,eth", ["127.0.0.1", "::1"]),
        ("", "^eth", ["172.17.0.1", "127.0.0.1", "::1"]),
        ("lo", "", ["127.0.0.1", "::1"]),
        ("", "", []),
    ],
)
def test_interfaces_by_name(monkeypatch, gloo, nccl, expected):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", gloo)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", nccl)
    assert chosen_hosts() == expected
    if expected:
        assert local_hosts("192.0.2.1") == tuple(expected)


@pytest.mark.usefixtures("there")
def test_name_that_no_interface_has_is_told_once(monkeypatch, caplog):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "wlan7")
    assert [chosen_hosts(), chosen_hosts()] == [[], []]
    (line,) = caplog.messages
    assert line.startswith("GLOO_SOCKET_IFNAME=wlan7 names no interface with an address here")
    assert "lo, docker0, eth0, eth1, eth10" in line
    assert local_hosts("192.0.2.1")


@pytest.mark.parametrize(
    ("size", "local_size", "token", "expected"),
    [
        ("4", "2", "", True),
        ("4", "2", "secret", True),
        ("4", "4", "", False),
        # `unisono run` makes a token on one host, too.
        ("4", "4", "secret", False),
        ("4", "", "", False),
        ("4", "", "secret", True),
        ("", "", "", False),
        ("four", "2", "", False),
    ],
)
def test_what_a_job_says_about_its_hosts(monkeypatch, size, local_size, token, expected):
    values = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": local_size, "UNISONO_TOKEN": token}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no such")
    assert spans_hosts() is expected
    published = local_hosts("localhost")
    if not expected:
        assert set(published) <= {"127.0.0.1", "::1"}
    elif reachable_hosts():
        assert set(published) >= set(reachable_hosts())


def test_interfaces_of_this_host():
    found = interfaces()
    assert set(found) <= {name for _, name in socket.if_nameindex()}
    assert "127.0.0.1" in found.get("lo", ["127.0.0.1"])
