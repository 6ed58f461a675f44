"""`unisono replay`: timelines whose times follow from formulas."""

import itertools
import json
from dataclasses import replace

import pytest

from tests.workbench.trace.test_analysis import record
from unisono.core.recorder.flight_recorder import GroupRecords, Origin, RankRecords, encode
from unisono.errors import InvalidArgumentError
from unisono.workbench.cli.main import main
from unisono.workbench.replay.engine import COMPUTE, RankSpan, changed, critical_path, play
from unisono.workbench.replay.job import MESSAGE, Job, JobCall, JobGroup, JobStep, find_marks
from unisono.workbench.replay.pricing import RecordedTimes, Simulated
from unisono.workbench.replay.records import job_of, op_of
from unisono.workbench.simulate import machine
from unisono.workbench.trace.joined import by_rank, join

US, SECOND = 1_000_000, 10**12


class After:
    """Calls take a fixed time after their last rank has come."""

    def __init__(self, us):
        self.ps = us * US

    def ends(self, call, begins):
        return dict.fromkeys(begins, max(begins.values()) + self.ps)


def both(*names, ranks=2):
    """Return a job of one group, in which all ranks make the calls one after another."""
    members = tuple(range(ranks))
    calls = [JobCall(name, "all_reduce", 0, members, 1000) for name in names]
    return Job([JobGroup("all", members)], calls, [[] for _ in members], [0] * ranks, [], [])


def blocking(gap_us, call):
    return JobStep(gap_us * US, call, makes=True, waits=True)


def made(gap_us, call):
    return JobStep(gap_us * US, call, makes=True)


def waited(gap_us, call):
    return JobStep(gap_us * US, call, waits=True)


