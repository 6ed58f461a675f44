"""`unisono bench store` on small numbers, without the servers of others."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys

import pytest

from unisono.bench import store as bench_store
from unisono.bench import store_servers as bench_store_servers
from unisono.cli.main import main

ROWS = {
    "1 client: add",
    "2 connections: add",
    "16 clients connect",
    "16 clients pass a barrier",
    "memory per idle client",
    "server CPU per op: set and get",
    "99 % of adds within, rank 0 busy",
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"_CALLS": 5, "_RAW_OPS": 50, "_MANY": 16, "_LATENCIES": 100}.items():
        monkeypatch.setattr(bench_store, name, value)
    monkeypatch.setattr(bench_store, "_CONNECTIONS", (2,))


def test_table_and_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_store, "why_not", lambda kind: "" if kind == "unisono" else "no")
    path = tmp_path / "out.json"
    assert main(["bench", "store", "--rounds", "2", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    rows = {row["row"]: row for row in json.loads(path.read_text())["rows"]}
    assert set(rows) >= ROWS
    assert all(name in printed for name in ROWS)
    added = rows["1 client: add"]
    assert len(added["results"]["unisono"]["rounds"]) == 2
    assert 0 < added["results"]["unisono"]["best"] <= added["results"]["unisono"]["median"]
    assert "without torch: no" in printed
    assert added["ratio_to_torch"] == {}


def test_ratio_compares_round_by_round():
    results = bench_store._Results()
    for torch, own in ((10.0, 5.0), (100.0, 80.0), (10.0, 9.0)):
        results.add("row", "us", "torch", torch)
        results.add("row", "us", "unisono", own)
    (row,) = results.document()
    assert row["ratio_to_torch"]["unisono"] == 0.8
    assert row["results"]["unisono"] == {"median": 9.0, "best": 5.0, "rounds": [5.0, 80.0, 9.0]}


def test_other_operations_do_not_go_with_it(capsys):
    assert main(["bench", "store", "all_reduce"]) == 1
    assert "no other operation" in capsys.readouterr().err


def test_missing_programs_are_said(monkeypatch):
    monkeypatch.setattr(bench_store_servers.shutil, "which", lambda name: None)
    assert "redis-server is not installed" in bench_store_servers.why_not("redis")
    assert bench_store_servers.why_not("unisono") == ""


def test_slow_connections_are_said_and_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_store, "why_not", lambda kind: "" if kind == "unisono" else "no")
    monkeypatch.setattr(bench_store, "_PATIENCE_S", 0.0)
    path = tmp_path / "out.json"
    assert main(["bench", "store", "--rounds", "1", "--json", str(path)]) == 0
    rows = {row["row"] for row in json.loads(path.read_text())["rows"]}
    assert "16 clients connect" not in rows
    assert "16 clients pass a barrier" in rows
    assert "without 16 clients of unisono: one takes" in capsys.readouterr().out


def test_servers_end_with_a_killed_benchmark():
    script = (
        "from unisono.bench.store_servers import Server\n"
        "server = Server('unisono'); server.pause()\n"
        "print(server._process.pid, flush=True); input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        pidfd = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
        ended, _, _ = select.select([pidfd], [], [], 20)
        os.close(pidfd)
    assert ended
