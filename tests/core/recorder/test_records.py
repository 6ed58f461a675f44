"""The records of a group's calls."""

import asyncio
import re
import sys
import threading
import time
from threading import Thread
from xml.etree import ElementTree

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import wait_until
from unisono.core.recorder.recorder import Recorder, make_recorder
from unisono.errors import CollectiveMismatchError, UnsupportedError
from unisono.lowlevel import CPUOptions


@pytest.mark.ranks(2, 4, kind="both")
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_calls_of_every_way_are_recorded(rank, engine):
    group = dist.new_group(pg_options=CPUOptions(engine=engine))
    x, before = np.ones(6, np.float32), time.time_ns()
    line = sys._getframe().f_lineno + 1
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x[::2], group=group)  # packed, so Python runs it
    dist.all_reduce(x, group=group, async_op=True).wait()
    group.broadcast(x, 0)
    dist.barrier(group)
    records = dist.trace_records(group)
    assert [record.op for record in records] == ["all_reduce"] * 4 + ["broadcast", "barrier"]
    assert [record.seq for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record.count for record in records] == [6, 6, 3, 6, 6, 0]
    assert [record.nbytes for record in records] == [24, 24, 12, 24, 24, 0]
    assert [record.line for record in records] == list(range(line, line + 6))
    assert {record.file for record in records} == {__file__}
    assert {record.function for record in records} == {"test_calls_of_every_way_are_recorded"}
    for record in records:
        assert record.outcome == "completed"
        assert record.dtype == ("float32" if record.count else "")
        assert before <= record.enqueued_ns + 10**6
        assert record.enqueued_ns <= record.started_ns <= record.ended_ns <= time.time_ns() + 10**6
        assert record.algorithm


@pytest.mark.ranks(2, kind="both")
def test_messages_are_recorded_with_peer_and_tag(rank):
    other, x = 1 - rank, np.arange(5.0)
    if rank == 0:
        dist.send(x, other, tag=7)
        dist.isend(x, other, tag=8).wait()
        dist.send(x[::2], other, tag=9)
    else:
        dist.recv(x, other, tag=7)
        dist.irecv(x, other, tag=8).wait()
        dist.recv(x[::2], tag=9)
    records = dist.trace_records()
    op = "recv" if rank else "send"
    assert [(r.op, r.peer, r.tag, r.count) for r in records] == [
        *[(op, other, 7, 5), (op, other, 8, 5), (op, other, 9, 3)],
    ]
    assert [record.seq for record in records] == [1, 2, 3]
    assert {(record.outcome, record.dtype, record.fingerprint) for record in records} == {
        ("completed", "float64", 0)
    }


@pytest.mark.ranks(2, kind="processes")
def test_a_record_says_for_which_rank_a_call_waited(rank):
    pause_s, store = 0.2, dist.group.WORLD.store
    if rank == 0:
        work = dist.barrier(async_op=True)
        assert wait_until(lambda: dist.trace_records()[-1].waited_for == 1)
        store.set("waits", "1")
        work.wait()
    else:
        store.wait(["waits"])
        time.sleep(pause_s)
        dist.barrier()
    late = dist.trace_records()[-1]
    taken_s = (late.ended_ns - late.enqueued_ns) / 1e9
    if rank == 0:
        assert late.waited_for == 1
        assert pause_s * 0.9 < late.waited_ns / 1e9 <= taken_s


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_a_wait_counts_before_its_end_and_once(engine):
    recorder = Recorder(2) if engine == "reference" else make_recorder(2)
    recorder.start(recorder.begin(0, 1, 0, 0, -1))
    recorder.begin_wait(1)
    assert recorder.waiting_for == 1
    assert wait_until(lambda: recorder.waited()[1] > 0)
    before = recorder.waited()[1]
    recorder.end_wait()
    after = recorder.waited()
    assert after[0] == 0
    assert before <= after[1]
    recorder.end_wait()  # none was begun
    assert (recorder.waited(), recorder.waiting_for) == (after, -1)


@pytest.mark.ranks(2, kind="both")
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_a_record_says_when_its_caller_began_to_wait(rank, engine):
    group = dist.new_group(pg_options=CPUOptions(engine=engine))
    x, slack_ns, pause_s = np.ones(6, np.float32), 10**6, 0.05
    dist.all_reduce(x, group=group)
    works = [dist.all_reduce(x[::by], group=group, async_op=True) for by in (1, 2)]
    dist.all_reduce(x, group=group)
    blocking, *queued, last = dist.trace_records(group)
    assert blocking.wait_begun_ns == blocking.enqueued_ns
    assert [record.wait_begun_ns for record in queued] == [None, None]
    # C++ may queue it behind the others, and then its caller waits at once.
    assert last.enqueued_ns <= last.wait_begun_ns <= last.ended_ns + slack_ns
    for work in works:
        time.sleep(pause_s)
        before_ns = time.time_ns()
        work.wait()
        after_ns = time.time_ns()
        work.wait()
    times = [record.wait_begun_ns for record in dist.trace_records(group)[1:3]]
    assert before_ns - slack_ns < times[1] < after_ns + slack_ns
    assert times[0] + pause_s * 0.9e9 < times[1] + slack_ns
    dist.wait_any([dist.all_reduce(x, group=group, async_op=True)])
    assert dist.trace_records(group)[-1].wait_begun_ns


async def awaited(work):
    await work


