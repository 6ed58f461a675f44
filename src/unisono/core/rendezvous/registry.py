"""The table of URL schemes, and the function that picks a handler from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit, urlunsplit

from unisono.core.base import config
from unisono.core.base.deadline import Timeout
from unisono.core.base.integers import as_integer
from unisono.core.rendezvous import handlers, services
from unisono.core.rendezvous.url import parse_query
from unisono.core.stores import Store
from unisono.errors import ArgumentTypeError, RendezvousError

Handler = Callable[..., Iterator[tuple[Store, int, int]]]
"""handler(url, timeout=..., **options) yields (store, rank, world_size), once per rendezvous."""

_HANDLERS: dict[str, Handler] = {
    "env": handlers.env_handler,
    "file": handlers.file_handler,
    "tcp": handlers.tcp_handler,
    **dict.fromkeys(services.SCHEMES, services.service_handler),
}


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Let `handler` serve URLs that begin with "<scheme>://".

    Raises:
        RendezvousError: The scheme is taken.

    Source: torch.distributed.rendezvous, torch 2.13.
    """
    if scheme in _HANDLERS:
        raise RendezvousError(
            f"a rendezvous handler for {scheme}:// is already registered "
            f"(registered: {_registered()})"
        )
    _HANDLERS[scheme] = handler


def rendezvous(
    url: str,
    rank: int = -1,
    world_size: int = -1,
    *,
    timeout: Timeout | None = None,
    **options: object,
) -> Iterator[tuple[Store, int, int]]:
    """Return a generator that yields (store, rank, world_size) when the store is open.

    Args:
        url: env://, tcp://host:port, file:///path, redis://host:port/prefix,
            etcd://host:port/prefix, or a registered scheme.
        rank: This rank; -1 to take it from the URL or the environment.
        world_size: Number of ranks; -1 to take it from the URL or the environment.
        timeout: Default time-out of the store, also to connect; UNISONO_TIMEOUT if None.
        options: Passed to the handler.

    Raises:
        RendezvousError: Unknown scheme, or a value that is missing, bad or given twice.

    Source: torch.distributed.rendezvous, torch 2.13.
    """
    if not isinstance(url, str):
        raise ArgumentTypeError(f"url must be str, got {type(url).__name__}")
    rank, world_size = as_integer(rank, "rank"), as_integer(world_size, "world_size")
    parts = urlsplit(url)
    handler = _HANDLERS.get(parts.scheme)
    if handler is None:
        raise RendezvousError(
            f"no rendezvous handler for {parts.scheme}:// in {url!r} (registered: {_registered()})"
        )
    given = {"rank": rank, "world_size": world_size}
    if rank != -1 or world_size != -1:
        query = parse_query(url)
        if twice := sorted(query.keys() & given.keys()):
            raise RendezvousError(
                f"given twice: {' and '.join(twice)} in the URL {url!r}, and the arguments "
                f"rank={rank}, world_size={world_size}"
            )
        query |= {name: str(number) for name, number in given.items() if number != -1}
        joined = "&".join(f"{name}={text}" for name, text in query.items())
        url = urlunsplit(parts._replace(query=joined))
        if parts.scheme == "env" and not parts.netloc:
            # urlunsplit drops the slashes of an empty host.
            url = f"env://?{joined}"
    timeout = config.get_float("UNISONO_TIMEOUT") if timeout is None else timeout
    return handler(url, timeout=timeout, **options)


def _registered() -> str:
    return ", ".join(f"{scheme}://" for scheme in sorted(_HANDLERS))
