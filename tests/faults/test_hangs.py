"""Planted hangs: the time-out names the rank that is not there, and the line where it is.

Rank 1 of 3 hangs; its last line before the hang is marked. The other ranks call barrier.
"""

import re

import pytest

from tests.faults import scripts

SCRIPT = """
import multiprocessing, queue, subprocess, threading
from fcntl import flock as lock
import re as regex
from tests.faults.fault_calls import wait_for_count
dist.init_process_group(timeout=60)
pg = dist.group.WORLD
for _ in range(4):
    dist.all_reduce(np.ones(3))
pair, twin = dist.new_group([0, 1]), dist.new_group()
end = threading.Event()

def hang():
    HANG

if rank == 1:
    hang()
caught = attempt(CALL, timeout=1.0)
# A rank that leaves now would end the hang of rank 1.
store().add("caught", 1)
wait_for_count("caught", 2)
tell(caught)
"""

IN_HANG = r"rank 1 is in hang \(<string>:LINE\), called from <string>:\d+"

# By name: what rank 1 does, what the others call, what the text of the time-out must have.
HANGS = {
    "time.sleep": ("time.sleep(60)", "dist.barrier", IN_HANG),
    "a loop in Python": ("while True: pass", "dist.barrier", IN_HANG),
    "a loop in C": (
        "regex.match('(a+)+$', 'a' * 60 + 'b')",
        "dist.barrier",
        r"rank 1 \(process PID\) is running and does not answer",
    ),
    "stopped": (
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "dist.barrier",
        r"rank 1 \(process PID\) is stopped",
    ),
    "a lock": ("a = threading.Lock(); a.acquire(); a.acquire()", "dist.barrier", IN_HANG),
    "an event": ("end.wait()", "dist.barrier", IN_HANG),
    "a queue": ("queue.Queue().get()", "dist.barrier", IN_HANG),
    "a thread": (
        "t = threading.Thread(target=end.wait, daemon=True); t.start(); t.join()",
        "dist.barrier",
        IN_HANG,
    ),
    "a child process": (
        "ends = os.pipe(); subprocess.run(['cat'], stdin=ends[0])",
        "dist.barrier",
        IN_HANG,
    ),
    "a pipe": ("os.read(os.pipe()[0], 1)", "dist.barrier", IN_HANG),
    "input": ("sys.stdin.read()", "dist.barrier", IN_HANG),
    "a file lock": (
        "f = os.memfd_create('f'); lock(f, 2); lock(open(f'/proc/self/fd/{f}'), 2)",
        "dist.barrier",
        IN_HANG,
    ),
    "a worker of a data loader": (
        "multiprocessing.get_context('fork').SimpleQueue().get()",
        "dist.barrier",
        IN_HANG,
    ),
    "a full pipe": ("os.write(os.pipe()[1], bytes(1 << 20))", "dist.barrier", IN_HANG),
    "a condition": (
        "c = threading.Condition(); c.acquire(); c.wait()",
        "dist.barrier",
        IN_HANG,
    ),
    "a generator": ("sum(1 for _ in iter(int, 1))", "dist.barrier", "rank 1 is in <genexpr>"),
    "a loop in NumPy": (
        "while True: np.ones(1 << 20).sum()",
        "dist.barrier",
        IN_HANG,
    ),
    "a call of another group of the same ranks": (
        "dist.all_reduce(np.ones(1), group=twin, timeout=60)",
        "dist.barrier",
        IN_HANG,
    ),
    "another branch": ("dist.recv(np.ones(1), 2)", "dist.barrier", IN_HANG),
    "another group": (
        "dist.barrier(group=pair, timeout=60)",
        "dist.barrier",
        IN_HANG,
    ),
    "another tag": (
        "dist.recv(np.ones(1), 0, tag=5, timeout=60)",
        "lambda **how: dist.recv(np.ones(1), 1, tag=6, **how)",
        IN_HANG,
    ),
    "a receive from a rank in a loop": (
        "while True: pass",
        "lambda **how: dist.recv(np.ones(1), 1, **how)",
        IN_HANG,
    ),
    "deadlocked receives": (
        "dist.recv(np.ones(1), 0, timeout=60)",
        "lambda **how: dist.recv(np.ones(1), 1, **how)",
        IN_HANG,
    ),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", list(HANGS))
def test_time_out_names_the_rank_and_its_line(name):
    doing, calling, expected = HANGS[name]
    script = SCRIPT.replace("HANG", doing, 1).replace("CALL", calling)
    line = (scripts._PROLOGUE + script).splitlines().index(f"    {doing}") + 1
    with scripts.ranks_of(script, 3) as (processes, _):
        told = [scripts.outcome(processes[rank]) for rank in (0, 2)]
        pid = processes[1].pid
    pattern = expected.replace("LINE", str(line)).replace("PID", str(pid))
    for caught, _, err in told:
        assert caught is not None, err
        assert caught["kind"] == "CollectiveTimeoutError", caught
        assert 1 in caught["peers"], caught
        assert re.search(pattern, caught["text"]), caught["text"]
