"""Open a store whose place each rank derives: rank 0 takes a free port, the others look for it.

The place is a few hosts and ports. Other programs and other jobs may have some of these ports. Rank
0 marks its store with the name of the job. A rank that finds another store, a program of another
kind or a silent one goes on to the next place.
"""

from __future__ import annotations

import itertools
import random
import socket
import time
from collections.abc import Sequence

from unisono.core.base import config
from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.host import reason_of
from unisono.core.base.log import get_logger
from unisono.core.base.net.sockets import format_address, is_port_taken
from unisono.core.stores import PrefixStore, TCPStore
from unisono.core.stores.tcp.client import RefusalGrace
from unisono.errors import (
    Context,
    HandshakeError,
    RendezvousError,
    StoreConnectionError,
    StoreTimeoutError,
)

ANSWER_S = 3.0
"""How long an address of rank 0 may take to answer. Longer: an unreachable one delays the start."""

_MARK = "here"
# Rank 0 marks its store at once.
_MARK_S = 1.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.01, 1.0
# Ranks start at different times. Later, a rank logs why it has not found the store.
_QUIET_S = 4.0

_LOG = get_logger("rendezvous")


def serve_at(host: str, ports: Sequence[int], job: str, timeout: Timeout) -> TCPStore:
    """Serve the store on the first port that is free.

    Raises:
        RendezvousError: None is free.
        StoreConnectionError: This process may not listen.
    """
    for port in ports:
        try:
            store = TCPStore(host, port, is_master=True, timeout=timeout, multi_tenant=True)
        except StoreConnectionError as error:
            if not is_port_taken(error):
                raise
            _LOG.warning("port %d has another program; rank 0 tries the next port", port)
            continue
        PrefixStore(job, store).set(_MARK, "")
        return store
    raise RendezvousError(
        f"rank 0 cannot listen on {socket.gethostname()}: other programs have the ports "
        f"{', '.join(map(str, ports))}",
        context=Context(rank=0, peers=(0,)),
        hint="set MASTER_PORT to a free port, the same for all processes",
    )


def search(
    hosts: Sequence[str], ports: Sequence[int], job: str, rank: int, timeout: Timeout
) -> TCPStore:
    """Return the store that rank 0 serves on one of the hosts, at one of the ports.

    Raises:
        RendezvousError: It was not found before the time-out; the text has a line for each place.
        HandshakeError: A store refuses this rank, which has no token, and rank 0 is at no other
            place.
    """
    deadline, quiet, pause_s = Deadline(timeout), Deadline(_QUIET_S), _FIRST_PAUSE_S
    reasons: dict[str, str] = {}
    grace = RefusalGrace()
    while True:
        refusal: HandshakeError | None = None
        for port, host in itertools.product(ports, hosts):
            place, limit_s = format_address(host, port), min(ANSWER_S, deadline.remaining())
            try:
                store = _look_at(host, port, job, limit_s, reasons)
            except HandshakeError as error:
                # The store may be another job's.
                store, reasons[place], refusal = None, reason_of(error), error
            if store is not None:
                store.set_timeout(timeout)
                return store
            if deadline.expired():
                break
        if refusal is None:
            grace = RefusalGrace()
        elif grace.over(lambda: "this rank"):
            raise refusal
        table = [f"{place}: {reason}" for place, reason in reasons.items()]
        if deadline.expired():
            text = "\n    ".join(["places:", *table])
            raise RendezvousError(
                f"rank {rank} did not find rank 0 within {deadline.timeout_s:g} s\n    {text}",
                context=Context(rank=rank, peers=(0,)),
                hint="read the log of rank 0, or set MASTER_ADDR and MASTER_PORT",
            )
        if quiet.expired():
            quiet = Deadline(float("inf"))
            _LOG.warning("rank %d has not found rank 0 yet (%s)", rank, "; ".join(table))
        time.sleep(min(pause_s * random.uniform(0.5, 1.0), deadline.remaining()))
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)


def _look_at(
    host: str, port: int, job: str, limit_s: float, reasons: dict[str, str]
) -> TCPStore | None:
    """Return the store of the job if it is there; else add the reason.

    Raises:
        HandshakeError: A store refuses this rank, which has no token.
    """
    place = format_address(host, port)
    try:
        # A TCPStore would wait for a server that is not up yet.
        socket.create_connection((host, port), max(limit_s, 0.1)).close()
        store = TCPStore(host, port, timeout=max(limit_s, 0.1))
    except StoreTimeoutError:
        reasons[place] = "a program has this port, but does not answer"
        return None
    except OSError as error:  # also all other errors of a TCPStore
        refused = isinstance(error, HandshakeError) and "UNISONO_TOKEN" in (error.hint or "")
        if refused and not config.get("UNISONO_TOKEN"):
            raise
        reasons[place] = reason_of(error).lower()
        return None
    try:
        PrefixStore(job, store).wait([_MARK], _MARK_S)
    except (StoreTimeoutError, StoreConnectionError):
        store.close()
        reasons[place] = "the store of another job, or of an earlier world"
        return None
    return store
