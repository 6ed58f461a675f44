"""Prometheus' metrics of the recorded calls."""

import socket
import time
import urllib.request

import numpy as np
import pytest

import unisono as dist
from unisono.core.recorder import metrics
from unisono.errors import InvalidArgumentError

parser = pytest.importorskip("prometheus_client.parser")


def read(url):
    """Return the metrics by name and labels."""
    with urllib.request.urlopen(url) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def url(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    server, thread = metrics._serve("0", 0)
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()
    thread.join()
    dist.destroy_process_group()


MINE = ("group", "default"), ("operation", "all_reduce"), ("rank", "0")


def test_metrics_are_the_statistics(url):
    for _ in range(3):
        dist.all_reduce(np.zeros(5))
    values = read(url)
    assert values["unisono_calls_total", *MINE] == 3
    assert values["unisono_bytes_total", *MINE] == 120
    assert 0 < values["unisono_worst_seconds", *MINE] <= values["unisono_seconds_total", *MINE]
    assert values["unisono_restarts",] == 3
    assert values["unisono_generation",] == 1
    metrics.note_generation(4)
    try:
        assert read(url)["unisono_generation",] == 4
    finally:
        metrics.note_generation(1)
    assert not any(name[0].startswith("unisono_call_") for name in values)


def test_metrics_show_the_call_that_waits(url):
    began = time.monotonic()
    work = dist.irecv(np.zeros(5), src=0)
    first, second = read(url), read(url)
    key = ("group", "default"), ("operation", "recv"), ("rank", "0")
    age = "unisono_call_seconds", *key
    assert 0 < first[age] < second[age] < time.monotonic() - began
    assert second["unisono_call_waits_for", *key] == 0
    dist.isend(np.ones(5), 0).wait()
    work.wait()
    ended = read(url)
    assert age not in ended
    assert ended["unisono_calls_total", *key] == 1
    whose = ("group", "default"), ("rank", "0")
    assert ended["unisono_waited_seconds_total", *whose] == 0  # for other ranks
    # A million series for 1,000 ranks if each pair of ranks had one.
    assert not any("peer" in dict(labels) for _, *labels in ended)


def test_times_of_the_last_calls_are_a_histogram(url):
    for _ in range(2_500):
        dist.all_reduce(np.zeros(5))
    values = read(url)
    records = dist.trace_records()
    name = "unisono_last_seconds_bucket"
    buckets = {
        float(dict(labels)["le"]): value
        for (each, *labels), value in values.items()
        if each == name
    }
    assert len(buckets) == 9
    assert buckets[float("inf")] == len(records) == 2_048
    for end_s, count in buckets.items():
        below = [r for r in records if r.ended_ns - r.enqueued_ns <= end_s * 1e9 * (1 + 1e-9)]
        assert count == len(below)
    assert values["unisono_last_seconds_gcount", *MINE] == 2_048


def test_a_taken_port_is_a_warning(caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert metrics._serve(f"127.0.0.1:{port - 1}", 1) == ()
    assert f"cannot serve metrics on port {port}: Address already in use" in caplog.text


@pytest.mark.parametrize("text", ["x", ":", "1.5", "host:"])
def test_a_bad_port_is_refused(text):
    with pytest.raises(InvalidArgumentError, match="is not PORT or ADDRESS:PORT"):
        metrics._serve(text, 0)
