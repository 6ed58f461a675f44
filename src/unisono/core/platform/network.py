"""The networks of this host, and what the kernel knows of TCP connections."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from typing import NamedTuple

from unisono.core.platform.posix import effective_user
from unisono.core.platform.proc import read_text

# Linux's request for the IPv4 address of an interface; other systems answer with an error.
_SIOCGIFADDR = 0x8915
_TABLES = (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6))
_LISTENS = "0A"

# Retransmissions, unanswered probes, packets without an acknowledgement. Milliseconds since data
# were sent, data came, and an acknowledgement came. All retransmissions. Bytes that were not sent
# yet. The shortest round trip in microseconds.
_TCP_INFO = struct.Struct("=2xBB 20x I 16x I 4x II 84x II")
# tcpi_total_retrans and tcpi_segs_out.
_COUNTS = struct.Struct("=100x I 32x I")


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of each network interface, as far as Linux lists them."""
    found: dict[str, list[str]] = {}
    if sys.platform != "win32":
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode())
                with contextlib.suppress(OSError):
                    answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                    found.setdefault(name, []).append(socket.inet_ntoa(answer[20:24]))
    for line in read_text("/proc/net/if_inet6").splitlines():
        digits, _, _, scope, _, name = line.split()
        if scope in ("00", "10"):  # global or the host's; others are useless alone
            address = str(ipaddress.ip_address(bytes.fromhex(digits)))
            found.setdefault(name, []).append(address)
    return found


def network_of(pid: int) -> int:
    """Return the id of the network in which a process of this user is.

    Raises:
        OSError: It has ended, or the system has no such ids.
    """
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def listeners(pid: int) -> dict[int, str]:
    """Return an address for each port on which this user listens in the network of a process."""
    found: dict[int, str] = {}
    for name, family in _TABLES:
        for line in read_text(f"/proc/{pid}/net/{name}").splitlines()[1:]:
            _, local, _, state, _, _, _, user, *_ = line.split(None, 8)
            digits, _, port = local.partition(":")
            if state == _LISTENS and int(user) == effective_user():
                found.setdefault(int(port, 16), _address(digits, family))
    return found


def _address(digits: str, family: int) -> str:
    """Return the address that the table has in words of the machine's byte order."""
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))


class TCPInfo(NamedTuple):
    """The kernel's view of a connection.

    Source: struct tcp_info of linux/tcp.h.
    """

    retransmits: int
    probes: int
    unacknowledged: int
    sent_ms: int
    received_ms: int
    acknowledged_ms: int
    unsent_bytes: int
    round_trip_us: int

    @property
    def heard_s(self) -> float:
        """Seconds since the last packet came."""
        return min(self.received_ms, self.acknowledged_ms) / 1000

    @property
    def is_owed(self) -> bool:
        """Whether the host has not answered the last packet.

        If the receive buffer of a stopped process is full, its host answers each packet without
        acknowledging data. The kernel then sends one at intervals of up to 2 minutes.
        """
        if self.unacknowledged:
            return self.acknowledged_ms >= self.sent_ms
        # An idle connection is probed all the time. A probe that this host cannot send, because its
        # network is down, does not count as unanswered.
        return self.probes > 0 or not self.unsent_bytes


def _info(sock: socket.socket, nbytes: int) -> bytes:
    """Return the beginning of the structure; empty where the system has another, or none."""
    if sys.platform != "linux":
        return b""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, nbytes)


def tcp_info(sock: socket.socket) -> TCPInfo | None:
    """Return the state of a connection; None if the system does not report it, or it is closed."""
    with contextlib.suppress(OSError, struct.error):
        info = _info(sock, _TCP_INFO.size)
        return TCPInfo(*_TCP_INFO.unpack(info))
    return None


def resent(sock: socket.socket) -> float | None:
    """Return the share of packets that the kernel sent again; None if it does not count them."""
    with contextlib.suppress(OSError, struct.error):
        info = _info(sock, _COUNTS.size)
        again, packets = _COUNTS.unpack(info)
        return again / packets if packets else None
    return None
