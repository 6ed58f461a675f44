"""Where a rank can be reached: the addresses it publishes and the socket it listens on."""

from __future__ import annotations

import errno
import ipaddress
import socket
from hashlib import blake2b
from typing import NamedTuple

from unisono.core.base import config
from unisono.core.base.net.interfaces import (
    chosen_hosts,
    named_hosts,
    published_hosts,
    reachable_hosts,
    spans_hosts,
)
from unisono.core.base.net.ports import allowed_ports, none_free, ports_hint, ports_to_try
from unisono.errors import TransportError


class TCPAddress(NamedTuple):
    """Numeric addresses in order of preference, a port, and the token that a caller must show."""

    hosts: tuple[str, ...]
    port: int
    token: bytes

    def pack(self) -> str:
        return f"tcp|{self.port}|{self.token.hex()}|{','.join(self.hosts)}"

    @classmethod
    def unpack(cls, text: str) -> TCPAddress:
        """Decode what `pack` wrote.

        Raises:
            TransportError: The peer published another kind of address, such as inproc.
        """
        scheme, _, rest = text.partition("|")
        if scheme != "tcp":
            raise TransportError(
                f"a peer published {text.partition(':')[0]!r}, this rank uses tcp",
                hint="set UNISONO_TRANSPORT to the same value on all ranks",
            )
        port, token, hosts = rest.split("|")
        return cls(tuple(hosts.split(",")), int(port), bytes.fromhex(token))

    def without_token(self) -> TCPAddress:
        """Return the address with a digest in place of the token, for `viewer.key_of`."""
        return self._replace(token=blake2b(self.token, digest_size=16).digest())

    def seen_from(self, other: TCPAddress) -> TCPAddress:
        """Return the address for a rank with another address: no loopback if the hosts differ.

        The loopback address of another host leads to a process of this host, which must not get the
        token. If there is no other address, the ranks may share the network of one host.
        """
        far = tuple(host for host in self.hosts if not is_loopback(host))
        return self if self.hosts == other.hosts or not far else self._replace(hosts=far)


def is_loopback(host: str) -> bool:
    """Whether a numeric address leads to the host itself."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def own_hosts(store_host: str | None, *, apart: bool | None = None) -> tuple[str, ...]:
    """Return the addresses that this rank publishes, and listens on as far as this host has them.

    UNISONO_PUBLISH comes first, then UNISONO_HOST or `local_hosts`.

    Raises:
        InvalidArgumentError: UNISONO_PUBLISH has no numeric address.
    """
    outside = published_hosts()
    if given := config.get("UNISONO_HOST"):
        hosts = tuple(given.split(","))
    else:
        hosts = local_hosts(store_host, apart=True if outside else apart)
    return tuple(dict.fromkeys((*outside, *hosts)))


def local_hosts(store_host: str | None, *, apart: bool | None = None) -> tuple[str, ...]:
    """Return the addresses under which the other ranks can probably reach this rank.

    GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME limit them.

    Args:
        store_host: Host of the store's server. If it is localhost or a loopback address, the
            world is on one machine and needs loopback only, unless the job has several hosts. A
            host name that resolves to loopback here proves nothing, because it may resolve to
            another address elsewhere.
        apart: Whether the job has several hosts; None: see `spans_hosts`.
    """
    hosts = _source_addresses(store_host) if store_host is not None else []
    is_apart = spans_hosts() if apart is None else apart
    if hosts and store_host and _is_loopback_name(store_host) and not is_apart:
        return tuple(hosts)
    if chosen := chosen_hosts():
        return tuple(chosen)
    hosts += named_hosts()
    if all(map(is_loopback, hosts)):
        hosts += reachable_hosts()
    return tuple(dict.fromkeys(sorted([*hosts, "127.0.0.1"], key=is_loopback)))


def _is_loopback_name(host: str) -> bool:
    """Whether this host name means the local machine on every machine."""
    try:
        return is_loopback(host)
    except ValueError:
        return host == "localhost"


def _source_addresses(host: str) -> list[str]:
    """Return the source addresses of packets to `host`; sends nothing."""
    found = []
    try:
        # A text would import the codec of international names, which takes 4 ms.
        name = host.encode() if host.isascii() else host
        infos = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    for family, kind, proto, _, address in infos:
        try:
            with socket.socket(family, kind, proto) as probe:
                probe.connect(address)
                found.append(str(probe.getsockname()[0]))
        except OSError:
            continue
    return list(dict.fromkeys(found))


def listen(hosts: tuple[str, ...]) -> tuple[list[socket.socket], int]:
    """Listen on each of these addresses and no others; return the sockets and their one port.

    An address that this host does not have is left out if there is another address.

    Raises:
        TransportError: None of them can be listened on, or no port of UNISONO_PORTS is free.
    """
    # From the last: stores take the first ports, which other ranks may have to find.
    for each in reversed(ports_to_try()):
        sockets: list[socket.socket] = []
        failures: dict[str, OSError] = {}
        port = each
        for host in hosts:
            try:
                sockets.append(_listen_on(host, port))
                port = int(sockets[0].getsockname()[1])
            except OSError as error:
                failures[host] = error
        # The port of the first address may be in use on another address.
        taken = any(error.errno == errno.EADDRINUSE for error in failures.values())
        if sockets and not taken:
            return sockets, port
        for sock in sockets:
            sock.close()
        if not taken:
            break
    if taken and allowed_ports():
        raise TransportError(f"this rank cannot listen: {none_free()}", hint=ports_hint())
    reasons = ", ".join(f"{host}: {error.strerror or error}" for host, error in failures.items())
    raise TransportError(
        f"cannot listen on any address of this rank ({reasons})",
        hint="UNISONO_HOST must be an address of this host",
    )


def _listen_on(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if port:
            # The remains of old connections may be there.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # All ranks may connect at once. The kernel limits the number.
        listener.listen(4096)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
