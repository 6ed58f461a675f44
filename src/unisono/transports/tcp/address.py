"""Where a rank can be reached: the addresses it publishes and the socket it listens on."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct
from hashlib import blake2b
from typing import NamedTuple

from unisono.errors import TransportError

# How often another port is tried if a port is free on the first address only.
_TRIES = 16

# Linux's request for the IPv4 address of an interface; other systems answer with an error.
_SIOCGIFADDR = 0x8915


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


def local_hosts(store_host: str | None) -> tuple[str, ...]:
    """Return the addresses under which the other ranks can probably reach this rank.

    Args:
        store_host: Host of the store's server. If it is localhost or a loopback address, the
            world is on one machine and needs loopback only. A host name that resolves to loopback
            here proves nothing, because it may resolve to another address elsewhere.
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
    if all(map(is_loopback, hosts)):
        # Debian maps the host name to 127.0.1.1, which is useless to other hosts. They need an
        # address of an interface.
        hosts += _interface_addresses()
    return tuple(dict.fromkeys(sorted([*hosts, "127.0.0.1"], key=is_loopback)))


def _is_loopback_name(host: str) -> bool:
    """Whether this host name means the local machine on every machine."""
    try:
        return is_loopback(host)
    except ValueError:
        return host == "localhost"


def _interface_addresses() -> list[str]:
    """Return the addresses of the network interfaces, as far as Linux lists them."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as table:
        for digits, _, _, scope, *_ in map(str.split, table):
            if scope == "00":  # global; other scopes are useless without an interface
                found.append(str(ipaddress.ip_address(bytes.fromhex(digits))))
    return found


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
        # The port of the first address may be in use on another address.
        taken = any(error.errno == errno.EADDRINUSE for error in failures.values())
        if sockets and not taken:
            return sockets, port
        for sock in sockets:
            sock.close()
        if not taken:
            break
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
        listener.bind((host, port))
        # All ranks may connect at once. The kernel limits the number.
        listener.listen(4096)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
