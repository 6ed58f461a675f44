"""`unisono run --restart worker`: one worker is replaced, the others keep their processes."""

import re

import pytest

pytestmark = pytest.mark.linux("the launcher watches pidfds")

JOB = """
import os, signal, sys
import numpy as np
import unisono as dist
from unisono.errors import StepAborted
dist.init_process_group(timeout=60)
joined = os.environ.get("UNISONO_JOIN") == "1"
me = int(os.environ["RANK"])
state = {"step": 0, "sum": np.zeros(3)}
dist.sync_state(state)
print("began", me, os.getpid(), state["step"], flush=True)
fails = not joined and me == 1

def steps(end):
    while state["step"] < end:
        with dist.step() as s:
            x = np.ones(1)
            dist.all_reduce(x)
            s.commit()
        state["step"] += 1
        state["sum"] += x[0]

if not joined:
    steps(10)
    if fails:
        print("some last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""

GOES_ON = """
    try:
        steps(20)
    except StepAborted:
        dist.reconfigure(min_size=3)
        dist.sync_state(state)
steps(30)
print("ended", me, os.getpid(), dist.get_rank(), state["step"], state["sum"][0], flush=True)
dist.barrier()
"""


def rows(out, word):
    return [line.split()[1:] for line in out.splitlines() if line.startswith(word)]


def test_the_others_keep_their_processes_and_the_replacement_gets_their_state(launches, tmp_path):
    logs = tmp_path / "logs"
    code, out, err = launches.run(
        *("-n3", "--restart", "worker", "--max-restarts", "1", "--log-dir", logs, "--tee", "3"),
        *("--prefix", ""),
        script=JOB + GOES_ON,
    )
    assert code == 0, err
    began = {(me, pid): int(step) for me, pid, step in rows(out, "began")}
    assert len(began) == 4
    ended = rows(out, "ended")
    assert len(ended) == 3
    # Ranks 0 and 2 end in the processes in which they began, and the replacement comes last.
    assert {(me, pid) for me, pid, *_ in ended} < set(began)
    order = [me for me, *_ in sorted(ended, key=lambda row: row[2])]
    assert order == ["0", "2", "1"]
    assert {tuple(row[3:]) for row in ended} == {("30", "90.0")}
    [late] = [step for (me, pid), step in began.items() if (me, pid) in
              {(row[0], row[1]) for row in ended} and me == "1"]  # fmt: skip
    assert late == 10
    assert re.search(r"rank 1 \(pid \d+, host \S+\) was killed by SIGKILL; replacement 1 of 1", err)
    [first] = logs.glob("*/attempt_0/1/stderr.log")
    assert "some last words" in first.read_text()
    [second] = logs.glob("*/attempt_1/1/stdout.log")
    assert second.read_text().startswith("began 1")


def test_a_script_that_does_not_reconfigure_is_restarted_as_a_whole(launches):
    script = (
        JOB.replace(
            "not joined and me == 1",
            "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and me == 1 and not joined",
        )
        + "    steps(20)\nprint('done', me)\n"
    )
    code, out, err = launches.run(
        *("-n2", "--restart", "worker", "--max-restarts", "2"), script=script
    )
    assert code == 0, err
    assert sorted(rows(out, "done")) == [["0"], ["1"]]
    assert "replacement 1 of 2" in err
    # The killed worker is the cause, although it was replaced.
    assert re.search(r"rank 1 .* was killed by SIGKILL; restart 2 of 2", err)


def test_restarts_and_replacements_have_one_budget(launches):
    script = JOB.replace("not joined and me == 1", "me == 1") + "    steps(20)\n"
    code, _, err = launches.run(
        *("-n2", "--restart", "worker", "--max-restarts", "3"), script=script
    )
    assert code == 137
    used = [line.split("; ")[-1] for line in err.splitlines() if line.endswith(" of 3")]
    assert used == ["replacement 1 of 3", "restart 2 of 3", "replacement 3 of 3"]
    assert re.search(r"first failure: rank 1 .* was killed by SIGKILL", err)


def test_without_a_budget_the_first_failure_ends_the_launch(launches):
    code, _, err = launches.run("-n3", "--restart", "worker", script=JOB + GOES_ON)
    assert code == 137
    assert re.search(r"first failure: rank 1 .* was killed by SIGKILL", err)


def test_a_replacement_ends_with_the_job_that_does_not_need_it(launches):
    alone = """
    try:
        steps(20)
    except StepAborted:
        print("alone", me, flush=True)
        sys.exit(0)
"""
    code, out, err = launches.run(
        *("-n3", "--restart", "worker", "--max-restarts", "3"), script=JOB + alone
    )
    assert code == 0, err
    assert sorted(rows(out, "alone")) == [["0"], ["2"]]
    assert "replacement 1 of 3" in err


ALONE_WITH_TORCH = """
import os, signal, sys
import torch
import torch.distributed as torch_dist
import unisono
import unisono.torch
from unisono.errors import StepAborted
torch_dist.init_process_group("unisono")
x, me = torch.zeros(1), int(os.environ["RANK"])
unisono.sync_state({"x": x})
try:
    for step in range(20):
        if step == 10 and me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with unisono.step() as s:
            torch_dist.all_reduce(torch.ones(1))
            s.commit()
