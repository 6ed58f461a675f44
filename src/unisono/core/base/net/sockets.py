"""TCP sockets: listen on an address, and connect to the first address that answers."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import random
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from unisono.core.base.deadline import Deadline
from unisono.core.base.host import reason_of
from unisono.core.base.log import get_logger, log_once
from unisono.core.base.net.ports import allowed_ports, none_free, ports_hint, ports_to_try
from unisono.core.platform.peer_user import user_of_peer
from unisono.core.platform.posix import effective_user
from unisono.errors import InvalidArgumentError, StoreConnectionError

CONNECT_S = 3.0
"""Seconds to wait for a silent address if there are others. A host behind a firewall that drops
packets would otherwise take the kernel's 2 minutes."""

STAGGER_S = 0.25
"""Seconds to wait for an address before trying the next in parallel; RFC 8305 section 5."""

_FIRST_BACKOFF_S = 0.01
_LAST_BACKOFF_S = 1.0
_BACKLOG = 4096
_LOCAL_NAMES = {"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"}
_MAPPED = "::ffff:"
_WILDCARDS: dict[int, str] = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}
# Errors of an address family that the host lacks. Another family can still succeed.
_NO_FAMILY = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT}

_SocketAddress = tuple[Any, ...]

_LOG = get_logger("sockets")


