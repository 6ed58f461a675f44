"""The statistics of all groups of this process in Prometheus' text format, over HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from unisono.core.base import config
from unisono.core.base.log import get_logger
from unisono.core.recorder.records import TraceRecord, all_traces
from unisono.core.recorder.stats import stats_of, times_of
from unisono.errors import InvalidArgumentError, UnsupportedError

_log = get_logger("trace.metrics")

_HOST = "127.0.0.1"
_GROUP = ("rank", "group")
_LABELS = (*_GROUP, "operation")

# Upper ends of the times in the histogram, in seconds. Each end is a series per operation.
_ENDS_S = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)

_lock = threading.RLock()
_server: Any = None
_generation = 1


def note_generation(number: int) -> None:
    """Show from now on that the world of this process has been formed so often."""
    global _generation
    _generation = number


def serve_metrics(local_rank: Callable[[Mapping[str, str]], int | None]) -> None:
    """Serve the metrics if UNISONO_METRICS_PORT is set; a second call does nothing.

    If the port is taken, log a warning: a job must not end because it cannot be watched.

    Args:
        local_rank: Returns the number of this process on its host, from its environment.

    Raises:
        InvalidArgumentError: UNISONO_METRICS_PORT is no port.
        UnsupportedError: The package prometheus-client is not installed.
    """
    global _server
    text = config.get("UNISONO_METRICS_PORT")
    if not text:
        return
    with _lock:
        if _server is None:
            _server = _serve(text, local_rank(config.environ()) or 0)


def _serve(text: str, local_rank: int) -> Any:
    """Return (server, thread), or () if the port is taken."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal():
        raise InvalidArgumentError(
            f"environment variable UNISONO_METRICS_PORT={text!r} is not PORT or ADDRESS:PORT"
        )
    try:
        import prometheus_client
    except ImportError:
        raise UnsupportedError(
            "UNISONO_METRICS_PORT needs the package prometheus-client",
            hint="pip install 'unisono[metrics]'",
        ) from None
    registry = prometheus_client.CollectorRegistry()
    registry.register(_Collector())
    number = int(port) + local_rank
    try:
        server, thread = prometheus_client.start_http_server(number, host or _HOST, registry)
    except OSError as error:
        _log.warning(
            "UNISONO_METRICS_PORT=%s: cannot serve metrics on port %d: %s",
            text,
            number,
            error.strerror,
        )
        return ()
    # `unisono stacks` leaves out threads of unisono, by their names.
    thread.name = "unisono-metrics"
    return server, thread


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
            "unisono_waited_seconds", "Time that the rank has waited for others", labels=_GROUP
        )
        # Its value is a rank. With a label for the other rank, all ranks of a job would make as
        # many series as there are pairs of ranks.
        slowest = GaugeMetricFamily(
            "unisono_waited_most_for", "The rank for which it has waited longest", labels=_GROUP
        )
        age = GaugeMetricFamily(
            "unisono_call_seconds", "Age of the oldest call that has not ended", labels=_LABELS
        )
        waits = GaugeMetricFamily(
            "unisono_call_waits_for", "The rank for which this call waits", labels=_LABELS
        )
        restarts = GaugeMetricFamily("unisono_restarts", "Restarts of the launch")
        restarts.add_metric((), int(config.environ().get("TORCHELASTIC_RESTART_COUNT") or 0))
        generation = GaugeMetricFamily("unisono_generation", "Generation of the world")
        generation.add_metric((), _generation)
        for stats in map(stats_of, all_traces()):
            whose = str(stats.rank), stats.group
            for op, row in stats.operations.items():
                calls.add_metric((*whose, op), row.calls)
                nbytes.add_metric((*whose, op), row.nbytes)
                spent.add_metric((*whose, op), row.total_s)
                worst.add_metric((*whose, op), row.worst_s)
            waited.add_metric(whose, sum(stats.waited_s.values()))
            if (peer := next(iter(stats.waited_s), None)) is not None and stats.waited_s[peer] > 0:
                slowest.add_metric(whose, peer)
        for trace in all_traces():
            now_ns = time.time_ns()
            oldest = min(trace.records(only_open=True), key=_begin_ns, default=None)
            if oldest is not None:
                labels = str(trace.rank), trace.name, oldest.op
                age.add_metric(labels, (now_ns - _begin_ns(oldest)) / 1e9)
                if oldest.waited_for is not None:
                    waits.add_metric(labels, oldest.waited_for)
        yield from (calls, nbytes, spent, worst, waited, slowest, age, waits, restarts)
        yield from (generation, _times())


def _times() -> Any:
    """Return the times of the calls that the rings still have, as a histogram."""
    from prometheus_client.core import GaugeHistogramMetricFamily

    text = "Times of the last calls, at most 2,048 per group"
    family = GaugeHistogramMetricFamily("unisono_last_seconds", text, labels=_LABELS)
    for trace in all_traces():
        for op, times in times_of(trace).items():
            found = [ns / 1e9 for ns in times]
            ends = [*((str(end), sum(t <= end for t in found)) for end in _ENDS_S)]
            buckets = [*ends, ("+Inf", len(found))]
            family.add_metric((str(trace.rank), trace.name, op), buckets, sum(found))
    return family


def _begin_ns(record: TraceRecord) -> int:
    return record.started_ns or record.enqueued_ns
