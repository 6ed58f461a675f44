"""Probe the connections between hosts: a responder on each host, and probes that call it.

A caller shows a key, which it found in the store. Then it sends messages, each with its length
before it, and the responder answers each with the time of its clock. So one kind of message
measures the round trip (0 bytes), the clocks, lost packets and the rate.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from unisono.core.base import config
from unisono.core.base.deadline import Deadline
from unisono.core.base.host import reason_of
from unisono.core.base.net.sockets import connect_first, format_address, is_loopback
from unisono.core.base.net.tls import TlsPolicy
from unisono.core.platform.network import resent
from unisono.workbench.cli.doctor.facts import HostLink

MESSAGE_BYTES = 64 * 1024
"""A message of the measurement of rates. With fewer bytes it would measure Python; with more, a
slow link would take seconds."""

_KEY_BYTES = 16
_LENGTH = struct.Struct("!I")
_TIME = struct.Struct("!q")

_CONNECT_S = 3.3
"""Limit for a connection. Linux repeats the first packet after 1 s and after 3 s."""

_IDLE_S = 30.0

_MOST_CALLERS = 1024
"""Each has a thread. A probe has one connection at a time, so more are not from hosts."""

_PINGS = 20
_PINGS_S = 0.5

_BURST_BYTES = 32 * 1024
"""More than 3 full packets at 9,000 bytes each."""

_BURST_S = 1.5
"""Limit for a burst. A lost packet delays it by 0.2 s, or by 0.6 s if it is lost twice."""

_SIZES = (576, 1280, 1400, 1500)
"""Sizes of IP packets to try if full packets disappear: IPv4's and IPv6's least, tunnels, Ethernet.
"""

_IN_FLIGHT = 64
_DRAIN_S = 1.5


class Peer(NamedTuple):
    """Where a host's responder can be reached, as it stands in the store."""

    name: str
    addresses: Sequence[str]
    port: int
    key: str


