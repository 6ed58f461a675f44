"""Clients on other machines that a server without a token has refused.

The server leaves the address of the first of them under a key that users cannot write. Ranks that
wait for each other read it: a rank of their job was refused, so they need not wait for it. Only a
client that speaks the protocol of a store counts, no port scan. When the ranks have met, they
replace the address, and refused clients have no effect any more.
"""

from __future__ import annotations

from unisono.core.stores.api import Store
from unisono.core.stores.prefix import innermost
from unisono.core.stores.tcp.client import TCPStore


def may_refuse(store: Store) -> bool:
    """Return whether the server of a store may refuse clients because it has no token."""
    return _guarded(store) is not None


def refused_client(store: Store) -> str:
    """Return the address of a client that the server has refused so; "" if there is none."""
    inner = _guarded(store)
    return "" if inner is None else inner.refused_client()


def forget_refused(store: Store) -> None:
    """Let `refused_client` return "" from now on."""
    if (inner := _guarded(store)) is not None:
        inner.forget_refused()


def _guarded(store: Store) -> TCPStore | None:
    """Return the TCPStore below the views of a store, if this process has no token for it."""
    inner = innermost(store)
    return inner if isinstance(inner, TCPStore) and not inner.has_token else None
