"""The recorded calls of groups: what ran, where it was called, and for which rank it waited."""

from unisono.trace.records import GroupTrace, TraceRecord, all_traces, make_trace
from unisono.trace.ring import number_of_kind

__all__ = [
    "GroupTrace",
    "TraceRecord",
    "all_traces",
    "make_trace",
    "number_of_kind",
]
