"""Find the ranks of running jobs, and ask each rank for its state.

A rank of this host is found through /proc: the name of its receiving thread has the port on which
it listens. The rank answers because the kernel reports that the client is of the same user. The
client asks it because the kernel reports the same of the listening socket. Its
answer has the addresses and tokens of the other ranks, with which ranks of other hosts are asked.
On a host without a rank, the job's store has the addresses, and the job's token opens the ranks.
A rank of torch's own backends does not listen. Its stack alone is known, see
`unisono.core.base.source.stacks`.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, NamedTuple

from unisono.core.base.net.tls import TlsPolicy, TlsRule, rule_for
from unisono.core.base.source.stacks import OfferedStack, offered_stacks
from unisono.core.base.source.where import place_of
from unisono.core.platform.network import listeners, network_of
from unisono.core.platform.processes import (
    all_pids,
    entry_of,
    initial_environment,
    is_of_this_user,
    resident_bytes,
    thread_names,
)
from unisono.core.rendezvous.endpoint import parse_endpoint
from unisono.core.stores import TCPStore
from unisono.core.transports.tcp.address import TCPAddress
from unisono.core.transports.tcp.status import THREAD
from unisono.core.transports.tcp.viewer import (
    NO_KEY,
    VIEWERS,
    key_of,
    opened,
    question,
    secret_by,
)
from unisono.core.transports.tcp.wire import INSPECT

RankState = dict[str, Any]
"""What a rank answers; see `transports.tcp.status.state_of`."""

Endpoint = tuple[str, int, bytes]
"""Address, port, and the key; see `transports.tcp.viewer`."""

# How long a rank has for its answer. A stopped rank keeps `top` waiting for all of it.
_ANSWER_S = 0.7

# A silent rank occupies a thread for all of that time.
_THREADS = 256

# How long a store may take.
_STORE_S = 5.0

# HOST:PORT in place of a run id.
_STORE = re.compile(r".+:\d+")

# The largest answer has 16,384 records of some 500 bytes.
_MOST_BYTES = 1 << 26


def ask_job(which: str | None, token: str = "") -> list[RankState]:
    """Return the states of all ranks that answer.

    Args:
        which: Process id of a rank or launcher, run id of a launcher, or HOST:PORT of a job's
            store; None for all jobs of this user.
        token: Of the job, for its store.

    Raises:
        StoreError: The store cannot be read.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        if which is not None and _STORE.fullmatch(which):
            found = _by_rank(pool.map(_ask, _in_store(which, token)))
            return [found[key] for key in sorted(found)]
        candidates = _candidates(which)
        local = list(_listening(candidates))
        states = _by_rank(pool.map(_ask, local))
        asked = {endpoint[1] for endpoint in local}
        missing = []
        for state in {state["job"]: state for state in states.values()}.values():
            addresses = [TCPAddress.unpack(text) for text in state["addresses"]]
            mine = addresses[state["rank"]]
            for rank, address in enumerate(addresses):
                is_here = str(rank) in state["pids"] or address.hosts == mine.hosts
                # A rank of this host that was asked already is stopped or busy.
                is_silent = is_here and address.port in asked
                if (state["job"], rank) in states or is_silent:
                    continue
                shown = address if is_here else address.seen_from(mine)
                missing += [(host, address.port, address.token) for host in shown.hosts]
        states |= _by_rank(pool.map(_ask, missing))
    known = {pid for state in states.values() for pid in state["pids"].values()}
    offered = offered_stacks(pid for pid in candidates if pid not in known)
    states = _by_rank(map(_state_of_stack, offered)) | states
    return [states[key] for key in sorted(states)]


def _in_store(where: str, token: str) -> list[Endpoint]:
    """Return the addresses of the ranks of all worlds that met in a store."""
    host, port = parse_endpoint(where)
    with closing(TCPStore(host, port, timeout=_STORE_S, token=token)) as store:
        keys = [key for key in store.list_keys() if key.rpartition("/")[2] == VIEWERS]
        lines = [line for text in store.multi_get(keys) for line in text.decode().splitlines()]
    if not token:
        return []  # A process of any user may serve such a store, and make its key.
    elsewhere = TCPAddress((), 0, b"")
    shown = [TCPAddress.unpack(line).seen_from(elsewhere) for line in lines]
    return [(host, each.port, key_of(token, each)) for each in shown for host in each.hosts]


