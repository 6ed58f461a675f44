"""`unisono bench store`: TCPStore servers and clients beside torch's, and beside Redis."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Any

from unisono.bench.report import machine
from unisono.bench.store_servers import KINDS, Server, why_not
from unisono.errors import StoreConnectionError
from unisono.stores import TCPStore
from unisono.stores.tcp.native_server import engine
from unisono.stores.tcp.wire import MAGIC, Op, encode_request

__all__ = ["bench_store"]

_CALLS = 300
_RAW_OPS = 10_000
_CONNECTIONS = (8, 32, 128)
_MANY = 1024
_LATENCIES = 2000
# A crowd that would take longer than that to connect is left out; so many tell.
_PATIENCE_S = 60.0
_PROBES = 4

# A client, and the server that it talks to; the first pair is what the others are compared with.
_PAIRS = {
    "torch": ("torch", "torch"),
    "torch client": ("torch", "unisono"),
    "unisono": ("unisono", "unisono"),
}
_COLUMNS = (*_PAIRS, "redis")

_CALLED: dict[str, tuple[Callable[[Any], object], int]] = {
    "set and get": (lambda store: (store.set("key", "value"), store.get("key")), 2),
    "get": (lambda store: store.get("key"), 1),
    "add": (lambda store: store.add("number", 1), 1),
}
"""Calls of a store, and how many operations each is."""

Samples = dict[str, list[float]]


class _Results:
    """What was measured: by row and column a value per round."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Samples] = {}

    def add(self, row: str, unit: str, column: str, value: float) -> None:
        self.rows.setdefault((row, unit), {}).setdefault(column, []).append(value)

    def lines(self) -> Iterator[str]:
        """Yield the table."""
        heads = [*_COLUMNS, "torch client/torch", "unisono/torch"]
        yield f"{'':34} {'':6} " + " ".join(f"{head:>12}" for head in heads)
        for (row, unit), samples in self.rows.items():
            cells = [_shown(samples.get(column)) for column in _COLUMNS]
            cells += [_shown(_ratios(samples, column)) for column in ("torch client", "unisono")]
            yield f"{row:34} {unit:6} " + " ".join(
                f"{cell:>{max(12, len(head))}}" for cell, head in zip(cells, heads, strict=True)
            )

    def document(self) -> list[dict[str, Any]]:
        """Return all values, with medians and bests."""
        return [
            {
                "row": row,
                "unit": unit,
                "results": {
                    column: {
                        "median": statistics.median(values),
                        "best": (max if unit == "ops/s" else min)(values),
                        "rounds": [round(value, 3) for value in values],
                    }
                    for column, values in samples.items()
                },
                "ratio_to_torch": {
                    column: statistics.median(ratios)
                    for column in ("torch client", "unisono")
                    if (ratios := _ratios(samples, column))
                },
            }
            for (row, unit), samples in self.rows.items()
        ]


def _ratios(samples: Samples, column: str) -> list[float]:
    """Return column / torch, round by round: what was measured at about the same time."""
    pairs = zip(samples.get(column, ()), samples.get("torch", ()), strict=False)
    return [own / torch for own, torch in pairs if torch]


def _shown(values: list[float] | None) -> str:
    if not values:
        return "-"
    median = statistics.median(values)
    return f"{median:.2f}" if median < 100 else f"{median:.0f}"


def bench_store(rounds: int, path: str | None) -> int:
    """Measure, print the table, write it to a file if one is given; return the exit code."""
    _allow_descriptors()
    results = _Results()
    with contextlib.ExitStack() as stack:
        servers = {}
        for kind in KINDS:
            if reason := why_not(kind):
                print(f"without {kind}: {reason}")
            else:
                servers[kind] = stack.enter_context(Server(kind))
        _memory(servers, results)
        busy = {kind: stack.enter_context(Server(kind)) for kind in servers if kind != "redis"}
        for server in busy.values():
            server.keep_python_busy()
            server.pause()
        if engine() is None:
            print("without throughput and barriers: they need the C++ engine, which is not built")
        for number in range(1, rounds + 1):
            print(f"round {number} of {rounds}", flush=True)
            for part in (_one_client, _connections, _crowd):
                part(servers, results)
            _latency(busy, servers, results)
            # Who comes first shall not always be the same one.
            servers = dict(reversed(servers.items()))
    print("\n".join(results.lines()))
    if path:
        document = {
            "argv": sys.argv[1:],
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "rows": results.document(),
        }
        with open(path, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
    return 0


def _allow_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * _MANY + 256
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def _client(kind: str, port: int) -> Any:
    if kind == "torch":
        dist: Any = import_module("torch.distributed")
        return dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=300))
    return TCPStore("127.0.0.1", port, token="")


def _pairs(servers: dict[str, Server]) -> Iterator[tuple[str, str, Server]]:
    for column, (client, server) in _PAIRS.items():
        if client == "unisono" or "torch" in servers:
            yield column, client, servers[server]


