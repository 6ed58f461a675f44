"""The statistics of all groups of this process in Prometheus' text format, over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from unisono.base import config
from unisono.errors import InvalidArgumentError, UnsupportedError
from unisono.trace.records import all_traces
from unisono.trace.stats import stats_of

_HOST = "127.0.0.1"
_LABELS = ("rank", "group", "operation")

_lock = threading.RLock()
_server: Any = None


def serve_metrics() -> None:
    """Serve the metrics if UNISONO_METRICS_PORT is set; a second call does nothing.

    Raises:
        InvalidArgumentError: UNISONO_METRICS_PORT is no port, or the port is taken.
        UnsupportedError: The package prometheus-client is not installed.
    """
    global _server
    text = config.get("UNISONO_METRICS_PORT")
    if not text:
        return
    with _lock:
        if _server is None:
            _server = _serve(text)


def _serve(text: str) -> Any:
    host, _, port = text.rpartition(":")
    local_rank = config.environ().get("LOCAL_RANK", "0")
    if not port.isdecimal() or not local_rank.isdecimal():
        raise InvalidArgumentError(
            f"environment variable UNISONO_METRICS_PORT={text!r} is not PORT or ADDRESS:PORT"
        )
    try:
        import prometheus_client
    except ImportError:
        raise UnsupportedError(
            "UNISONO_METRICS_PORT needs the package prometheus-client",
            hint="pip install unisono[metrics]",
        ) from None
    registry = prometheus_client.CollectorRegistry()
    registry.register(_Collector())
    number = int(port) + int(local_rank)
    try:
        return prometheus_client.start_http_server(number, host or _HOST, registry)
    except OSError as error:
        raise InvalidArgumentError(
            f"UNISONO_METRICS_PORT={text!r}: cannot serve on port {number}: {error.strerror}"
        ) from error


class _Collector:
    """Makes the metrics when they are read."""

    def collect(self) -> Iterator[Any]:
        """Yield the families of metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        calls = CounterMetricFamily("unisono_calls", "Calls that have ended", labels=_LABELS)
        nbytes = CounterMetricFamily("unisono_bytes", "Bytes of their data", labels=_LABELS)
        spent = CounterMetricFamily("unisono_seconds", "Time of the calls", labels=_LABELS)
        worst = GaugeMetricFamily("unisono_worst_seconds", "The longest call", labels=_LABELS)
        waited = CounterMetricFamily(
            "unisono_waited_seconds",
            "Time that the rank has waited for another rank",
            labels=("rank", "group", "peer"),
        )
        for stats in map(stats_of, all_traces()):
            whose = str(stats.rank), stats.group
            for op, row in stats.operations.items():
                calls.add_metric((*whose, op), row.calls)
                nbytes.add_metric((*whose, op), row.nbytes)
                spent.add_metric((*whose, op), row.total_s)
                worst.add_metric((*whose, op), row.worst_s)
            for peer, waited_s in stats.waited_s.items():
                waited.add_metric((*whose, str(peer)), waited_s)
        yield from (calls, nbytes, spent, worst, waited)
