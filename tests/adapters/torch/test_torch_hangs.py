"""A torch job explains itself: unisono's groups in full, Gloo's by their stacks."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.launches import LIMIT_S, Launches
from unisono.core.base.source.stacks import offered_stacks
from unisono.launcher.traceback_text import exception_line
from unisono.workbench.cli.look.ask import ask_job
from unisono.workbench.cli.look.verdict import jobs_of, verdict_of
from unisono.workbench.cli.main import main
from unisono.workbench.trace.decoding import decode

pytest.importorskip("torch.distributed")

# Gloo's threads sometimes abort a process that ends by an exception.
CODES = {"unisono": (1,), "gloo": (1, 128 + signal.SIGABRT)}

# Rank 1 waits until the test opens the pipe for writing. The second time it waits for ever.
LATE = """\
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist

def load():
    open(os.environ["PIPE"]).read()

def train():
    if dist.get_rank() == 1:
        load()
    dist.all_reduce(x)

x = torch.ones(1000)
dist.init_process_group(os.environ["BACKEND"], timeout=timedelta(seconds=100))
dist.all_reduce(x)
train()
if os.environ["BACKEND"] == "unisono":
    dist.group.WORLD.set_timeout(timedelta(seconds=1))
else:  # torch's function knows its own backends only.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
train()
"""

FIRST = """\
import os
import torch, torch.distributed as dist
dist.init_process_group(os.environ["BACKEND"])
x = torch.ones(3)
dist.all_reduce(x)
if dist.get_rank() == 1:
    raise ValueError("no data")
dist.all_reduce(x)
"""


@pytest.fixture
def launches(tmp_path):
    """Return launches whose ranks run on the loopback device; all of them end with the test."""
    os.mkfifo(tmp_path / "pipe")
    launches = Launches(tmp_path)
    yield launches
    launches.close()


def start(launches, ranks, backend, script, *words, **variables):
    return launches.start(
        *("--nproc-per-node", ranks, *words),
        script=script,
        BACKEND=backend,
        PIPE=str(launches.folder / "pipe"),
        GLOO_SOCKET_IFNAME="lo",
        **variables,
    )


def verdict_when(launch, right):
    """Return the job when its verdict is right."""
    limit_s = time.monotonic() + LIMIT_S
    while True:
        jobs = jobs_of(ask_job(str(launch.pid)))
        text = verdict_of(jobs[0]) if jobs else []
        if right(text):
            return jobs[0]
        assert time.monotonic() < limit_s, text
        assert launch.is_running(), launch.finish()


def let_go_on(launches):
    with open(launches.folder / "pipe", "w"):
        pass


def seen(capsys, *words):
    assert main(list(map(str, words))) == 0
    return capsys.readouterr().out


def test_a_late_rank_of_a_unisono_group_is_explained(launches, capsys):
    folder = launches.folder / "traces"
    launch = start(launches, 2, "unisono", LATE, "--stats", UNISONO_TRACE_DIR=str(folder))
    named = (
        r"rank 0 waits in all_reduce #2 for \d+\.\d s for rank 1, "
        r"which is in load \(script.py:6\), called from script.py:10"
    )
    verdict_when(launch, lambda text: text and re.fullmatch(named, text[0]))
    assert re.search(named, seen(capsys, "top", "--once", launch.pid))
    assert ", line 6, in load\n" in seen(capsys, "stacks", launch.pid)
    let_go_on(launches)
    code, _, err = launch.finish()
    assert code == 1
    # The time-out names the place and the last call of the late rank.
    line, place = re.search(
        r"\n\[rank0\]: (unisono\.adapters\.torch.*)\n\[rank0\]: +(.*)", err
    ).groups()
    # On a busy machine the last answer of rank 1 may be late.
    late = "rank 1 (never entered|had not entered)"
    assert re.search(rf"CollectiveTimeoutError: all_reduce #3 in group .* {late}", line)
    of_rank = "rank 1 is in load (script.py:6), called from script.py:10; its last call was "
    assert place.startswith(of_rank + "all_reduce #2")
    # The traceback ends in the user's line.
    script = launches.folder / "script.py"
    own = f'[rank0]:   File "{script}", line 11, in train\n[rank0]:     dist.all_reduce(x)'
    assert f"{own}\n[rank0]: {line}\n" in err
    assert "distributed_c10d.py" not in err
    # The launcher names the place of the rank that it stopped.
    assert "unisono run: rank 1 stopped by the launcher, in load (script.py:6), called " in err
    assert "unisono run: first failure: rank 0 " in err
    # The statistics and the records are those of the script's lines.
    table = err[err.index("unisono run: calls in group 'default' on ") :]
    assert re.search(r"\n  all_reduce +3 +0\.012 ", table)
    assert re.search(r"\n  rank +1 +\d+\.\d+ s +100%", table)
    groups = decode((folder / "trace_rank_0").read_bytes()).groups
    calls = [r for group in groups for r in group.records if r.op == "all_reduce"]
    assert [(Path(r.file), r.line, r.function) for r in calls] == [
        (script, 15, "<module>"),
        (script, 11, "train"),
        (script, 11, "train"),
    ]
    assert [r.outcome for r in calls] == ["completed", "completed", "timed out"]


def test_a_late_rank_of_a_gloo_group_is_shown_by_its_stack(launches, capsys):
    launch = start(launches, 2, "gloo", LATE)
    waits = "rank 0 is in train (script.py:11), called from script.py:16"
    loads = "rank 1 is in load (script.py:6), called from script.py:10"
    job = verdict_when(launch, lambda text: text == [waits, loads])
    assert {state["world_size"] for state in job.states.values()} == {2}
    top = seen(capsys, "top", "--once", launch.pid).splitlines()
    assert top[1:3] == [waits, loads]
    (found,) = json.loads(seen(capsys, "top", "--json", job.name))["jobs"]
    assert [state["rank"] for state in found["ranks"]] == [0, 1]
    stacks = seen(capsys, "stacks", launch.pid)
    assert "line 11, in train\n" in stacks.partition("\nrank 0, thread MainThread:\n")[2]
    assert stacks.endswith(f'  File "{launches.folder}/script.py", line 6, in load\n')
    let_go_on(launches)
    code, _, err = launch.finish()
    assert code in CODES["gloo"]
    assert "RuntimeError" in err[err.index("unisono run: first failure: rank 0 ") :]
    assert "unisono run: rank 1 stopped by the launcher, in load (script.py:6), called " in err


@pytest.mark.whole("6 interpreters load torch")
@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_the_launcher_names_the_first_cause(launches, backend):
    code, _, err = start(launches, 3, backend, FIRST).finish()
    assert code in CODES[backend]
    line, *found = err[err.index("unisono run: first failure: rank 1 ") :].splitlines()
    if found:  # others wrote after rank 1
        assert found[0] == "[rank1]: Traceback (most recent call last):"
        assert exception_line("\n".join(found)) == "ValueError: no data"
    else:
        assert line.endswith("; its traceback is above: ValueError: no data")
    for rank in (0, 2) if backend == "unisono" else ():
        of_rank = [line for line in err.splitlines() if line.startswith(f"[rank{rank}]: ")]
        if of_rank:  # the launcher may stop it first
            assert any("rank 1 raised ValueError: no data" in line for line in of_rank)


def test_a_process_that_is_no_rank_offers_no_stack():
    assert offered_stacks([os.getpid(), os.getppid()]) == []