def _by_rank(states: Iterable[RankState | None]) -> dict[tuple[str, int], RankState]:
    return {(state["job"], state["rank"]): state for state in states if state is not None}


def _ask(endpoint: Endpoint) -> RankState | None:
    """Return the state of the rank that listens there; None if it does not answer."""
    answer = exchange(endpoint, INSPECT, _ANSWER_S)
    with contextlib.suppress(ValueError):
        if answer is not None:
            state: RankState = json.loads(answer.data)
            mine = TCPAddress.unpack(state["addresses"][state["rank"]])
            state["endpoint"] = (*endpoint[:2], mine.token)
            return state
    return None


class TimedAnswer(NamedTuple):
    """The answer of a rank, and when the question left and the answer was there."""

    data: bytes
    asked_ns: int
    got_ns: int


def exchange(endpoint: Endpoint, channel: int, within_s: float) -> TimedAnswer | None:
    """Ask a rank and return its answer; None if it refuses, or does not answer in time.

    None also if another process answers, which has not the key.

    Args:
        endpoint: Of the rank.
        channel: INSPECT, RECORDS or CLOCK of `transports.tcp.wire`.
        within_s: How long the connection, and then the answer, may take.
    """
    key = endpoint[2]
    hello = question(channel, key)
    chunks: list[bytes] = []
    nbytes = 0
    with contextlib.suppress(OSError), _call(endpoint, within_s) as sock:
        asked_ns, deadline = time.monotonic_ns(), time.monotonic() + within_s
        sock.sendall(hello.pack())
        while (left_s := deadline - time.monotonic()) > 0:
            sock.settimeout(left_s)
            if not (chunk := sock.recv(1 << 16)):
                got_ns = time.monotonic_ns()
                data = opened(hello, key, b"".join(chunks))
                return None if data is None else TimedAnswer(data, asked_ns, got_ns)
            chunks.append(chunk)
            nbytes += len(chunk)
            if nbytes > _MOST_BYTES:
                return None
    return None


def _call(endpoint: Endpoint, within_s: float) -> socket.socket:
    host, port, key = endpoint
    sock = socket.create_connection((host, port), within_s)
    is_near = key == NO_KEY
    policy = TlsPolicy(TlsRule.NONE, []) if is_near else TlsPolicy(rule_for(key), [secret_by(key)])
    return policy.call(sock, host)


def _state_of_stack(offered: OfferedStack) -> RankState:
    """Return what is known of a rank without a group of unisono."""
    return {
        "job": offered.run_id,
        "rank": offered.rank,
        "world_size": offered.world_size,
        "host": platform.node(),
        "pid": offered.pid,
        "pids": {str(offered.rank): offered.pid},
        "at_s": time.time(),
        "rss_bytes": resident_bytes(offered.pid),
        "place": place_of(offered.rows),
        "groups": [],
        "stacks": [{"thread": "MainThread", "calls": True, "frames": offered.rows}],
    }


# ---- processes of this host -------------------------------------------------------------------


def _candidates(which: str | None) -> list[int]:
    """Return processes of this user that may be ranks."""
    mine = [pid for pid in all_pids() if is_of_this_user(pid)]
    if which is None:
        return mine
    if which.isdecimal():
        parents = {pid: entry.parent for pid in mine if (entry := entry_of(pid))}
        return [pid for pid in mine if int(which) in _line_of(pid, parents)]
    sign = f"TORCHELASTIC_RUN_ID={which}"
    return [pid for pid in mine if sign in initial_environment(pid)]


def _line_of(pid: int, parents: dict[int, int]) -> Iterator[int]:
    """Return a process and its ancestors."""
    while pid > 1:
        yield pid
        pid = parents.get(pid, 0)


def _listening(pids: Iterable[int]) -> Iterator[Endpoint]:
    """Return an address of each socket on which these processes listen for ranks."""
    tables: dict[int, dict[int, str]] = {}
    for pid in pids:
        names = thread_names(pid)
        for port in {int(name.removeprefix(THREAD)) for name in names if name.startswith(THREAD)}:
            with contextlib.suppress(OSError, KeyError):
                network = network_of(pid)
                if network not in tables:
                    tables[network] = listeners(pid)
                yield tables[network][port], port, NO_KEY
