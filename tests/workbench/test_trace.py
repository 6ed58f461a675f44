"""`unisono trace`: the records of a running job, and pictures."""

import json
import os
import platform
import re
import subprocess
import time

import pytest

from tests.faults.scripts import LIMIT_S, ranks_of, started
from tests.workbench.trace.test_analysis import record, world
from tests.workbench.trace.test_timeline import arrows_of, parse
from unisono.core.recorder.flight_recorder import encode
from unisono.workbench.cli.look.look import find_jobs
from unisono.workbench.cli.look.verdict import JobView
from unisono.workbench.cli.main import main
from unisono.workbench.cli.trace import gather
from unisono.workbench.cli.trace.gather import ask_ranks
from unisono.workbench.trace.clocks import align
from unisono.workbench.trace.joined import by_rank, join

SCRIPT = """
dist.init_process_group(timeout=60)
x = np.ones(1000)
for _ in range(20):
    dist.all_reduce(x)
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0) if rank == 1 else None
print("there", flush=True)
if rank == 1:
    time.sleep(60)
dist.all_reduce(x)
"""


def wait_until_there(processes):
    for process in processes:
        assert process.stdout.readline() == "there\n"


def run(capsys, *words):
    assert main(["trace", *words]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.linux("finds a job by a process")
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_trace_of_a_running_job(capsys, tmp_path, engine):
    with ranks_of(SCRIPT, 3, UNISONO_ENGINE=engine) as (processes, _):
        wait_until_there(processes)
        named = (
            r"group 'default': rank 1 has not started all_reduce #21, in which ranks 0 and 2 "
            r"waited .* \(<string>:19\)"
        )
        pid = str(processes[1].pid)
        limit_s = time.monotonic() + LIMIT_S
        # On a busy machine a rank may not be in its last call yet, or answers too late.
        lines = []
        while len(lines) < 9 or not re.fullmatch(named, lines[0]):
            assert time.monotonic() < limit_s, lines
            main(["trace", pid])
            lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == "time axis: one clock, error 0"
        assert "group 'default': behind #21 by 1: rank 1" in lines
        path = tmp_path / "trace.json"
        run(capsys, pid, "-o", str(path))
        assert os.listdir(tmp_path) == ["trace.json"]
        slices, flows, _ = parse(json.loads(path.read_text()))
        names = [(each["pid"], each["name"]) for each in slices]
        for rank in (0, 2):
            assert (rank, "all_reduce #21 under way") in names
        assert (1, "all_reduce #20") in names
        assert arrows_of(flows).count(("message", 0, 1)) == 20
        place = [each["args"]["call site"] for each in slices if each["name"] == "send #1"]
        assert place == ["<string>:15 in <module>"]
        processes_named = [
            event["args"]["name"]
            for event in json.loads(path.read_text())["traceEvents"]
            if event["name"] == "process_name"
        ]
        assert processes_named == [
            f"rank {rank} ({platform.node()}, pid {process.pid})"
            for rank, process in enumerate(processes)
        ]


def why_no_time_namespace():
    """Return why a process cannot have a monotonic clock of its own, or None."""
    try:
        subprocess.run(["unshare", "-T", "--monotonic", "1000", "true"], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return str(error)
    return None


@pytest.mark.linux("time namespaces")
@pytest.mark.skipif(why_no_time_namespace() is not None, reason=str(why_no_time_namespace()))
@pytest.mark.parametrize("calls", [20, 0])
def test_clock_of_another_host_is_found(monkeypatch, calls):
    """The wall clock is common, so the shift of a correct axis is 0, up to the stated error."""
    script = SCRIPT.replace("range(20)", f"range({calls})")
    prefixes = [["unshare", "-T", "--monotonic", str(1000 * rank)] for rank in range(2)]
    with ranks_of("", 0) as (_, store):
        variables = {
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)},
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        with started(prefixes, script, variables) as processes:
            wait_until_there(processes)
            [job] = find_jobs(str(os.getpid()))
            found, trips = ask_ranks(job)
    ranks = by_rank(found)
    assert len({each.origin.clock for each in ranks.values()}) == 2
    for some in ([], trips):
        axis = align(ranks, join(ranks), some)
        error_ns = axis.error_ns[platform.node()]
        if calls or some:
            assert abs(axis.shift_ns[1]) <= error_ns < 1e9
        else:
            assert error_ns is None


@pytest.mark.linux("finds a job by a process")
def test_several_jobs_must_be_named(capsys):
    script = "dist.init_process_group(timeout=60); print('there', flush=True); time.sleep(60)"
    with ranks_of(script, 1) as (first, _), ranks_of(script, 1) as (second, _):
        wait_until_there([*first, *second])
        assert main(["trace", str(os.getpid())]) == 1
        error = capsys.readouterr().err
        assert "trace: this user has 2 jobs" in error
        for process in (*first, *second):
            assert f"{process.pid} is of job " in error
        assert error.count(" (-c): 1 ranks, 1 answer") == 2


def test_rank_without_a_group_of_unisono_has_no_records():
    assert ask_ranks(JobView("j", 1, {0: {"rank": 0, "pid": 1, "groups": []}})) == ([], [])


def test_silent_rank_is_left_out(monkeypatch):
    monkeypatch.setattr(gather, "exchange", lambda *words: None)
    with ranks_of(
        "dist.init_process_group(timeout=60); print('there', flush=True); time.sleep(60)", 1
    ) as (processes, _):
        wait_until_there(processes)
        assert main(["trace", str(processes[0].pid)]) == 1


# ---- pictures ---------------------------------------------------------------------------------


def test_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    there = [
        record(1, took_s=3),
        record(2, "send", at_s=4, peer=1),
        record(3, at_s=10, took_s=None),
    ]
    missing = [record(1, at_s=2, took_s=1), record(2, "recv", at_s=3, took_s=2, peer=0)]
    for each in world(there, missing).values():
        (tmp_path / f"trace_rank_{each.rank}").write_bytes(encode(each))
    for ending in ("svg", "png"):
        path = tmp_path.parent / f"{tmp_path.name}.{ending}"
        assert run(capsys, str(tmp_path), "-o", str(path))[0].startswith("group 'default': rank 1")
    assert path.read_bytes().startswith(b"\x89PNG")
    text = path.with_suffix(".svg").read_text()
    # matplotlib writes each text as a comment before its letters.
    shown = re.findall(r"<!-- (.*?) -->", text)
    assert {"rank 0", "rank 1", "time (s)", "all_reduce", "send", "recv"} <= set(shown)
    assert {"under way", "has not made the call", "last rank, waited for"} <= set(shown)


def test_the_wait_of_a_failed_call_is_pale_and_its_end_is_marked(tmp_path):
    pytest.importorskip("matplotlib")
    from unisono.workbench.cli.trace.picture import _bars, draw

    there = [record(1), record(2, at_s=1, took_s=5, outcome="timed out")]
    ranks = world(there, there, [record(1)])
    groups = join(ranks)
    bars = [bar for bar in _bars(groups[0], ranks) if bar.record.seq == 2]
    assert [(bar.has_failed, bar.ready_ns - bar.begin_ns) for bar in bars] == [(True, 5e9)] * 2
    draw(ranks, groups, "", str(path := tmp_path / "a.svg"))
    text = path.read_text()
    assert "<!-- failed -->" in text
    # matplotlib writes crosses as uses of a path with this colour: two, and the legend's.
    assert len(re.findall(r"<use [^>]*stroke: #c00000", text)) == 3


def test_output_with_another_ending(tmp_path, capsys):
    assert main(["trace", str(tmp_path), "-o", str(tmp_path / "x.txt")]) == 1
    assert ": expected one of .json, .svg, .png, .pdf, .html at its end" in capsys.readouterr().err
