"""Find the host of the rendezvous store, and the address under which others reach a node."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from unisono.core.base.deadline import Deadline
from unisono.core.base.log import get_logger
from unisono.core.base.net.interfaces import (
    chosen_hosts,
    published_hosts,
    reachable_hosts,
    served_host,
)
from unisono.core.base.net.ports import allowed_ports
from unisono.core.base.net.sockets import is_loopback, is_port_taken
from unisono.core.rendezvous.url import check_port
from unisono.core.stores import Store, TCPStore
from unisono.errors import RendezvousError, StoreConnectionError, StoreTimeoutError

DEFAULT_PORT = 29400
"""Port of an endpoint without a port, the same as torchrun's."""

ANY = ("0.0.0.0", "::")
"""Hosts of a server that mean each address of its host, and nothing elsewhere."""

_SLICE_S = 1.0
_QUIET_S = 4.0
"""Seconds to wait for another node before logging it. Nodes start at different times."""

_LOG = get_logger("rendezvous")


def parse_endpoint(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Return host and port of "host", "host:port" or "[address]:port".

    Raises:
        RendezvousError: There is no host, or the port is not a number.
    """
    host, colon, port = text.rpartition(":")
    if not colon or "]" in port:
        host, port = text, str(default_port)
    elif ":" in host and not host.startswith("["):
        # An IPv6 address without brackets has no port.
        host, port = text, str(default_port)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal():
        raise RendezvousError(f"the rendezvous endpoint {text!r} is not host:port")
    return host, check_port(int(port), f"port of the rendezvous endpoint {text!r}")


def is_of_this_host(host: str, port: int = 0) -> bool:
    """Return whether a name or address belongs to this host, also by UNISONO_PUBLISH.

    Several machines or containers may publish one address. It belongs to this host with the ports
    of UNISONO_PORTS only.

    A name may not resolve here, as in a pod that is not ready. It then belongs to this host if it
    begins with this host's name or vice versa.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        names = (host, socket.gethostname())
        return any(f"{one}.".startswith(f"{other}.") for one, other in (names, names[::-1]))
    outside = published_hosts() if port in allowed_ports() else []
    return any(str(address[0]) in outside for *_, address in found) or _is_assigned(found)


def _is_assigned(found: list[Any]) -> bool:
    """Return whether an interface of this host has one of these results of getaddrinfo."""
    for family, kind, proto, _, address in found:
        try:
            with socket.socket(family, kind, proto) as probe:
                probe.bind(address)
                return True
        except OSError:
            continue
    return False


def address_here(host: str) -> str:
    """Return an address of a server of this host for this host's own processes.

    It is `host`, or localhost if this host does not resolve `host` or is behind NAT.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    return host if _is_assigned(found) else "localhost"


def own_address(host: str, *, serves: bool = False) -> str:
    """Return an address under which the nodes that meet at `host` reach this node; send nothing.

    UNISONO_PUBLISH has it, if it is set. If this process serves the store at `host`, or `host` is
    this host, return `host`, which all nodes can resolve. Do not look it up here: if /etc/hosts
    maps the machine's own name to 127.0.1.1, other nodes cannot use the result. If it is a loopback
    address or means any address, return an address of an interface, if there is one. Otherwise
    return the source address of packets to `host`.

    Raises:
        RendezvousError: There is no route to `host`.
    """
    if outside := published_hosts():
        return outside[0]
    if serves or is_of_this_host(host):
        if is_loopback(host) or host in ANY:
            return next(filter(is_of_this_host, [*chosen_hosts(), *reachable_hosts()]), host)
        return host
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        for family, kind, proto, _, address in found:
            with socket.socket(family, kind, proto) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    except OSError as error:
        raise RendezvousError(f"there is no way to host {host!r}: {error}") from error
    raise RendezvousError(f"host {host!r} has no address")


def open_endpoint(
    host: str,
    port: int,
    *,
    hosting: bool | None,
    timeout_s: float,
    read_timeout_s: float,
    canceled: Callable[[], bool],
) -> TCPStore:
    """Return the store at an endpoint, and run its server if it belongs here.

    Args:
        host: Name or address.
        port: Port.
        hosting: Whether the server must run here. None: run it if `host` is this host and no other
            process (another agent of the job) has the port.
        timeout_s: Seconds to wait for the agent that hosts the store.
        read_timeout_s: Time-out of each later request.
        canceled: Function that is called once a second; True ends the wait.

    Raises:
        RendezvousError: No store answered, or the port is in use.
    """
    deadline, quiet, logged = Deadline(timeout_s), Deadline(_QUIET_S), False
    while True:
        # Decided anew each time, because a name may resolve late.
        if hosting or (hosting is None and is_of_this_host(host, port)):
            try:
                return TCPStore(
                    served_host(host),
                    port,
                    is_master=True,
                    wait_for_workers=False,
                    timeout=read_timeout_s,
                )
            except StoreConnectionError as error:
                if hosting:
                    raise _cannot_host(error) from error
        try:
            store = TCPStore(host, port, timeout=min(_SLICE_S, deadline.remaining()))
        except (StoreConnectionError, StoreTimeoutError) as error:
            if canceled() or deadline.expired():
                raise RendezvousError(
                    f"no rendezvous at {host}:{port} within {timeout_s:g} s: {error.what}",
                    hint="is the agent of that host running, and is the port open? behind NAT set "
                    "UNISONO_PORTS there",
                ) from error
            if quiet.expired() and not logged:
                logged = True
                _LOG.warning("no rendezvous at %s:%d yet: %s", host, port, error.what)
        else:
            store.set_timeout(read_timeout_s)
            return store


def _cannot_host(error: StoreConnectionError) -> RendezvousError:
    if not is_port_taken(error):
        return RendezvousError(f"cannot host the rendezvous here: {error.what}", hint=error.hint)
    return RendezvousError(
        f"cannot host the rendezvous: {error.what}",
        hint="another agent here may have --node-rank 0, too; beside another job, choose another "
        "port (--master-port, --rdzv-endpoint) on all nodes",
    )


def is_host_of(store: Store) -> bool:
    """Return whether this process serves the store to other nodes."""
    return isinstance(store, TCPStore) and store.is_master