except StepAborted:
    print("alone", me, flush=True)
    sys.exit(0)
"""


@pytest.mark.whole("imports torch 4 times")
def test_a_replacement_of_torch_ends_with_the_job_that_does_not_need_it(launches):
    pytest.importorskip("torch")
    words = ["-n3", "--restart", "worker", "--max-restarts", "3"]
    code, out, err = launches.run(*words, script=ALONE_WITH_TORCH)
    assert code == 0, err
    assert sorted(rows(out, "alone")) == [["0"], ["2"]]
    assert "replacement 1 of 3" in err


ENDS_EARLY = """
import os, pathlib, signal, time
import numpy as np
import unisono as dist
me, mark = int(os.environ["RANK"]), pathlib.Path("MARK")

if me == 1 and not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
while me == 2 and not mark.exists():
    time.sleep(0.01)
dist.init_process_group(timeout=120)
x = np.ones(1)
dist.all_reduce(x)
print("ended", me, os.environ.get("UNISONO_JOIN", "0"), int(x[0]), flush=True)
"""


def test_the_others_wait_for_the_rank_of_a_worker_that_fails_before_they_meet(launches, tmp_path):
    script = ENDS_EARLY.replace("MARK", str(tmp_path / "mark"))
    words = ["-n3", "--restart", "worker", "--max-restarts", "1"]
    code, out, err = launches.run(*words, script=script)
    assert code == 0, err
    assert re.search(r"rank 1 .* was killed by SIGKILL; replacement 1 of 1", err)
    assert sorted(rows(out, "ended")) == [["0", "0", "3"], ["1", "0", "3"], ["2", "0", "3"]]


KILLED_WHILE_THEY_MEET = """
import importlib, os, pathlib, signal, time
import numpy as np
import unisono as dist
from unisono.errors import PeerError, StepAborted
connect = importlib.import_module("unisono.core.transports.connect")
publish, mark = connect._publish, pathlib.Path("MARK")
me, joins = int(os.environ["RANK"]), os.environ.get("UNISONO_JOIN", "0")

class Store:
    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        def call(*arguments):
            result = getattr(self.store, name)(*arguments)
            # After the barrier the others leave the meeting.
            while name == "barrier" and not self.store.get("rank/0").isdigit():
                time.sleep(0.001)
            if name == "CALL":
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        return call

if me == 1 and not mark.exists():
    connect._publish = lambda store, *rest: publish(Store(store), *rest)
dist.init_process_group(timeout=60)
state, fresh = {"step": 0}, True
while state["step"] < 10:
    try:
        if fresh:
            dist.sync_state(state)
        with dist.step() as s:
            dist.all_reduce(x := np.ones(1))
            s.commit()
        state["step"] += 1
        fresh = s.changed
    except (PeerError, StepAborted):
        fresh = True
    if fresh:
        dist.reconfigure(min_size=3)
print("ended", me, joins, state["step"], int(x[0]), flush=True)
dist.barrier()
"""


# Between the two its address may be that of a dead process, so that links of the others break.
@pytest.mark.sweep(1)
@pytest.mark.parametrize("call", ["compare_set", "barrier"])
def test_a_worker_that_is_killed_while_they_meet_is_replaced(launches, tmp_path, call):
    script = KILLED_WHILE_THEY_MEET.replace("MARK", str(tmp_path / "mark")).replace("CALL", call)
    code, out, err = launches.run("-n3", "--restart=worker", "--max-restarts=1", script=script)
    assert code == 0, err
    assert re.search(r"rank 1 .* was killed by SIGKILL; replacement 1 of 1", err)
    joins = "1" if call == "barrier" else "0"
    assert sorted(rows(out, "ended")) == [
        ["0", "0", "10", "3"], ["1", joins, "10", "3"], ["2", "0", "10", "3"],
    ]  # fmt: skip


def test_without_a_budget_a_worker_that_fails_before_they_meet_ends_the_launch(launches, tmp_path):
    """The others must not go on with fewer workers: they would wait for its rank."""
    script = ENDS_EARLY.replace("MARK", str(tmp_path / "mark"))
    code, _, err = launches.run("--nproc-per-node=2:3", "--restart=worker", script=script)
    assert code == 137
    assert re.search(r"first failure: rank 1 .* was killed by SIGKILL", err)


FAILING_IN_TURN = """
import os, signal
import numpy as np
import unisono as dist
from unisono.errors import PeerLostError, StepAborted
dist.init_process_group(timeout=60)
joined = os.environ.get("UNISONO_JOIN") == "1"
me, fresh = int(os.environ["RANK"]), True
dies_at = -1 if joined else {0: ZERO, 1: ONE, 2: TWO}[me]
state = {"step": 0}
while state["step"] < 40:
    try:
        if fresh:
            dist.sync_state(state)
        if state["step"] == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        with dist.step() as s:
            dist.all_reduce(np.ones(1))
            s.commit()
        state["step"] += 1
        fresh = s.changed
    except (StepAborted, PeerLostError):
        fresh = True
    if fresh:
        dist.reconfigure(min_size=LEAST)
