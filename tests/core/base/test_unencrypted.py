"""Addresses of this host and of others, and what goes to the others unencrypted."""

import pytest

from unisono.core.base.net import unencrypted
from unisono.core.base.net.interfaces import reachable_hosts
from unisono.core.base.net.unencrypted import check_call, strictest
from unisono.errors import UnsupportedError


@pytest.mark.parametrize("mode", ["on", "cert"])
def test_only_calls_of_this_host_may_be_plain(monkeypatch, mode):
    monkeypatch.setenv("UNISONO_TLS", mode)
    for host in ("127.0.0.1", "::1", "localhost", *reachable_hosts()):
        check_call("a client", host, 80, "")
    # 192.0.2.0/24 is nobody's, and the last is no address.
    for host in ("192.0.2.1", "2001:db8::1", "no.such.host.invalid"):
        with pytest.raises(UnsupportedError, match="the connection of a client to ") as caught:
            check_call("a client", host, 80, "do this")
        assert caught.value.what.endswith(
            f":80 is not encrypted by unisono, which UNISONO_TLS={mode} forbids"
        )
        assert caught.value.hint == "do this"


def test_all_ranks_refuse_an_address_that_they_share(monkeypatch):
    """Also the ranks of that host."""
    monkeypatch.setattr(unencrypted, "_is_here", lambda host, port: True)
    monkeypatch.setenv("UNISONO_TLS", "on")
    check_call("a client", "localhost", 80, "", is_shared=True)
    check_call("a client", "198.51.100.1", 80, "")
    with pytest.raises(UnsupportedError, match="is not encrypted by unisono"):
        check_call("a client", "198.51.100.1", 80, "", is_shared=True)


def test_a_name_with_an_address_of_another_host_is_not_here(monkeypatch):
    found = unencrypted.socket.getaddrinfo

    def addresses(host, *rest, **how):
        return [*found("127.0.0.1", *rest, **how), *found("192.0.2.1", *rest, **how)]

    monkeypatch.setenv("UNISONO_TLS", "on")
    monkeypatch.setattr(unencrypted.socket, "getaddrinfo", addresses)
    with pytest.raises(UnsupportedError, match="to name:80 is not encrypted by unisono"):
        check_call("a client", "name", 80, "")


def test_the_strictest_mode_decides():
    assert strictest({"off", "auto", "cert", "on"}) == "on"
    assert strictest({"off", "auto", "cert"}) == "cert"
    assert strictest({"off", "auto"}) == "auto"
    assert strictest({"off"}) == "off"