def spans(run, rank):
    return [(s.begin_ps // US, s.end_ps // US, s.call) for s in run.spans[rank]]


def total(legs):
    assert all(a.end_ps == b.begin_ps for a, b in itertools.pairwise(legs))
    return legs[-1].end_ps - legs[0].begin_ps


def test_a_call_begins_when_its_last_rank_has_come():
    job = both("a", "b")
    job.steps[:] = [[blocking(10, 0), blocking(30, 1)], [blocking(25, 0), blocking(5, 1)]]
    run = play(job, After(7))
    # 25 + 7 = 32; rank 0 comes at 62, and 62 + 7 = 69.
    assert spans(run, 0) == [(0, 10, COMPUTE), (10, 32, 0), (32, 62, COMPUTE), (62, 69, 1)]
    assert spans(run, 1) == [(0, 25, COMPUTE), (25, 32, 0), (32, 37, COMPUTE), (37, 69, 1)]
    path = critical_path(job, run)
    assert [(leg.rank, leg.call) for leg in path] == [(1, -1), (0, 0), (0, -1), (0, 1)]
    assert total(path) == 69 * US


@pytest.mark.parametrize(("call_us", "end"), [(15, 50), (60, 90)])
def test_an_asynchronous_call_runs_beside_compute(call_us, end):
    job = both("a")
    job.steps[:] = [[made(10, 0), waited(20, 0), JobStep(20 * US)]] * 2
    run = play(job, After(call_us))
    # It blocks for what it takes longer than the 20 us of compute.
    assert run.end_ps(0) == end * US == max(50, 10 + call_us + 20) * US
    exposed = sum(s.end_ps - s.begin_ps for s in run.spans[0] if s.call == 0)
    assert exposed == max(0, call_us - 20) * US


def test_calls_of_a_group_run_one_after_another():
    job = both("a", "b")
    job.steps[:] = [[made(10, 0), made(0, 1), waited(0, 1), waited(0, 0)]] * 2
    run = play(job, After(7))
    assert run.begins[1] == {0: 17 * US, 1: 17 * US}
    assert run.end_ps(0) == 24 * US
    assert [leg.call for leg in critical_path(job, run)] == [-1, 0, 1]


def test_a_slow_rank_makes_all_wait():
    job = both("a", "b")
    job.steps[:] = [[blocking(10, 0), blocking(10, 1)]] * 2
    slow = changed(job, 2.0, {1: 3.0})
    assert play(slow, After(7)).end_ps(0) == 2 * (2 * 3 * 10 + 7) * US
    assert play(changed(job, 0.0, {}), After(7)).end_ps(0) == 14 * US


def test_ranks_that_wait_for_each_other_are_named():
    job = both("a")
    job.steps[:] = [[blocking(1, 0)], [JobStep(US)]]
    with pytest.raises(InvalidArgumentError) as caught:
        play(job, After(1))
    assert "' for ever: its ranks wait for each other" in caught.value.what


def test_a_ring_on_a_full_network_by_formula():
    """T = 2(p-1) (latency + bytes/p / bandwidth), after the last rank."""
    net = machine("mine", 'topology = "full"\nlatency_us = 3\ngbps = 2.0\n')
    job = both("a", ranks=4)
    job.calls[0] = JobCall("a", "all_reduce", 0, (0, 1, 2, 3), 64_000, 4, "ring")
    job.steps[:] = [[blocking(gap, 0)] for gap in (5, 5, 5, 5)]
    run = play(job, Simulated(job, net, 4, range(4), {}))
    assert {run.end_ps(rank) for rank in range(4)} == {5 * US + 6 * (3 + 8) * US}
    # Rank 2 comes 50 us later. What it holds up goes all the way from it to the last rank.
    job.steps[2] = [blocking(55, 0)]
    run = play(job, Simulated(job, net, 4, range(4), {}))
    assert max(run.end_ps(rank) for rank in range(4)) == (55 + 66) * US


def test_sub_groups_cross_the_links_between_their_hosts():
    text = "ranks_per_host = 2\ninside_us = 1\nlatency_us = 10\ngbps = 1.0\ninside_gbps = 10.0\n"
    net = machine("mine", text)
    for members, us in (((2, 3), 2 * (1 + 0.4)), ((1, 3), 2 * (10 + 4))):
        job = both("a", ranks=4)
        job.groups[0] = JobGroup("pair", members)
        job.calls[0] = JobCall("a", "all_reduce", 0, members, 8000, 4, "ring")
        job.steps[:] = [[blocking(0, 0)] if rank in members else [] for rank in range(4)]
        run = play(job, Simulated(job, net, 4, range(4), {}))
        assert run.end_ps(members[0]) == us * US
        slow = Simulated(job, net, 4, range(4), {"interface 0": 3.0})
        expected = us + (2 * 8 if members == (1, 3) else 0)
        assert play(job, slow).end_ps(3) == pytest.approx(expected * US)
        # All on one host.
        near = play(job, Simulated(job, net, 4, [0, 2, 1, 3], {})).end_ps(3)
        assert near == (2 * (1 + 0.4) * US if members == (1, 3) else 2 * (10 + 4) * US)


def test_large_calls_are_approximate():
    net = machine("mine", 'topology = "full"\nlatency_us = 3\ngbps = 2.0\n')
    ranks = 128
    job = both("a", ranks=ranks)
    job.calls[0] = JobCall("a", "all_reduce", 0, tuple(range(ranks)), 4 * 128 * 10, 4, "ring")
    job.steps[:] = [[blocking(rank, 0)] for rank in range(ranks)]
    pricing = Simulated(job, net, ranks, range(ranks), {})
    run = play(job, pricing)
    assert not pricing.exact
    assert run.end_ps(0) == (127 + 2 * 127 * (3 + 0.02)) * US


def test_training_steps_are_found():
    assert find_marks(list("xyabcabcabc")) == [4, 7, 10]
    assert find_marks(list("aaaa")) == [0, 1, 2, 3]
    assert find_marks(list("aabaab")) == [2, 5]
    assert find_marks(list("abcdef")) == []


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("_allgather_base", "all_gather"), ("ALLGATHER_coalesced", "all_gather"),
        ("all_reduce_barrier", "barrier"), ("_reduce_scatter_base", "reduce_scatter"),
        ("all_to_all_single", "all_to_all"), ("reduce", "reduce"), ("exscan", "exscan"),
        ("neighbor_all_to_all", "neighbor_all_to_all"),
    ],
)  # fmt: skip
def test_names_of_operations(name, op):
    assert op_of(name) == op


# ---- files ------------------------------------------------------------------------------------


def own(tmp_path, *ranks, groups=(("0", "default", None),), more=()):
    """Write the files of ranks, whose records are those of the first group."""
    origin = Origin("h", 1, "boot", 0, 10**18)
    members = tuple(range(len(ranks)))
    found = []
    for rank, mine in enumerate(ranks):
        made = [GroupRecords("0", "default", members, list(mine))]
        made += [g for g in more if rank in g.ranks]
        found.append(RankRecords(rank, made, origin))
        (tmp_path / f"trace_rank_{rank}").write_bytes(encode(found[-1]))
    return by_rank(found)


