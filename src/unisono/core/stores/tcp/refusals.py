"""Clients that a server has refused.

The first client that speaks the protocol, and the reason, stand in the error of ranks that have
waited for the others in vain. Any process can be that client, so it ends no wait.

A server without a token also leaves the address of the first client on another machine under a key
that users cannot write. Ranks that wait for each other read it: a rank of their job was refused, so
they need not wait for it. Only a client that speaks the protocol of a store counts, no port scan.
When the ranks have met, they replace the address, and refused clients have no effect any more.
"""

from __future__ import annotations

import contextlib

from unisono.core.base.net.sockets import format_address
from unisono.core.stores.api import Store
from unisono.core.stores.prefix import innermost
from unisono.core.stores.tcp.client import TCPStore
from unisono.errors import StoreError


def may_refuse(store: Store) -> bool:
    """Return whether the server of a store may refuse clients because it has no token."""
    return _guarded(store) is not None


def refused_client(store: Store) -> str:
    """Return the address of a client that the server has refused so; "" if there is none."""
    inner = _guarded(store)
    return "" if inner is None else inner.refused_client()


def refusal(store: Store) -> str:
    """Return the server, the first client that it has refused, and why, as the end of an error.

    Return "" if there is none.
    """
    inner = innermost(store)
    with contextlib.suppress(StoreError):
        if isinstance(inner, TCPStore) and (text := inner.refusal()):
            return f"; the store at {format_address(inner.host, inner.port)} refused {text}"
    return ""


def forget_refused(store: Store) -> None:
    """Let `refused_client` and `refusal` return "" from now on."""
    if isinstance(inner := innermost(store), TCPStore):
        inner.forget_refused()


def _guarded(store: Store) -> TCPStore | None:
    """Return the TCPStore below the views of a store, if this process has no token for it."""
    inner = innermost(store)
    return inner if isinstance(inner, TCPStore) and not inner.has_token else None
