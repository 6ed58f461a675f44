"""The store through which the ranks of one group meet.

A process that is no rank serves it, so that the store can be closed while the ranks wait for each
other. The waiting ranks then raise StoreConnectionError at once, not after their time-out.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

from unisono.core.base.deadline import Deadline, Timeout, to_seconds
from unisono.core.base.integers import as_integer
from unisono.core.base.net.sockets import connect, format_address
from unisono.core.stores import TCPStore
from unisono.errors import InvalidArgumentError, NetworkError, StoreConnectionError

# A rank posts STARTED when it reaches the store, JOINED when the group is there, and FAILED with
# the outcome of a call that failed.
STARTED, JOINED, FAILED = "started", "joined", "failed"

_CONNECT_S = 5.0
"""How long a rank waits for an answer of the store's host."""

_stores: dict[str, TCPStore] = {}


class Meeting(NamedTuple):
    """The address of a store, and the group that its ranks make.

    Attributes:
        host: Host of the store's server.
        port: Its port.
        token: Secret of this group alone; it travels in the framework's messages.
        size: Number of ranks.
        timeout_s: Time for the start of all ranks.
        backend: As for `init_process_group`.
        pickler: Name of the framework's module for pickling the errors of ranks.
    """

    host: str
    port: int
    token: str
    size: int
    timeout_s: float
    backend: str | None
    pickler: str

    def __repr__(self) -> str:
        """Return a text without the token, because frameworks log the arguments of tasks."""
        return f"<Meeting of {self.size} ranks at {format_address(self.host, self.port)}>"


def open_meeting(
    host: str, size: int, timeout: Timeout, backend: str | None, pickler: str
) -> Meeting:
    """Serve a new store in this process, under a host name that the ranks can resolve."""
    size = as_integer(size, "size")
    if size < 1:
        raise InvalidArgumentError(f"a group needs at least 1 rank, got {size}")
    timeout_s = to_seconds(timeout)
    token = secrets.token_hex()
    store = _stores[token] = TCPStore(host, 0, is_master=True, token=token)
    return Meeting(host, store.port, token, size, timeout_s, backend, pickler)


def close_meeting(meeting: Meeting) -> None:
    """Close the store if it is open; ranks that wait at it raise StoreConnectionError."""
    if store := _stores.pop(meeting.token, None):
        store.close()


def end_start(meeting: Meeting) -> None:
    """Close the store if ranks still wait at it for others; called after the failure of a rank."""
    if len(posts(meeting, JOINED)) < meeting.size:
        close_meeting(meeting)


def posts(meeting: Meeting, what: str) -> dict[int, bytes]:
    """Return what ranks have posted at the store, by rank; this process serves the store."""
    store = _stores.get(meeting.token)
    keys = {rank: f"{what}/{rank}" for rank in range(meeting.size)}
    return {rank: store.get(key) for rank, key in keys.items() if store and store.check([key])}


def attend(meeting: Meeting) -> TCPStore:
    """Return a client of the store.

    Raises:
        StoreConnectionError: The store is closed, because another rank has failed.
    """
    try:
        # Without a retry: a TCPStore would wait for a server that is not up yet.
        connect(meeting.host, meeting.port, Deadline(_CONNECT_S), retry=False).close()
        return TCPStore(meeting.host, meeting.port, timeout=_CONNECT_S, token=meeting.token)
    except NetworkError as error:
        # A store that closes while this rank shows its token looks like one without a token.
        raise StoreConnectionError(
            f"the store of the group at {format_address(meeting.host, meeting.port)} is closed "
            "because another rank has failed, or cannot be reached"
        ) from error


def post(meeting: Meeting, what: str, rank: int, value: bytes) -> None:
    """Set the value of a rank."""
    store = attend(meeting)
    try:
        store.set(f"{what}/{rank}", value)
    finally:
        store.close()
