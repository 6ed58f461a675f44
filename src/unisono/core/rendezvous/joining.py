"""The store of a job for a newcomer, which has no rank yet and never serves the store."""

from __future__ import annotations

from urllib.parse import urlsplit

from unisono.core.base import config
from unisono.core.base.deadline import Timeout
from unisono.core.rendezvous import services
from unisono.core.rendezvous.handlers import attempt_prefix, master
from unisono.core.rendezvous.launchers import job_of
from unisono.core.rendezvous.url import host_and_port, parse_query
from unisono.core.stores import FileStore, PrefixStore, Store, TCPStore
from unisono.errors import RendezvousError


def open_for_newcomer(url: str, timeout: Timeout) -> Store:
    """Open the store that the ranks of a job opened with the same URL.

    Args:
        url: env://, tcp://host:port, file:///path, redis://... or etcd://..., without a rank.
        timeout: Default time-out of the store, also to connect.

    Raises:
        RendezvousError: Another scheme, or a variable that is missing or bad.
        StoreConnectionError: The store does not answer.
    """
    parts = urlsplit(url)
    run_id = parse_query(url).get("run_id") or job_of(config.environ())
    # A world size would let a file of a killed rank be replaced, and keys be deleted too early.
    if parts.scheme == "file":
        return FileStore(parts.path, timeout=timeout, run_id=run_id)
    if parts.scheme in services.SCHEMES:
        return services.open_service(url, run_id, timeout=timeout)
    if parts.scheme not in ("env", "tcp"):
        raise RendezvousError(
            f"a newcomer (UNISONO_JOIN=1) cannot join at {url!r}: it joins by env://, tcp://, "
            "file://, redis:// or etcd://"
        )
    if parts.scheme == "env" and (launched := config.get("UNISONO_STORE")):
        return services.open_launched(launched, timeout)
    host, port = master() if parts.scheme == "env" else host_and_port(url)
    store = TCPStore(host, port, timeout=timeout)
    prefix = attempt_prefix()
    return PrefixStore(prefix, store, owns_store=True) if prefix else store