def format_address(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    host = _bare(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether `host` means this machine only: a loopback address, or localhost.

    The machine's own name does not, even if /etc/hosts maps it to 127.0.1.1. Other machines resolve
    it to another address.
    """
    host = _bare(host)
    if address := _as_ip(host):
        return address.is_loopback
    return host.lower() in _LOCAL_NAMES or host.lower().endswith(".localhost")


def is_local(sock: socket.socket) -> bool:
    """Return whether the other end of a connection is on this machine."""
    if sock.family not in _WILDCARDS:
        return True
    try:
        peer, own = (
            str(name[0]).removeprefix(_MAPPED) for name in (sock.getpeername(), sock.getsockname())
        )
    except OSError:
        return False
    # A connection to an address of this machine comes from the same address. No other machine can
    # have this address and connect to this machine.
    return is_loopback(peer) or peer == own


def is_foreign(sock: socket.socket) -> bool:
    """Return whether the other end of a local connection belongs to another user, or is gone.

    False also if the system does not report it, which is logged.
    """
    if (user := user_of_peer(sock)) is None:
        log_once(
            _LOG,
            logging.WARNING,
            "this system does not report the user of a local client: without the job's token, "
            "every user of this host counts as its owner",
        )
        return False
    return user != effective_user()


def listen(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on `port` for connections to `host`.

    Port 0 means any free port, or one of UNISONO_PORTS. If `host` is an address of this machine,
    listen on this address only; "::" means both families. If it is an address of another machine, a
    router forwards it to this machine: listen on every interface. `localhost` means loopback.
    Another name may have another address on other machines (here it may be 127.0.1.1). For a name,
    listen on every interface, in the address families that the name has on this machine. If this
    machine cannot resolve the name, as in a pod that is not ready, listen in both families. All
    sockets have the same port.

    Raises:
        StoreConnectionError: The port is in use.
    """
    host = _bare(host)
    try:
        found = _resolve(host, port, passive=True)
    except socket.gaierror as error:
        _LOG.warning(
            "%s does not resolve here (%s); its server listens on all interfaces, for hosts that "
            "resolve it",
            host,
            error.strerror,
        )
        found = _resolve(_WILDCARDS[socket.AF_INET6], port, passive=True)
    failure: OSError | None = None
    for each in [port] if port else ports_to_try():
        sockets, failure = _listen_once(found, host, each)
        if failure is None and sockets:
            return sockets
        for sock in sockets:
            sock.close()
        # A port that is free in one family may be in use in the other.
        if not sockets and (failure is None or failure.errno != errno.EADDRINUSE):
            break
    taken = failure is not None and failure.errno == errno.EADDRINUSE
    if not port and taken and allowed_ports():
        raise StoreConnectionError(
            f"the store server cannot listen: {none_free()}", hint=ports_hint()
        ) from failure
    reason = os.strerror(failure.errno) if failure and failure.errno else "no address"
    raise StoreConnectionError(
        f"the store server cannot listen on {format_address(host, port)}: {reason}",
        hint="another job, or an earlier one, may have this port; port 0 takes any free port, and "
        ".port is its number",
    ) from failure


def is_port_taken(error: StoreConnectionError) -> bool:
    """Return whether `listen` failed because another program has the port."""
    return getattr(error.__cause__, "errno", None) == errno.EADDRINUSE


def listening_host(listeners: Sequence[socket.socket]) -> str:
    """Return an address at which this machine reaches a server that listens here.

    IPv4 if possible: where IPv6 is off, "::" can be bound, but "::1" cannot be reached.
    """
    chosen = next((sock for sock in listeners if sock.family == socket.AF_INET), listeners[0])
    host = str(chosen.getsockname()[0])
    if host == _WILDCARDS[socket.AF_INET6]:
        v6_only = chosen.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        return "::1" if v6_only else "127.0.0.1"
    return "127.0.0.1" if host == _WILDCARDS[socket.AF_INET] else host


def _listen_once(
    found: list[tuple[int, _SocketAddress]], host: str, port: int
) -> tuple[list[socket.socket], OSError | None]:
    """Listen in each family; return the sockets, and the error if a socket failed."""
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, address in found:
        exact = is_loopback(host) or _as_ip(host) is not None
        names = [address[0]] if exact else [_WILDCARDS[family]]
        if exact and not is_loopback(host):
            names.append(_WILDCARDS[family])
        for name in names:
            try:
                sockets.append(_bind(family, name, port or _port_of(sockets), address[3:]))
                break
            except OSError as error:
                if error.errno not in _NO_FAMILY:
                    return sockets, error
                missing = error
    return sockets, None if sockets else missing


def _bare(host: str) -> str:
    return host.removeprefix("[").removesuffix("]")


def _as_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a numeric address, without its interface; None for a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def _port_of(sockets: list[socket.socket]) -> int:
    return int(sockets[0].getsockname()[1]) if sockets else 0


def _bind(family: int, name: str, port: int, scope: _SocketAddress) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # IPv4 has a separate socket, or is not wanted.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # A link-local address is valid only together with its interface.
        sock.bind((name, port, 0, *scope) if scope else (name, port))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def listen_on_fd(fd: int, port: int) -> list[socket.socket]:
    """Return the listening socket of an open file descriptor; the socket owns it then.

    Raises:
        InvalidArgumentError: The socket is bound to another port than `port` (0 = any).
        StoreConnectionError: The file descriptor is no socket.
    """
    try:
        sock = socket.socket(fileno=fd)
        sock.listen(_BACKLOG)
    except OSError as error:
        raise StoreConnectionError(f"master_listen_fd={fd} cannot listen: {error}") from error
    bound = int(sock.getsockname()[1])
    if port not in (0, bound):
        # The caller keeps the file descriptor, so that it can retry.
        sock.detach()
        raise InvalidArgumentError(
            f"master_listen_fd={fd} is bound to port {bound}, expected port {port}"
        )
    return [sock]


def connect(host: str, port: int, deadline: Deadline, *, retry: bool) -> socket.socket:
    """Return a connection to the first address of `host` that answers.

    If an address fails or does not answer within `STAGGER_S`, the next is tried in parallel.

    Args:
        host: Name or address.
        port: Port.
        deadline: End of the attempts.
        retry: Whether to retry, with growing pauses, while no process listens.

    Raises:
        StoreConnectionError: The text has a table of the addresses tried, each with its error.

    Source: RFC 8305, "Happy Eyeballs", for the overlap of attempts.
    """
    backoff_s = _FIRST_BACKOFF_S
    while True:
        failures: list[tuple[str, str]] = []
        try:
            sock = connect_first(_resolve(host, port), deadline, failures, again=retry)
            if sock is not None:
                return sock
        except socket.gaierror as error:
            failures.append((format_address(host, port), str(error.strerror)))
        if not retry or deadline.expired():
            break
        # With jitter a thousand clients do not connect at the same moments.
        time.sleep(min(backoff_s * random.uniform(0.5, 1.0), deadline.remaining()))
        backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)
    waited = f" within {round(deadline.timeout_s, 2):g} s" if retry else ""
    here = socket.gethostname()
    what = (
        f"cannot connect from {here} to the store at {format_address(host, port)}{waited} "
        f"({'; '.join(dict.fromkeys(reason for _, reason in failures))})"
    )
    table = [f"{here} -> {there}: {reason}" for there, reason in failures]
    raise StoreConnectionError(
        "\n    ".join([what, "failed connections:", *table]),
        hint="is rank 0 (or the launcher) running there, and is the port open?",
    )


def connect_first(
    found: list[tuple[int, _SocketAddress]],
    deadline: Deadline,
    failures: list[tuple[str, str]],
    *,
    again: bool,
) -> socket.socket | None:
    """Return the first connection to one of these addresses, or None; add to `failures`.

    If the caller will retry (`again`) and an address has failed, wait at most `CONNECT_S` for
    silent addresses: the server may have started meanwhile.
    """
    todo, soon = deque(found), Deadline(CONNECT_S)
    # Allow time for one attempt even if the deadline has just passed.
    late = Deadline(max(deadline.remaining(), 0.05))
    with selectors.DefaultSelector() as calls:
        try:
            while todo or calls.get_map():
                if todo:
                    family, address = todo.popleft()
                    there = format_address(str(address[0]), int(address[1]))
                    try:
                        sock = begin_call(family, address)
                    except OSError as error:
                        failures.append((there, reason_of(error).lower()))
                        continue
                    calls.register(sock, selectors.EVENT_WRITE, (sock, there))
                limit_s = min((soon if again and failures else late).remaining(), late.remaining())
                ready = calls.select(min(limit_s, STAGGER_S if todo else 1e6))
                for key, _ in ready:
                    called: socket.socket = key.data[0]
                    calls.unregister(called)
                    if not (reason := why_not(called)):
                        called.settimeout(min(max(late.remaining(), 0.05), 1e6))
                        return called
                    called.close()
                    failures.append((key.data[1], reason.lower()))
                if not ready and not todo:
                    break
            failures += [(key.data[1], "timed out") for key in calls.get_map().values()]
        finally:
            for key in list(calls.get_map().values()):
                key.data[0].close()
    return None


def begin_call(family: int, address: _SocketAddress) -> socket.socket:
    """Begin to connect; return the socket. When it is writable, `why_not` returns the result.

    Raises:
        OSError: There is no route to the address.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(BlockingIOError):
            sock.connect(address)
    except OSError:
        sock.close()
        raise
    return sock


def why_not(sock: socket.socket) -> str:
    """Return why a connection attempt failed; "" if it succeeded."""
    if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        return os.strerror(code)
    try:
        # A socket that connects to a free local port reaches itself if the kernel picks this port
        # as the source.
        return "connected to itself" if sock.getsockname() == sock.getpeername() else ""
    except OSError as error:  # the peer has closed the connection already
        return reason_of(error)


def _resolve(host: str, port: int, passive: bool = False) -> list[tuple[int, _SocketAddress]]:
    """Return (family, address) of `host`; for servers (`passive`) one address of each family."""
    name = _bare(host)
    numeric = _as_ip(name)
    if numeric is not None and numeric.version == 6 and numeric.is_unspecified:
        # Both families, by a socket of each.
        v6, v4 = _WILDCARDS[socket.AF_INET6], _WILDCARDS[socket.AF_INET]
        if not passive:
            v6, v4 = "::1", "127.0.0.1"
        return [(int(socket.AF_INET6), (v6, port, 0, 0)), (int(socket.AF_INET), (v4, port))]
    if not passive:
        # A numeric address needs no look-up, which is slow for a thousand clients in one process.
        with contextlib.suppress(OSError):
            socket.inet_pton(socket.AF_INET, name)
            return [(socket.AF_INET, (name, port))]
    flags = socket.AI_PASSIVE if passive else 0
    found: list[tuple[int, _SocketAddress]] = []
    for family, _, _, _, address in socket.getaddrinfo(
        name or None, port, type=socket.SOCK_STREAM, flags=flags
    ):
        seen = [known[0] if passive else known for known in found]
        item = (int(family), address)
        if str(address[0]).startswith(_MAPPED):
            # An IPv4 address in its IPv6 form, on which no IPv6 socket can listen.
            item = (int(socket.AF_INET), (str(address[0])[len(_MAPPED) :], port))
        if item[0] in _WILDCARDS and (item[0] if passive else item) not in seen:
            found.append(item)
    return found


with contextlib.suppress(AttributeError):
    _NO_FAMILY.add(errno.EPFNOSUPPORT)