def _one_client(servers: dict[str, Server], results: _Results) -> None:
    """Round trips of the libraries' own clients, and what they cost the server."""
    for column, client, server in _pairs(servers):
        store = _client(client, server.port)
        for name, (call, ops) in _CALLED.items():
            call(store)
            cpu_us, start = server.cpu_us(), time.perf_counter()
            for _ in range(_CALLS):
                call(store)
            time_us = (time.perf_counter() - start) * 1e6
            results.add(f"1 client: {name}", "us", column, time_us / _CALLS)
            cpu_us = (server.cpu_us() - cpu_us) / _CALLS / ops
            results.add(f"server CPU per op: {name}", "us", column, cpu_us)
        del store
    if "redis" in servers:
        with _raw(servers["redis"]) as sock:
            start = time.perf_counter()
            for _ in range(_CALLS):
                for words in (("SET", "key", "value"), ("GET", "key")):
                    sock.send(_resp(*words))
                    sock.recv(100)
            time_us = (time.perf_counter() - start) * 1e6
        results.add("1 client: set and get", "us", "redis", time_us / _CALLS)


def _raw(server: Server) -> socket.socket:
    """Return a connection after the greeting, for frames made here."""
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if server.kind != "redis":
        sock.sendall(encode_request(Op.VALIDATE, MAGIC) + encode_request(Op.PING, 1))
        if sock.recv(4) != (1).to_bytes(4, "little"):
            sock.close()
            raise StoreConnectionError(f"the {server.kind} server did not answer a PING")
    return sock


def _resp(*words: str) -> bytes:
    """Return a Redis command."""
    parts = "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
    return f"*{len(words)}\r\n{parts}".encode()


def _connections(servers: dict[str, Server], results: _Results) -> None:
    """Throughput of adds over many connections, one in flight on each."""
    for count in _CONNECTIONS if engine() is not None else ():
        for server in servers.values():
            request = (
                _resp("INCRBY", "n", "1")
                if server.kind == "redis"
                else encode_request(Op.ADD, "/n", 1)
            )
            cpu_us = server.cpu_us()
            time_s = _load(server, request, count, _RAW_OPS)
            cpu_us = (server.cpu_us() - cpu_us) / _RAW_OPS
            results.add(f"{count} connections: add", "ops/s", server.kind, _RAW_OPS / time_s)
            results.add(f"server CPU per op: {count} connections", "us", server.kind, cpu_us)


def _load(server: Server, request: bytes, connections: int, count: int) -> float:
    """Return the seconds that so many requests take.

    From C++, for the client in Python would take longer than the server for a request, and then
    all servers look alike.
    """
    with _raws(server, connections) as socks:
        seconds: float = engine().store_load([sock.fileno() for sock in socks], request, count)
        return seconds


def _crowd(servers: dict[str, Server], results: _Results) -> None:
    """Connect many clients, and let as many pass a barrier."""
    for column, client, server in _pairs(servers):
        start = time.perf_counter()
        stores = [_client(client, server.port) for _ in range(_PROBES)]
        one_s = (time.perf_counter() - start) / _PROBES
        if one_s * _MANY > _PATIENCE_S:
            # torch's client looks up the names of both ends of a connection.
            print(
                f"without {_MANY} clients of {client}: one takes {one_s:.2f} s to connect; does "
                "the resolver answer for 127.0.0.1?",
                flush=True,
            )
        else:
            stores += [_client(client, server.port) for _ in range(_MANY - _PROBES)]
            time_ms = (time.perf_counter() - start) * 1e3
            results.add(f"{_MANY} clients connect", "ms", column, time_ms)
        for store in stores if client == "unisono" else ():
            store.close()
        del stores
    if engine() is None:
        return
    for server in servers.values():
        if server.kind != "redis":
            time_s = _load(server, encode_request(Op.BARRIER, "/b", _MANY), _MANY, _MANY)
            results.add(f"{_MANY} clients pass a barrier", "ms", server.kind, time_s * 1e3)


def _memory(servers: dict[str, Server], results: _Results) -> None:
    """By how much a server grows per idle client; only a fresh one tells."""
    for server in servers.values():
        before = server.resident_bytes()
        with _raws(server, _MANY):
            grown = (server.resident_bytes() - before) / _MANY / 1024
        results.add("memory per idle client", "KiB", server.kind, grown)


@contextlib.contextmanager
def _raws(server: Server, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_raw(server)) for _ in range(count)]


def _latency(busy: dict[str, Server], servers: dict[str, Server], results: _Results) -> None:
    """Latency while rank 0 does nothing, and while it computes in Python."""
    for kind, server in busy.items():
        for state, measured in (("idle", servers[kind]), ("busy", server)):
            if state == "busy":
                server.go_on()
            store = _client(kind, measured.port)
            latencies = []
            for _ in range(_LATENCIES):
                start = time.perf_counter()
                store.add("number", 1)
                latencies.append((time.perf_counter() - start) * 1e6)
            server.pause()
            p99 = statistics.quantiles(latencies, n=100)[98]
            results.add(f"99 % of adds within, rank 0 {state}", "us", kind, p99)
            del store
