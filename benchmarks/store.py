"""Measure TCPStore servers and clients beside torch's, and beside Redis.

Run from the repository root: `python benchmarks/store.py [--rounds 15] [--json FILE]`. Throughput
and barriers need a C++ compiler, which builds `store_load.cpp`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from store_servers import KINDS, Server, why_not

from unisono.core.stores import TCPStore
from unisono.core.stores.tcp.wire import MAGIC, RequestOp, encode_request
from unisono.errors import StoreConnectionError
from unisono.workbench.bench.report import machine

_CALLS = 300
_RAW_OPS = 10_000
_CONNECTIONS = (8, 32, 128)
_MANY = 1024
_LATENCIES = 2000
# If `_MANY` clients would take longer to connect, they are left out. `_PROBES` clients are timed
# to predict it.
_PATIENCE_S = 60.0
_PROBES = 4

# Column -> client and server. The other pairs are compared with the first.
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
"""Name -> call on a store, and the number of operations in it."""

Samples = dict[str, list[float]]
# (server, request, number of connections, number of requests) -> seconds
Load = Callable[[Server, bytes, int, int], float]


class _Results:
    """The measurements: by row and column a value per round."""

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
    """Return column / torch for each round, because a round's values were measured together."""
    pairs = zip(samples.get(column, ()), samples.get("torch", ()), strict=False)
    return [own / torch for own, torch in pairs if torch]


def _shown(values: list[float] | None) -> str:
    if not values:
        return "-"
    median = statistics.median(values)
    return f"{median:.2f}" if median < 100 else f"{median:.0f}"


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, and write it to a file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds (15)")
    parser.add_argument("--json", metavar="FILE", help="write all measurements to a file, as JSON")
    options = parser.parse_args(argv)
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
        load = _build_load(stack.enter_context(tempfile.TemporaryDirectory()))
        for number in range(1, options.rounds + 1):
            print(f"round {number} of {options.rounds}", flush=True)
            _one_client(servers, results)
            _crowd(servers, results)
            if load is not None:
                _connections(servers, load, results)
                _barrier(servers, load, results)
            _latency(busy, servers, results)
            # Change the order, so that no server is always the first.
            servers = dict(reversed(servers.items()))
    print("\n".join(results.lines()))
    if options.json:
        document = {
            "argv": ["python", "benchmarks/store.py", *(sys.argv[1:] if argv is None else argv)],
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "rows": results.document(),
        }
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)


def _build_load(folder: str) -> Load | None:
    """Compile the load driver into a folder; return None without a compiler.

    The driver is in C++, because a Python client takes longer for a request than a server. The
    throughput of all servers would then be equal.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        print("without throughput and barriers: they need a C++ compiler")
        return None
    program = os.path.join(folder, "store_load")
    source = str(Path(__file__).with_name("store_load.cpp"))
    subprocess.run([compiler, "-std=c++17", "-O2", "-o", program, source], check=True)
    return partial(_drive, program)


def _drive(program: str, server: Server, request: bytes, connections: int, count: int) -> float:
    """Send `count` requests over some connections; return the seconds that this took."""
    with _raws(server, connections) as socks:
        fds = [sock.fileno() for sock in socks]
        command = [program, str(count), *map(str, fds)]
        done = subprocess.run(
            command, input=request, stdout=subprocess.PIPE, pass_fds=fds, check=True
        )
    return float(done.stdout)


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
    """Measure round trips of each library's client, and the server's CPU time for them."""
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
    """Return a connection after the handshake, for raw requests."""
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if server.kind != "redis":
        sock.sendall(encode_request(RequestOp.VALIDATE, MAGIC) + encode_request(RequestOp.PING, 1))
        if sock.recv(4) != (1).to_bytes(4, "little"):
            sock.close()
            raise StoreConnectionError(f"the {server.kind} server did not answer a PING")
    return sock


def _resp(*words: str) -> bytes:
    """Return a Redis command."""
    parts = "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
    return f"*{len(words)}\r\n{parts}".encode()


def _connections(servers: dict[str, Server], load: Load, results: _Results) -> None:
    """Measure the throughput of adds over many connections, with one in flight on each."""
    for count in _CONNECTIONS:
        for server in servers.values():
            request = (
                _resp("INCRBY", "n", "1")
                if server.kind == "redis"
                else encode_request(RequestOp.ADD, "/n", 1)
            )
            cpu_us = server.cpu_us()
            time_s = load(server, request, count, _RAW_OPS)
            cpu_us = (server.cpu_us() - cpu_us) / _RAW_OPS
            results.add(f"{count} connections: add", "ops/s", server.kind, _RAW_OPS / time_s)
            results.add(f"server CPU per op: {count} connections", "us", server.kind, cpu_us)


def _crowd(servers: dict[str, Server], results: _Results) -> None:
    """Measure how long many clients take to connect."""
    for column, client, server in _pairs(servers):
        start = time.perf_counter()
        stores = [_client(client, server.port) for _ in range(_PROBES)]
        one_s = (time.perf_counter() - start) / _PROBES
        if one_s * _MANY > _PATIENCE_S:
            # torch's client looks up the names of both endpoints of a connection.
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


def _barrier(servers: dict[str, Server], load: Load, results: _Results) -> None:
    """Measure how long many clients take to pass a barrier."""
    for server in servers.values():
        if server.kind != "redis":
            time_s = load(server, encode_request(RequestOp.BARRIER, "/b", _MANY), _MANY, _MANY)
            results.add(f"{_MANY} clients pass a barrier", "ms", server.kind, time_s * 1e3)


def _memory(servers: dict[str, Server], results: _Results) -> None:
    """Measure how much a server's memory grows per idle client; the servers must be new."""
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
    """Measure the latency while rank 0 is idle, and while it computes in Python."""
    for kind, server in busy.items():
        for state, measured in (("idle", servers[kind]), ("busy", server)):
            if state == "busy":
                server.resume()
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


if __name__ == "__main__":
    main()