@pytest.mark.ranks(2, kind="both")
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_a_wait_for_what_has_ended_is_recorded(rank, engine):
    """By a future, one made of it, and several together; an await begins before the end."""
    group = dist.new_group(pg_options=CPUOptions(engine=engine))
    x, slack_ns = np.ones(6, np.float32), 10**6

    def times():
        return [record.wait_begun_ns for record in dist.trace_records(group)]

    for made in (
        lambda future: future, lambda future: future.then(lambda f: f.value()),
        lambda future: future.then(lambda f: f.wait()),
        lambda future: dist.collect_all([future]),
    ):  # fmt: skip
        future = made(dist.all_reduce(x, group=group, async_op=True).get_future())
        ended = threading.Event()
        future.add_done_callback(lambda _, ended=ended: ended.set())
        assert ended.wait(60)
        assert times()[-1] is None
        before_ns = time.time_ns()
        future.wait()
        assert before_ns - slack_ns < times()[-1] < time.time_ns() + slack_ns
    work = dist.all_reduce(x, group=group, async_op=True)
    asyncio.run(awaited(work))
    assert times()[-1]


@pytest.mark.ranks(2, kind="both")
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_an_await_of_a_call_that_waits_for_its_stream_is_recorded(rank, engine):
    group = dist.new_group(pg_options=CPUOptions(engine=engine))
    stream, release = dist.Stream(), threading.Event()

    async def run():
        with dist.stream(stream):
            stream.submit(release.wait, 60)
            work = dist.all_reduce(np.ones(6), group=group, async_op=True)
        task = asyncio.create_task(awaited(work))
        await asyncio.sleep(0)
        release.set()
        # The loop does not go on here, so that the task does not see the end.
        records = lambda: dist.trace_records(group)  # noqa: E731
        assert wait_until(lambda: records() and records()[0].wait_begun_ns)
        await task

    asyncio.run(run())


@pytest.mark.ranks(2)
def test_the_ring_keeps_the_last_records(rank):
    x = np.zeros(1)
    for _ in range(2100):
        dist.all_reduce(x)
    records = dist.trace_records()
    assert [record.seq for record in records] == list(range(53, 2101))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_a_failed_call_has_its_outcome(rank, engine):
    group = dist.new_group(pg_options=CPUOptions(engine=engine))
    with pytest.raises(CollectiveMismatchError):
        dist.all_reduce(np.zeros(3 + rank), group=group)
    work = dist.all_reduce(np.zeros(3 + rank), group=group, async_op=True)
    with pytest.raises(CollectiveMismatchError):
        work.wait()
    assert [record.outcome for record in dist.trace_records(group)] == ["mismatch"] * 2


@pytest.mark.ranks(2)
def test_fingerprints_are_equal_if_the_calls_match(rank):
    dist.all_reduce(np.zeros(3))
    mine = dist.trace_records()[-1].fingerprint
    both = [None, None]
    dist.all_gather_object(both, mine)
    assert both == [mine, mine] != [0, 0]


@pytest.mark.ranks(2)
def test_a_waiting_call_is_shown_as_running(rank):
    group, seen = dist.group.WORLD, []

    def look():
        while not seen:
            seen.extend(r for r in dist.trace_records(group) if r.outcome == "running")
            time.sleep(0.001)
        group.store.set("seen", "1")

    if rank == 0:
        thread = Thread(target=look)
        thread.start()
        dist.barrier()
        thread.join()
        assert (seen[0].op, seen[0].ended_ns) == ("barrier", None)
    else:
        group.store.wait(["seen"], 30)
        dist.barrier()


def test_without_records(monkeypatch):
    monkeypatch.setenv("UNISONO_TRACE", "0")
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        why = "trace_records: group 'default' keeps no records"
        with pytest.raises(UnsupportedError, match=why):
            dist.trace_records()
    finally:
        dist.destroy_process_group()


@pytest.mark.ranks(2, kind="processes")
def test_a_record_lasts_as_long_as_its_call(rank):
    x = np.zeros(1 << 17)
    for calls in (3, 50):
        began_ns = time.monotonic_ns()
        for _ in range(calls):
            dist.all_reduce(x)
        took_ns = time.monotonic_ns() - began_ns
    spans_ns = [r.ended_ns - r.enqueued_ns for r in dist.trace_records() if r.seq > 3]
    assert len(spans_ns) == 50
    assert 0.5 * took_ns < sum(spans_ns) < 1.01 * took_ns


@pytest.mark.ranks(2, kind="processes")
def test_statistics_are_the_sums_of_the_records(rank):
    x = np.zeros(1000, np.float32)
    for _ in range(20):
        dist.all_reduce(x)
    dist.barrier()
    stats, records = dist.stats(), dist.trace_records()
    times = [(r.ended_ns - r.enqueued_ns) / 1e9 for r in records if r.op == "all_reduce"]
    row = stats.operations["all_reduce"]
    assert (row.calls, row.nbytes) == (20, 20 * 4000)
    assert row.total_s == pytest.approx(sum(times), rel=0.01)
    assert row.median_s == pytest.approx(np.median(times), rel=0.01)
    assert row.worst_s == pytest.approx(max(times), rel=0.01)
    assert stats.operations["barrier"].calls == 1
    waited_s = sum(r.waited_ns for r in records if r.waited_for == 1 - rank) / 1e9
    assert stats.waited_s == {1 - rank: pytest.approx(waited_s, rel=0.01, abs=1e-6)}
    assert {line.split()[0] for line in str(stats).splitlines()[2:4]} == {"all_reduce", "barrier"}
    # The table of a notebook has the words of the text.
    title, *table, waits = str(stats).splitlines()
    root = ElementTree.fromstring(f"<page>{stats._repr_html_()}</page>")
    cells = [[cell.text for cell in row] for row in root.iter("tr")]
    assert cells == [re.split(r" {2,}", line) for line in table]
    assert [root.find("table/caption").text, root.find("p").text] == [title, waits]
