"""Where a rank can be reached: the addresses it publishes and the socket it listens on."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct
from typing import NamedTuple

from unisono.errors import TransportError

__all__ = ["TCPAddress", "listen", "local_hosts"]


# How often another port is tried, if one is free on the first address only.
_TRIES = 16

# Linux's request for the IPv4 address of an interface; other systems answer with an error.
_SIOCGIFADDR = 0x8915


class TCPAddress(NamedTuple):
    """Numeric addresses in order of preference, a port, and the token a caller must show."""

    hosts: tuple[str, ...]
    port: int
    token: bytes

    def pack(self) -> str:
        return f"tcp|{self.port}|{self.token.hex()}|{','.join(self.hosts)}"

    @classmethod
    def unpack(cls, text: str) -> TCPAddress:
        """Decode what `pack` wrote.

        Raises:
            TransportError: The peer published something else (another transport, say).
        """
        scheme, _, rest = text.partition("|")
        if scheme != "tcp":
            raise TransportError(
                f"a peer published {text.partition(':')[0]!r}, this rank uses tcp",
                hint="set UNISONO_TRANSPORT to the same value on all ranks",
            )
        port, token, hosts = rest.split("|")
        return cls(tuple(hosts.split(",")), int(port), bytes.fromhex(token))


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def local_hosts(store_host: str | None) -> tuple[str, ...]:
    """Return the addresses under which the other ranks can probably reach this one.

    Args:
        store_host: Where the store's server is. If that is localhost or a loopback address,
            the world lives on one machine and loopback is all it needs. A host name that leads
            to loopback here says nothing: elsewhere it leads to another address.
    """
    hosts: list[str] = []
    if store_host is not None:
        hosts += _source_addresses(store_host)
        if hosts and _is_loopback_name(store_host):
            return tuple(hosts)
    try:
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        infos = []
    hosts += [str(info[4][0]) for info in infos]
    if all(map(_is_loopback, hosts)):
        # Debian maps the host name to 127.0.1.1, of no use to others. Who is asked for the store
        # by that name on another host must be told an address of an interface.
        hosts += _interface_addresses()
    return tuple(dict.fromkeys(sorted([*hosts, "127.0.0.1"], key=_is_loopback)))


def _is_loopback_name(host: str) -> bool:
    """Whether this means the machine it is said on, whichever that is."""
    try:
        return _is_loopback(host)
    except ValueError:
        return host == "localhost"


def _interface_addresses() -> list[str]:
    """Return the addresses of the network interfaces, as far as Linux tells them."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as table:
        for digits, _, _, scope, *_ in map(str.split, table):
            if scope == "00":  # global: the others mean nothing without an interface
                found.append(str(ipaddress.ip_address(bytes.fromhex(digits))))
    return found


def _source_addresses(host: str) -> list[str]:
    """Return the own addresses that packets to `host` would carry; sends nothing."""
    found = []
    try:
        infos = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
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
    """Listen on each of these addresses, and on no other; return the sockets and their one port.

    An address that this host does not have (anymore, or yet) is left out if there is another one.

    Raises:
        TransportError: None of them can be listened on.
    """
    for _ in range(_TRIES):
        sockets: list[socket.socket] = []
        failures: dict[str, OSError] = {}
        port = 0
        for host in hosts:
            try:
                sockets.append(_listen_on(host, port))
                port = int(sockets[0].getsockname()[1])
            except OSError as error:
                failures[host] = error
        # The port that the first address got may be in use on another one.
        taken = any(error.errno == errno.EADDRINUSE for error in failures.values())
        if sockets and not taken:
            return sockets, port
        for sock in sockets:
            sock.close()
        if not taken:
            break
    told = ", ".join(f"{host}: {error.strerror or error}" for host, error in failures.items())
    raise TransportError(
        f"cannot listen on any address of this rank ({told})",
        hint="UNISONO_HOST must be an address of this host",
    )


def _listen_on(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
        # As many callers as there are ranks may come at once; the kernel caps the number.
        listener.listen(4096)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
