"""benchmarks/store.py on small numbers, without the servers of others."""

import importlib
import json
import os
import select
import shutil
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.programs import start_python
from unisono.errors import StoreConnectionError

FOLDER = Path(__file__).parents[3] / "benchmarks"
ROWS = {
    "1 client: add",
    "16 clients connect",
    "memory per idle client",
    "server CPU per op: set and get",
    "99 % of adds within, rank 0 busy",
}
ROWS_OF_THE_DRIVER = {"2 connections: add", "16 clients pass a barrier"}

needs_compiler = pytest.mark.skipif(
    not (os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")),
    reason="there is no C++ compiler",
)


@pytest.fixture
def benchmark(monkeypatch):
    """Return the script as a module, with small numbers."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("store", "store_servers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("store")
    for name, value in {"_CALLS": 5, "_RAW_OPS": 50, "_MANY": 16, "_LATENCIES": 100}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "_CONNECTIONS", (2,))
    monkeypatch.setattr(module, "why_not", lambda kind: "" if kind == "unisono" else "no")
    yield module
    for name in ("store", "store_servers"):
        del sys.modules[name]


def rows_of(path):
    return {row["row"]: row for row in json.loads(path.read_text())["rows"]}


@pytest.mark.linux("reads the memory of a server")
@needs_compiler
def test_table_and_file(benchmark, tmp_path, capsys):
    path = tmp_path / "out.json"
    benchmark.main(["--rounds", "2", "--json", str(path)])
    printed = capsys.readouterr().out
    rows = rows_of(path)
    assert set(rows) >= ROWS | ROWS_OF_THE_DRIVER
    assert all(name in printed for name in ROWS | ROWS_OF_THE_DRIVER)
    added = rows["1 client: add"]
    assert len(added["results"]["unisono"]["rounds"]) == 2
    assert 0 < added["results"]["unisono"]["best"] <= added["results"]["unisono"]["median"]
    assert "without torch: no" in printed
    assert added["ratio_to_torch"] == {}
    assert all(
        seconds > 0 for seconds in rows["2 connections: add"]["results"]["unisono"]["rounds"]
    )


def test_ratio_compares_round_by_round(benchmark):
    results = benchmark._Results()
    for torch, own in ((10.0, 5.0), (100.0, 80.0), (10.0, 9.0)):
        results.add("row", "us", "torch", torch)
        results.add("row", "us", "unisono", own)
    (row,) = results.document()
    assert row["ratio_to_torch"]["unisono"] == 0.8
    assert row["results"]["unisono"] == {"median": 9.0, "best": 5.0, "rounds": [5.0, 80.0, 9.0]}


def test_missing_programs_are_named(benchmark, monkeypatch):
    servers = sys.modules["store_servers"]
    monkeypatch.setattr(servers.shutil, "which", lambda name: None)
    assert "redis-server is not installed" in servers.why_not("redis")
    assert servers.why_not("unisono") == ""


@pytest.mark.linux("reads the memory of a server")
def test_without_a_compiler_throughput_is_left_out(benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(benchmark.shutil, "which", lambda name: None)
    path = tmp_path / "out.json"
    benchmark.main(["--rounds", "1", "--json", str(path)])
    assert set(rows_of(path)) >= ROWS
    assert not ROWS_OF_THE_DRIVER & set(rows_of(path))
    assert "without throughput and barriers" in capsys.readouterr().out


@pytest.mark.linux("reads the memory of a server")
@needs_compiler
def test_slow_connections_are_reported_and_left_out(benchmark, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "_PATIENCE_S", 0.0)
    path = tmp_path / "out.json"
    benchmark.main(["--rounds", "1", "--json", str(path)])
    rows = set(rows_of(path))
    assert "16 clients connect" not in rows
    assert "16 clients pass a barrier" in rows
    assert "without 16 clients of unisono: one takes" in capsys.readouterr().out


def test_server_that_does_not_answer_is_an_error(benchmark):
    def answer(listener):
        sock, _ = listener.accept()
        sock.recv(100)
        sock.sendall(b"no!!")
        sock.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        server = SimpleNamespace(port=listener.getsockname()[1], kind="torch")
        with pytest.raises(StoreConnectionError, match="the torch server did not answer a PING"):
            benchmark._raw(server)
        thread.join()


@pytest.mark.linux("death signals")
def test_servers_end_with_a_killed_benchmark():
    script = (
        "from store_servers import Server\n"
        "server = Server('unisono'); server.pause()\n"
        "print(server._process.pid, flush=True); input()\n"
    )
    with start_python("-c", script, env=os.environ | {"PYTHONPATH": str(FOLDER)}) as process:
        pidfd = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
        ended, _, _ = select.select([pidfd], [], [], 20)
        os.close(pidfd)
    assert ended