def begun(one):
    """Return a record of a call that blocks."""
    return replace(one, wait_begun_ns=one.enqueued_ns)


def waiting(one, at_s):
    return replace(one, wait_begun_ns=round((100 + at_s) * 10**9))


def steps_of(rank, count=5):
    """Return the calls of a rank: an asynchronous one, then one that blocks."""
    found = []
    for step in range(count):
        at = 10.0 * step
        late = rank * 0.5
        found.append(waiting(record(2 * step + 1, at_s=at + late, took_s=4 - late), at + 3))
        found.append(begun(record(2 * step + 2, at_s=at + 5 + late, took_s=2 - late, line=9)))
    return found


def test_a_replay_as_recorded_is_the_recording(tmp_path):
    ranks = own(tmp_path, steps_of(0), steps_of(1))
    job = job_of(ranks, join(ranks))
    run = play(job, RecordedTimes(job))
    assert run.ends == [call.ends_ps for call in job.calls]
    assert run.begins == [call.begins_ps for call in job.calls]
    for rank in range(2):
        waits = [s for s in run.spans[rank] if s.call != COMPUTE]
        late = rank * SECOND // 2
        assert waits[:2] == [
            RankSpan(3 * SECOND, 4 * SECOND, 0), RankSpan(5 * SECOND + late, 7 * SECOND, 1),
        ]  # fmt: skip
    assert run.marks_ps == [round((7 + 10 * step) * SECOND) for step in range(5)]


@pytest.mark.parametrize(("factor", "end"), [(1, 12), (2, 22), (0.1, 3)])
def test_a_send_that_waited_for_its_receiver_waits_for_it_again(factor, end):
    """Recorded: the send at 0, the receive at 10, and both end at 12."""
    call = JobCall("m", MESSAGE, 0, (0, 1), 8, begins_ps={0: 0, 1: 10}, ends_ps={0: 12, 1: 12})
    steps = [[JobStep(0, 0, True, True)], [JobStep(10, 0, True, True)]]
    job = changed(Job([JobGroup("g", (0, 1))], [call], steps, [0, 0], [], []), 1.0, {1: factor})
    assert play(job, RecordedTimes(job)).ends == [{0: end, 1: end}]
    # One that ended before the receiver asked did not wait.
    early = replace(job, calls=[replace(call, ends_ps={0: 4, 1: 12})])
    assert play(early, RecordedTimes(early)).ends == [{0: 4, 1: end}]


@pytest.mark.parametrize(
    ("others", "end"),
    [
        ({}, 7), ({16: 12}, 7), ({8: 12}, 22),
        # A larger one did not wait, so that the smaller one overlapped by chance.
        ({4: 12, 16: 9}, 7), ({4: 9, 8: 12}, 22),
    ],
)  # fmt: skip
def test_a_send_whose_receiver_was_early_waits_if_one_as_large_or_smaller_has(others, end):
    """Recorded: the receive at 0, the send from 5 to 7. Now the receiver asks at 20."""
    send = JobCall("m", MESSAGE, 0, (0, 1), 8, begins_ps={0: 5, 1: 0}, ends_ps={0: 7, 1: 8})
    steps = [[JobStep(5, 0, True, True)], [JobStep(20, 0, True, True)]]
    calls = [send]
    for size, ended in others.items():
        # A message of two other ranks; one that ended at 12 waited for its receiver at 10.
        ends = len(steps), len(steps) + 1
        times = dict(zip(ends, (0, 10), strict=True)), dict(zip(ends, (ended, 12), strict=True))
        steps += [[JobStep(at, len(calls), True, True)] for at in (0, 10)]
        calls.append(JobCall("n", MESSAGE, 0, ends, size, begins_ps=times[0], ends_ps=times[1]))
    ranks = tuple(range(len(steps)))
    job = Job([JobGroup("g", ranks)], calls, steps, [0] * len(steps), [], [])
    assert play(job, RecordedTimes(job)).ends[0] == {0: end, 1: 23}