print("ended", me, os.getpid(), dist.get_world_size(), state["step"], flush=True)
dist.barrier()
"""


def failing(zero, one, two, least):
    script = FAILING_IN_TURN.replace("ZERO", str(zero)).replace("ONE", str(one))
    return script.replace("TWO", str(two)).replace("LEAST", str(least))


MEETS_ELSEWHERE = """
import os
import unisono as dist
from unisono.errors import RendezvousError
rank, url = os.environ["RANK"], os.path.expandvars("URL")
try:
    dist.init_process_group(init_method=f"{url}?rank={rank}&world_size=2", timeout=60)
    print("met", rank, dist.get_world_size(), flush=True)
except RendezvousError as error:
    print("refused", rank, error.what, flush=True)
"""


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("url", "restart", "meets"),
    [
        ("file://FOLDER/store", "worker", False),
        ("file://FOLDER/store", "all", True),
        ("redis://127.0.0.1:1/job", "worker", False),
        ("tcp://$MASTER_ADDR:$MASTER_PORT", "worker", True),
    ],
)
def test_ranks_meet_where_a_newcomer_can_join(launches, tmp_path, url, restart, meets):
    url = url.replace("FOLDER", str(tmp_path))
    script = MEETS_ELSEWHERE.replace("URL", url)
    code, out, err = launches.run("-n2", f"--restart={restart}", script=script)
    assert code == 0, err
    assert sorted(rows(out, "met")) == [[rank, "2"] for rank in "01" if meets]
    refused = sorted(line for line in out.splitlines() if line.startswith("refused"))
    assert refused == [
        f"refused {rank} rank {rank} cannot meet at '{url}?rank={rank}&world_size=2': newcomers of "
        "`unisono run --restart worker` join at env://"
        for rank in "01"
        if not meets
    ]


def test_a_worker_is_replaced_if_all_others_are_replacements(launches):
    code, out, err = launches.run(
        *("-n3", "--restart", "worker", "--max-restarts", "3"), script=failing(20, 10, 30, 3)
    )
    assert code == 0, err
    assert "replacement 3 of 3" in err
    assert "restart" not in err
    assert [row[2:] for row in sorted(rows(out, "ended"))] == [["3", "40"]] * 3


def test_a_node_goes_on_with_fewer_workers(launches):
    words = ["--nproc-per-node=2:3", "--restart=worker", "--max-restarts=1"]
    code, out, err = launches.run(*words, script=failing(-1, 10, 30, 2))
    assert code == 0, err
    assert re.search(r"rank 1 \(pid .* was killed by SIGKILL; replacement 1 of 1", err)
    assert re.search(r"rank 2 \(pid .* by SIGKILL; going on with 2 of 3 workers", err)
    assert [row[2:] for row in sorted(rows(out, "ended"))] == [["2", "40"]] * 2


def test_a_node_with_too_few_workers_fails(launches):
    words = ["--nproc-per-node=2:3", "--restart=worker"]
    code, _, err = launches.run(*words, script=failing(-1, 10, 30, 1))
    assert code == 137
    assert "going on with 2 of 3 workers" in err
    assert re.search(r"first failure: rank 2 .* was killed by SIGKILL", err)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-n", "2:3"], "--nproc-per-node MIN:MAX needs --restart worker and one program"),
        (["-n", "3:2", "--restart=worker"], "needs MIN <= MAX, got '3:2'"),
        (["-n", "0:2", "--restart=worker"], "must be a number of at least 1, cpu, gpu or auto"),
    ],
)
def test_ranges_that_cannot_be_meant(launches, words, text):
    code, _, err = launches.run(*words, script="")
    assert code == 2
    assert text in err


def test_workers_after_a_replacement_found_the_next_world(launches):
    script = (
        failing(-1, 10, -1, 1)
        .replace("joined else {", "os.environ['TORCHELASTIC_RESTART_COUNT'] != '0' else {")
        .replace("fresh = True\n    if", "raise\n    if")
        .replace(
            "dist.init", "print('join', os.environ.get('UNISONO_JOIN'), flush=True)\ndist.init"
        )
    )
    code, out, err = launches.run(
        *("-n3", "--restart", "worker", "--max-restarts", "2"), script=script
    )
    assert code == 0, err
    assert rows(out, "join") == [["0"]] * 3 + [["1"]] + [["0"]] * 3
    assert len(rows(out, "ended")) == 3
