"""UNISONO_PORTS: whatever listens without a given port listens in the range."""

import contextlib

import pytest

from tests.support.ports import reserved_port
from unisono.core.base.net.sockets import listen
from unisono.core.stores import TCPStore
from unisono.core.transports.tcp import address
from unisono.errors import InvalidArgumentError, StoreConnectionError, TransportError


@pytest.fixture
def allowed(monkeypatch):
    """Return a function that allows one port, which no other process gets."""
    with contextlib.ExitStack() as stack:

        def allow():
            port = stack.enter_context(reserved_port())
            monkeypatch.setenv("UNISONO_PORTS", f"{port}-{port}")
            return port

        yield allow


@pytest.mark.parametrize("text", ["7000", "7-", "8-7", "0-9", "1-65536", "a-b", "7000:7003"])
def test_no_range(monkeypatch, text):
    monkeypatch.setenv("UNISONO_PORTS", text)
    with pytest.raises(InvalidArgumentError, match=f"UNISONO_PORTS='{text}' is not low-high"):
        listen("127.0.0.1", 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::"])
def test_store_listens_in_the_range_and_one_with_a_port_at_it(allowed, host):
    port = allowed()
    with TCPStore(host, 0, is_master=True) as store:
        assert store.port == port
        with pytest.raises(StoreConnectionError) as caught:
            TCPStore(host, 0, is_master=True)
        with reserved_port() as other, TCPStore(host, other, is_master=True) as given:
            assert given.port == other
    line = f"the store server cannot listen: none of the 1 ports of UNISONO_PORTS={port}-{port} is"
    assert line in caught.value.what
    assert "a port for each of its ranks, and up to 2 for stores" in caught.value.hint


def test_rank_listens_in_the_range(allowed, monkeypatch):
    port = allowed()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    sockets, bound = address.listen(("127.0.0.1", "127.0.0.2"))
    assert bound == port
    line = f"this rank cannot listen: none of the 1 ports of UNISONO_PORTS={port}-{port} is free"
    with pytest.raises(TransportError, match=line) as caught:
        address.listen(("127.0.0.1",))
    assert "(here up to 6)" in caught.value.hint
    for sock in sockets:
        sock.close()


def test_stores_take_the_first_ports_and_ranks_the_last(monkeypatch):
    with reserved_port() as port:
        # Of two ports only the first is known to be free.
        monkeypatch.setenv("UNISONO_PORTS", f"{port}-{min(port + 1, 65535)}")
        with TCPStore("127.0.0.1", 0, is_master=True) as store:
            assert store.port == port


def test_published_addresses_must_be_numeric(monkeypatch):
    monkeypatch.setenv("UNISONO_PUBLISH", "10.0.0.1, a.name")
    with pytest.raises(InvalidArgumentError, match=r"UNISONO_PUBLISH: 'a\.name' is not a numeric"):
        address.own_hosts(None)
    monkeypatch.setenv("UNISONO_PUBLISH", "192.0.2.9")
    hosts = address.own_hosts("127.0.0.1")
    assert hosts[0] == "192.0.2.9"
    assert "127.0.0.1" in hosts
    monkeypatch.setenv("UNISONO_HOST", "127.0.0.3")
    assert address.own_hosts(None) == ("192.0.2.9", "127.0.0.3")
    sockets, port = address.listen(("192.0.2.9", "127.0.0.3"))
    assert [sock.getsockname() for sock in sockets] == [("127.0.0.3", port)]
    for sock in sockets:
        sock.close()
