"""Parse rendezvous URLs."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from unisono.core.base.log import get_logger
from unisono.core.stores import Store
from unisono.errors import RendezvousError

_LOG = get_logger("rendezvous")
_MAX_PORT = 65535


def parse_query(url: str) -> dict[str, str]:
    """Return the parameters after the question mark.

    Raises:
        RendezvousError: A part is not name=value, or a name occurs twice.
    """
    found: dict[str, str] = {}
    for part in filter(None, urlsplit(url).query.split("&")):
        name, equals, text = part.partition("=")
        if not equals or not name:
            raise RendezvousError(f"{part!r} in the URL {url!r} is not name=value")
        if name in found:
            raise RendezvousError(f"{name} occurs twice in the URL {url!r}")
        found[name] = text
    return found


def warn_unknown(url: str, query: dict[str, str], known: set[str]) -> None:
    """Warn about parameters that a method does not have; torch ignores them silently."""
    if unknown := sorted(query.keys() - known - {"use_libuv"}):
        _LOG.warning(
            "the URL %r: %s has no meaning there and is ignored (known: %s)",
            url,
            " and ".join(unknown),
            ", ".join(sorted(known)),
        )


def parse_integer(text: str, what: str) -> int:
    """Return the integer in a text; `what` names the value in the error.

    Raises:
        RendezvousError: The text is no integer.
    """
    try:
        return int(text)
    except ValueError:
        raise RendezvousError(f"{what} must be an integer, got {text!r}") from None


def ranks_of(rank: int, world_size: int, where: str) -> tuple[int, int]:
    """Return (rank, world_size) if 0 <= rank < world_size.

    Raises:
        RendezvousError: Out of range.
    """
    if world_size < 1:
        raise RendezvousError(f"{where}: world_size must be at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise RendezvousError(f"{where}: rank must be 0 to {world_size - 1}, got {rank}")
    return rank, world_size


def rank_and_size(url: str, scheme: str) -> tuple[int, int]:
    """Return `rank` and `world_size` of a URL's query.

    Raises:
        RendezvousError: A value is missing or bad.
    """
    query = parse_query(url)
    for name in ("rank", "world_size"):
        if name not in query:
            raise RendezvousError(
                f"{scheme} rendezvous: {name} is missing; write it into the URL "
                f"({scheme}...?rank=0&world_size=2) or pass it as an argument"
            )
    rank = parse_integer(query["rank"], f"{scheme} rendezvous: rank")
    world_size = parse_integer(query["world_size"], f"{scheme} rendezvous: world_size")
    return ranks_of(rank, world_size, f"{scheme} rendezvous")


def check_port(port: int, what: str) -> int:
    """Return a port number.

    Raises:
        RendezvousError: Out of range.
    """
    if not 0 <= port <= _MAX_PORT:
        raise RendezvousError(f"{what} must be 0 to {_MAX_PORT}, got {port}")
    return port


def host_and_port(url: str) -> tuple[str, int]:
    """Return the host and port of a tcp:// URL; IPv6 addresses must be in brackets.

    Raises:
        RendezvousError: The host or the port is missing, or the port is not a valid number.
    """
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise RendezvousError(f"bad host or port in the URL {url!r}: {error}") from None
    if not host:
        raise RendezvousError(f"the URL {url!r} has no host; write tcp://host:port")
    if port is None:
        raise RendezvousError(f"the URL {url!r} has no port; write tcp://host:port")
    return host, port


def once(scheme: str, store: Store, rank: int, world_size: int) -> Iterator[tuple[Store, int, int]]:
    """Yield the result of a rendezvous that cannot meet again."""
    yield store, rank, world_size
    raise RendezvousError(f"{scheme} rendezvous yields once; it cannot meet again")