def test_ranks_that_are_too_far_apart_are_refused():
    """Of 12 days as much as is right; times of years have more than 64 bits."""
    net = machine("mine", 'topology = "full"\nlatency_us = 3\n')
    for apart_us, fits in ((10**11, True), (10**13, False)):
        job = both("a")
        job.calls[0] = JobCall("a", "all_reduce", 0, (0, 1), 4000, 4, "ring")
        job.steps[:] = [[JobStep(0, 0, True, True)], [blocking(apart_us, 0)]]
        pricing = Simulated(job, net, 2, range(2), {})
        if fits:
            assert play(job, pricing).end_ps(1) == (apart_us + 6) * US
        else:
            with pytest.raises(InvalidArgumentError, match="replay: ranks make a more than 10000"):
                play(job, pricing)


def test_a_call_that_nobody_waited_for_blocks_nobody(tmp_path):
    ranks = own(tmp_path, *[[record(1, at_s=0, took_s=9), begun(record(2, at_s=12))]] * 2)
    job = job_of(ranks, join(ranks))
    assert job.steps[0] == [
        JobStep(0, 0, makes=True), JobStep(12 * SECOND, 1, makes=True, waits=True),
    ]  # fmt: skip


def test_calls_of_the_same_time_are_in_their_order(tmp_path):
    """Nobody waited for the first; the second waited at once, or it is not known."""
    for second in (begun(record(2)), record(1, "send", peer=1)):
        other = record(1, "recv", peer=0) if second.is_message else second
        ranks = own(tmp_path, [record(1), second], [record(1), other])
        job = job_of(ranks, join(ranks))
        assert [step.call for step in job.steps[0] if step.makes] == [0, 1]


def test_the_command(tmp_path, capsys):
    own(tmp_path, steps_of(0), steps_of(1))
    out, net = tmp_path.parent / f"{tmp_path.name}.json", tmp_path.parent / f"{tmp_path.name}.toml"
    assert main(["replay", str(tmp_path), "--slow", "1=2", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "recorded  step 10,000,000.0 us (median of 4)" in text
    recorded, slow = json.loads(out.read_text())
    assert (recorded["step_us"], recorded["ranks"], len(recorded["steps_us"])) == (10e6, 2, 4)
    # Waits of (1 + 2) + (1 + 1.5) s in each step of 10 s, but the last ends with the call.
    assert recorded["exposed"] == pytest.approx(5 * (3 + 2.5) / (47 + 46.5))
    # Rank 1 computes for 3 - 0.5, 1.5 and 3.5 s instead of once: all is doubled.
    per_step = 2 * (2.5 + 1.5 + 3.5) + 1.5 + (4 - 0.5 - 2.5) * 0
    assert slow["step_us"] == pytest.approx(per_step * 1e6)
    assert sum(p["end_us"] - p["begin_us"] for p in slow["path"]) == pytest.approx(
        slow["path"][-1]["end_us"] - slow["path"][0]["begin_us"]
    )
    net.write_text('topology = "full"\nlatency_us = 0\n')
    assert main(["replay", str(tmp_path), "--net", str(net), "--json", str(out)]) == 0
    _, free = json.loads(out.read_text())
    # Compute of rank 0: 3 + 1 + 3 s; of rank 1: 2.5 + 1.5 + 3.5 s, 0.5 s later, so also 7.5.
    assert free["exposed"] < 0.1
    assert free["step_us"] < recorded["step_us"]


def test_a_timeline_for_perfetto(tmp_path, capsys):
    own(tmp_path, steps_of(0), steps_of(1))
    out = tmp_path.parent / f"{tmp_path.name}.json"
    assert main(["replay", str(tmp_path), "-o", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"rank 0", "rank 1", "program", "default", "critical path"}
    slices = [event for event in events if event["ph"] == "X"]
    waits = [e for e in slices if e["name"] == "waits for all_reduce #2" and e["pid"] == 1]
    assert [(e["ts"], round(e["dur"])) for e in waits] == [(5.5e6, 1_500_000)]
    rows = {}
    for event in slices:
        rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        assert all(a[1] <= b[0] for a, b in zip(sorted(row), sorted(row)[1:], strict=False))


def test_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    own(tmp_path, steps_of(0), steps_of(1))
    out = tmp_path.parent / f"{tmp_path.name}.png"
    assert main(["replay", str(tmp_path), "--slow", "1=2", "-o", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