class Responder:
    """Answers the probes of other hosts, on one thread per connection.

    Args:
        addresses: Addresses of this host.

    Attributes:
        place: The fields of a `Peer` after the name.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        from unisono.core.transports.tcp.address import (
            listen,  # loads NumPy, which the launcher lacks
        )

        self._listeners, port = listen(tuple(addresses))
        # The first byte of a key that is sent plain must not be that of TLS.
        self._key = b"\0" + secrets.token_bytes(_KEY_BYTES - 1)
        usable = [host for host in addresses if not is_loopback(host)]
        self.place = (usable or addresses, port, self._key.hex())
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        for listener in self._listeners:
            listener.setblocking(True)
        for listener in self._listeners:
            self._start(self._accept, listener)

    def close(self) -> None:
        """End all connections and threads."""
        accepting = self._threads[: len(self._listeners)]
        _shut_down(self._listeners)
        for thread in accepting:
            thread.join()
        # No connection is added any more.
        _shut_down(self._connections)
        for thread in self._threads:
            thread.join()
        for listener in self._listeners:
            listener.close()

    def _start(self, target: Any, sock: socket.socket) -> None:
        thread = threading.Thread(target=target, args=(sock,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                if sum(thread.is_alive() for thread in self._threads) > _MOST_CALLERS:
                    sock.close()
                    continue
                self._connections.append(sock)
                self._start(self._greet, sock)

    def _greet(self, plain: socket.socket) -> None:
        """Serve a connection, encrypted if its host begins so."""
        with plain, contextlib.suppress(OSError, EOFError):
            plain.settimeout(_CONNECT_S)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock = _policy(self._key).answer(plain)
            if sock is not plain:
                # `close` shuts the connection down by the socket in the list.
                self._connections[self._connections.index(plain)] = sock
            self._answer(sock)

    def _answer(self, sock: socket.socket) -> None:
        with sock:
            if not hmac.compare_digest(_receive(sock, _KEY_BYTES), self._key):
                return
            sock.settimeout(_IDLE_S)
            while True:
                (nbytes,) = _LENGTH.unpack(_receive(sock, _LENGTH.size))
                if nbytes > MESSAGE_BYTES:
                    return
                _receive(sock, nbytes)
                sock.sendall(_TIME.pack(time.time_ns()))


class Probe:
    """This host's connection to another host, and what it shows.

    Args:
        source: Name of this host.
        peer: The other host's responder.
    """

    def __init__(self, source: str, peer: Peer) -> None:
        self._peer = peer
        self._sock: socket.socket | None = None
        self._facts: dict[str, Any] = {"source": source, "target": peer.name}

    @property
    def link(self) -> HostLink:
        """The facts until now."""
        return HostLink(**self._facts)

    def open(self) -> None:
        """Connect to the first address that answers, as a rank would."""
        port = self._peer.port
        found = [(_family(host), (host, port)) for host in self._peer.addresses]
        failures: list[tuple[str, str]] = []
        sock = connect_first(found, Deadline(_CONNECT_S), failures, again=False)
        if sock is not None:
            there = str(sock.getpeername()[0])
            try:
                sock = _policy(bytes.fromhex(self._peer.key)).call(sock, there)
                self._show_key(sock)
                self._sock = sock
                self._facts["address"] = there
            except (OSError, EOFError) as error:
                sock.close()
                failures.append((format_address(there, port), f"no answer ({reason_of(error)})"))
        self._facts["failures"] = [f"{there}: {reason}" for there, reason in failures]

    def ping(self) -> None:
        """Measure the round trip, and the difference of the clocks in the shortest one."""
        if (sock := self._sock) is None:
            return
        trips: list[tuple[float, float]] = []
        deadline = Deadline(_PINGS_S)
        with contextlib.suppress(OSError, EOFError):
            while len(trips) < _PINGS and not (trips and deadline.expired()):
                before_ns = time.time_ns()
                begin_s = time.perf_counter()
                there_ns = _ask(sock, 0)
                trip_s = time.perf_counter() - begin_s
                trips.append((trip_s, (there_ns - before_ns) / 1e9 - trip_s / 2))
        if trips:
            self._facts |= {"rtt_s": median(s for s, _ in trips), "ahead_s": min(trips)[1]}

    def send_burst(self) -> None:
        """Send several full packets; if they disappear, find the size of packets that arrive."""
        if self._sock is None or _passes(self._sock):
            return
        # A path that loses packets at random seldom stops two connections.
        self.close()
        self.open()
        if self._sock is not None and _passes(self._sock):
            return
        self.close()
        fits = list(itertools.takewhile(self._arrives, _SIZES))
        self._facts |= {"is_stuck": True, "fits_bytes": max(fits, default=0)}

    def measure_rate(self, limit_s: float) -> None:
        """Send as much as arrives within `limit_s`, and read how many packets were lost."""
        if (sock := self._sock) is None:
            return
        message = _LENGTH.pack(MESSAGE_BYTES) + bytes(MESSAGE_BYTES)
        sent = done = 0
        begin_s = time.perf_counter()
        deadline = Deadline(limit_s + _DRAIN_S)
        with contextlib.suppress(OSError, EOFError):
            while (is_early := time.perf_counter() - begin_s < limit_s) or done < sent:
                sock.settimeout(max(deadline.remaining(), 0.001))
                if is_early and sent - done < _IN_FLIGHT:
                    sock.sendall(message)
                    sent += 1
                else:
                    _receive(sock, _TIME.size)
                    done += 1
        if done:
            self._facts["rate_bytes_s"] = done * MESSAGE_BYTES / (time.perf_counter() - begin_s)
        self._facts["resent"] = resent(sock)

    def close(self) -> None:
        """End the connection."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _show_key(self, sock: socket.socket) -> None:
        sock.settimeout(_BURST_S)
        sock.sendall(bytes.fromhex(self._peer.key))
        _ask(sock, 0)

    def _arrives(self, packet_bytes: int) -> bool:
        """Return whether packets of this size arrive, over a new connection."""
        host = str(self._facts["address"])
        headers_bytes = 60 if ":" in host else 40
        with socket.socket(_family(host)) as plain, contextlib.suppress(OSError, EOFError):
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, packet_bytes - headers_bytes)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.settimeout(_BURST_S)
            plain.connect((host, self._peer.port))
            with _policy(bytes.fromhex(self._peer.key)).call(plain, host) as sock:
                self._show_key(sock)
                return _passes(sock)
        return False


def _policy(key: bytes) -> TlsPolicy:
    """Return how connections to a responder are encrypted."""
    return TlsPolicy.of(config.get("UNISONO_TOKEN").encode(), "doctor", key)


def _shut_down(socks: Sequence[socket.socket]) -> None:
    for sock in socks:
        with contextlib.suppress(OSError):
            # close() would not wake a thread that waits in accept() or recv().
            sock.shutdown(socket.SHUT_RDWR)


def _passes(sock: socket.socket) -> bool:
    try:
        sock.settimeout(_BURST_S)
        _ask(sock, _BURST_BYTES)
    except (OSError, EOFError):
        return False
    return True


def _ask(sock: socket.socket, nbytes: int) -> int:
    """Send a message; return the time on the other host's clock when it was read, in ns."""
    sock.sendall(_LENGTH.pack(nbytes) + bytes(nbytes))
    (time_ns,) = _TIME.unpack(_receive(sock, _TIME.size))
    return int(time_ns)


def _receive(sock: socket.socket, nbytes: int) -> bytes:
    """Return exactly `nbytes`.

    Raises:
        EOFError: The connection ended before.
    """
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise EOFError("the connection ended")
        view = view[got:]
    return bytes(data)


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
