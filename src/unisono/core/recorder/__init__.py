"""The recorded calls of groups: what ran, where it was called, and for which rank it waited."""

from unisono.core.recorder.files import write_after_failure, write_trace
from unisono.core.recorder.metrics import note_generation
from unisono.core.recorder.recorder import skip_folder
from unisono.core.recorder.records import GroupTrace, TraceRecord, all_traces
from unisono.core.recorder.ring import number_of_kind
from unisono.core.recorder.start import make_trace
from unisono.core.recorder.stats import GroupStats, OperationStats, open_calls, stats_of, stragglers

__all__ = [
    "GroupStats",
    "GroupTrace",
    "OperationStats",
    "TraceRecord",
    "all_traces",
    "make_trace",
    "note_generation",
    "number_of_kind",
    "open_calls",
    "skip_folder",
    "stats_of",
    "stragglers",
    "write_after_failure",
    "write_trace",
]
