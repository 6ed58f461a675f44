"""The transports by name, and how each is made for a rank.

A transport from another package registers by `register_transport`, or is found by the entry-point
group "unisono.transports", whose entries are callables without arguments that register.
"""

from __future__ import annotations

from collections.abc import Callable

from unisono.core.base import config
from unisono.core.base.registry import Registry
from unisono.core.stores import HashStore, Store
from unisono.core.stores.prefix import innermost
from unisono.core.transports.api import Transport
from unisono.core.transports.inproc import InprocTransport
from unisono.core.transports.tcp.address import own_hosts
from unisono.core.transports.tcp.transport import TCPTransport
from unisono.errors import ArgumentTypeError

Find = Callable[[int], str]
TransportFactory = Callable[[Store, int, int, Find], Transport]


def _auto(store: Store, rank: int, world_size: int, find: Find) -> Transport:
    # Ranks are threads if the store cannot leave the process.
    name = "inproc" if isinstance(innermost(store), HashStore) else "tcp"
    return make_transport(name, store, rank, world_size, find)


def _hosts(store: Store) -> tuple[str, ...]:
    inner = innermost(store)
    if isinstance(inner, HashStore) and not config.get("UNISONO_HOST"):
        return ("127.0.0.1",)
    # A store with a server knows its host, and so do torch's stores behind their adapter.
    return own_hosts(getattr(inner, "host", None))


_transports: Registry[TransportFactory] = Registry(
    "transport",
    "unisono.transports",
    {
        "auto": _auto,
        "inproc": lambda store, rank, size, find: InprocTransport(rank, size, find),
        "tcp": lambda store, rank, size, find: TCPTransport(rank, size, find, _hosts(store)),
    },
)


def register_transport(name: str, factory: TransportFactory) -> None:
    """Make a transport known: UNISONO_TRANSPORT and `CPUOptions.transport` can then name it.

    Args:
        name: Lower-case name. Every rank registers it.
        factory: Called as factory(store, rank, world_size, find) on each rank of a new world.
            `find` returns the `address` of another rank, once all ranks have published theirs.

    Raises:
        InvalidArgumentError: The name is taken, or no lower-case identifier.
    """
    _transports.add(name, factory)


def make_transport(name: str, store: Store, rank: int, world_size: int, find: Find) -> Transport:
    """Return a new transport of that name for one rank.

    Raises:
        InvalidArgumentError: The name is unknown; the text lists the known names.
        ArgumentTypeError: Its factory returned no transport, or one without an address.
    """
    transport = _transports.get(name)(store, rank, world_size, find)
    if not isinstance(transport, Transport):
        raise ArgumentTypeError(f"transport {name!r}: the factory returned {transport!r}")
    if not isinstance(getattr(transport, "address", None), str):
        transport.close()
        raise ArgumentTypeError(f"transport {name!r} has set no address, which must be a string")
    return transport
