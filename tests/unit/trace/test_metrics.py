"""Prometheus' metrics of the recorded calls."""

import socket
import urllib.request

import numpy as np
import pytest

import unisono as dist
from unisono.errors import InvalidArgumentError
from unisono.trace import metrics

parser = pytest.importorskip("prometheus_client.parser")


def test_metrics_are_the_statistics(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(3):
        dist.all_reduce(np.zeros(5))
    server, thread = metrics._serve("0")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        dist.destroy_process_group()
    mine = {"rank": "0", "group": "default", "operation": "all_reduce"}
    values = {
        sample.name: sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels == mine
    }
    assert (values["unisono_calls_total"], values["unisono_bytes_total"]) == (3, 120)
    assert 0 < values["unisono_worst_seconds"] <= values["unisono_seconds_total"]


def test_a_taken_port_is_reported(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidArgumentError, match=f"cannot serve on port {port}: "):
            metrics._serve(f"127.0.0.1:{port}")


@pytest.mark.parametrize("text", ["x", ":", "1.5", "host:"])
def test_a_bad_port_is_refused(text):
    with pytest.raises(InvalidArgumentError, match="is not PORT or ADDRESS:PORT"):
        metrics._serve(text)
