"""redis:// and etcd://: meet in a service that runs independently of the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

from unisono.core.base import config
from unisono.core.base.deadline import Timeout
from unisono.core.rendezvous.endpoint import parse_endpoint
from unisono.core.rendezvous.launchers import job_of
from unisono.core.rendezvous.url import once, parse_integer, parse_query, rank_and_size
from unisono.core.stores import PrefixStore, Store
from unisono.errors import RendezvousError

_PREFIX = "unisono"
_OURS = {"rank", "world_size", "run_id"}
_REDIS_PORT, _ETCD_PORT = 6379, 2379
_OPTIONS = {
    "redis": {"db"},
    "rediss": {"db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile"},
    "etcd": set[str](),
    "etcds": {"ca_cert", "cert_cert", "cert_key"},
}
SCHEMES = tuple(_OPTIONS)


def service_handler(url: str, timeout: Timeout) -> Iterator[tuple[Store, int, int]]:
    """Meet at redis://host:port/prefix or etcd://host:port,host:port/prefix?rank=&world_size=.

    The keys of a run are below prefix/run_id. A launcher that names its jobs supplies the run id.
    The last rank to leave deletes the keys. A run without an id waits while the keys of another run
    exist, and reports them when its time-out ends.

    Raises:
        RendezvousError: A part of the URL is missing or bad.
        StoreConnectionError: The service does not answer.
    """
    scheme = f"{urlsplit(url).scheme}://"
    rank, world_size = rank_and_size(url, scheme)
    run_id = parse_query(url).get("run_id") or job_of(config.environ())
    store = open_service(url, run_id, world_size=world_size, timeout=timeout)
    yield from once(scheme, store, rank, world_size)


def open_service(url: str, run_id: str, *, world_size: int = -1, timeout: Timeout) -> Store:
    """Open the store of a URL with a scheme of `SCHEMES`.

    Raises:
        RendezvousError: A part of the URL is bad. The text names it.
        UnsupportedError: The service's client is not installed.
        StoreConnectionError: The service does not answer.
    """
    parts = urlsplit(url)
    options: dict[str, Any] = {"world_size": world_size, "timeout": timeout}
    for name, text in parse_query(url).items():
        if name in _OPTIONS[parts.scheme]:
            options[name] = (
                parse_integer(text, f"{name} in the URL {url!r}") if name == "db" else text
            )
        elif name not in _OURS:
            known = ", ".join(sorted(_OURS | _OPTIONS[parts.scheme]))
            raise RendezvousError(f"unknown {name} in the URL {url!r} (known: {known})")
    prefix = "/".join(filter(None, (parts.path.strip("/") or _PREFIX, run_id)))
    user, _, places = parts.netloc.rpartition("@")
    if parts.scheme.startswith("etcd"):
        # Imported here because most programs use neither etcd nor Redis.
        from unisono.core.stores.services.etcd import EtcdStore

        if user:
            raise RendezvousError(f"the URL {url!r} has a user, which etcd:// does not support")
        if parts.scheme == "etcds":
            options["protocol"] = "https"
        return EtcdStore(_places(url, places, _ETCD_PORT), prefix, **options)
    from unisono.core.stores.services.redis import RedisStore

    name, _, password = map(unquote, user.partition(":"))
    credentials = {"username": name or None, "password": password or None}
    options |= {key: text for key, text in credentials.items() if text}
    if parts.scheme == "rediss":
        options["ssl"] = True
    ((host, port), *others) = _places(url, places, _REDIS_PORT)
    if others:
        raise RendezvousError(f"the URL {url!r} names several hosts, redis:// takes one")
    return RedisStore(host, port, prefix, **options)


def open_launched(url: str, timeout: Timeout) -> Store:
    """Open the workers' store at a URL that `unisono run` made; the agents delete its keys.

    Raises:
        RendezvousError: A part of the URL is bad. The text names it.
        UnsupportedError: The service's client is not installed.
        StoreConnectionError: The service does not answer.
    """
    part = unquote(parse_query(url).get("run_id", ""))
    if urlsplit(url).scheme not in _OPTIONS:
        raise RendezvousError(f"UNISONO_STORE expected {', '.join(SCHEMES)} as scheme, got {url!r}")
    return PrefixStore(part, open_service(url, "", timeout=timeout), owns_store=True)


def service_host(url: str) -> str:
    """Return the first host of a URL."""
    return _places(url, urlsplit(url).netloc.rpartition("@")[2], 0)[0][0]


def _places(url: str, text: str, default_port: int) -> list[tuple[str, int]]:
    try:
        return [parse_endpoint(each, default_port) for each in text.split(",")]
    except RendezvousError as error:
        raise RendezvousError(f"bad host or port in the URL {url!r}: {error.what}") from None
