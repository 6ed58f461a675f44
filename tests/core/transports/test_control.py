"""What a rank answers of its last recorded calls."""

import time
from types import SimpleNamespace

import pytest

from unisono.core.base.types import dtype_named
from unisono.core.recorder import GroupTrace, number_of_kind
from unisono.core.transports.control import CallLog

# The clock of the records is converted to the wall clock.
NEAR_S = 0.02


@pytest.fixture
def traces():
    return {name: GroupTrace(0, (0, 1), name, f"last calls {name}") for name in ("mine", "other")}


def begin(trace, op, seq):
    recorder = trace.recorder
    number = recorder.begin(number_of_kind(op, None, "ring", "messages"), seq, 1, 0, -1)
    recorder.start(number)
    return number


def log_of(*traces):
    log = CallLog()
    for context, trace in enumerate(traces):
        log.watch(context, SimpleNamespace(recorded=lambda trace=trace: trace))
    return log


def test_last_call_has_the_age_of_its_end(traces):
    trace = traces["mine"]
    number = begin(trace, "all_reduce", 40)
    time.sleep(5 * NEAR_S)  # so that begin and end differ
    trace.end(number, None)
    (record,) = trace.records()
    before_s = time.time()
    (last,) = log_of(trace).recorded(0, messages=False)
    assert (last.call, last.runs) == ("all_reduce #40", False)
    ended_s = record.ended_ns / 1e9
    assert before_s - ended_s - NEAR_S <= last.age_s <= time.time() - ended_s + NEAR_S


def test_a_message_is_the_last_call_of_messages_only(traces):
    trace = traces["mine"]
    trace.end(begin(trace, "barrier", 3), None)
    trace.begin_message("recv", dtype_named("float32"), 4, 1, 7)
    log = log_of(trace)
    assert [each[:2] for each in log.recorded(0, messages=False)] == [("barrier #3", False)]
    assert [each[:2] for each in log.recorded(0, messages=True)] == [
        ("recv #1 (rank 1, tag 7)", True)
    ]


def test_a_collective_of_another_group_is_added_while_it_runs(traces):
    mine, other = traces.values()
    log = log_of(mine, other)
    assert log.recorded(0, messages=True) == []
    other.begin_message("recv", dtype_named("float32"), 4, 1, 7)
    number = begin(other, "barrier", 2)
    assert [each[:2] for each in log.recorded(0, messages=True)] == [
        ("barrier #2 of group 'other'", True)
    ]
    other.end(number, None)
    assert log.recorded(0, messages=True) == []
    assert [each[:2] for each in log.recorded(1, messages=False)] == [("barrier #2", False)]
    log.watch(0, SimpleNamespace(recorded=lambda: None))
    assert log.recorded(0, messages=False) == []
