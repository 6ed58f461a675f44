"""Planted hangs: the time-out names the rank that is not there, and the line where it is.

Some ranks of 3 hang, rank 1 by default, and the other ranks make a call. docs/howto/hangs.md lists
the hangs and the lines of the error that a user sees.
"""

import contextlib
import json
import os
import re
import subprocess
from importlib.util import find_spec
from typing import NamedTuple

import pytest

from tests.faults import scripts
from tests.support.cgroups import small_cgroup
from tests.support.tools import ROOT

SCRIPT = """
import asyncio, ctypes, gc, multiprocessing, queue, socket, subprocess, threading
from concurrent.futures import ThreadPoolExecutor
from fcntl import flock as lock_file
import re as regex
from tests.faults.fault_calls import wait_for_count
folder = os.environ["FOLDER"]
sys.path.append(folder)
fifo = os.path.join(folder, "fifo")
fork = multiprocessing.get_context("fork")
libc = ctypes.PyDLL(None)  # its calls keep the interpreter lock

def end_with_the_parent(*_):
    libc.prctl(1, signal.SIGKILL)

class Stuck:
    def __len__(self):
        return 1

    def __getitem__(self, at):
        time.sleep(60)

class Finalized:
    def __del__(self):
        time.sleep(60)

def hold(lock):
    held = fork.Event()

    def child():
        end_with_the_parent()
        lock.acquire()
        held.set()
        time.sleep(60)

    fork.Process(target=child, daemon=True).start()
    held.wait()

dist.init_process_group(timeout=60)
pg = dist.group.WORLD
pair, twin = dist.new_group([0, 1]), dist.new_group()
for _ in range(4):
    dist.all_reduce(np.ones(3))
end = threading.Event()

def hang():
    HANG

if rank in LATE:
    SETUP
store().add("prepared", 1)
wait_for_count("prepared", 3)
if rank in LATE:
    hang()
# Half of it is for the answers of the other ranks, also on a busy machine; at most LATE_S.
caught = attempt(CALL, timeout=4.0)
# A rank that leaves now would end the hang of another rank.
store().add("caught", 1)
wait_for_count("caught", 3 - len(LATE))
tell(caught)
"""

IN_HANG = (
    "rank 1 is in hang (train.py:LINE), called from train.py:CALLER; its last call was "
    "all_reduce #6, T s ago"
)
WHERE = "in hang (train.py:LINE)"


class Hang(NamedTuple):
    """A planted hang.

    Attributes:
        doing: What the hanging ranks do, in one line.
        shown: What the error of the others has, with placeholders.
        calls: What the others call.
        late: The ranks that hang.
        kind: Of the error.
        setup: What the hanging ranks do before.
        needs: A module.
    """

    doing: str
    shown: str = IN_HANG
    calls: str = "dist.barrier"
    late: tuple[int, ...] = (1,)
    kind: str = "CollectiveTimeoutError"
    setup: str = "pass"
    needs: str = "sys"


def call_with(words):
    return f"lambda **how: dist.{words}, **how)"


HANGS = {
    "time.sleep": Hang("time.sleep(60)"),
    "a loop in Python": Hang("while True: pass"),
    "a loop in NumPy": Hang("while True: np.ones(1 << 20).sum()"),
    "a generator": Hang(
        "sum(1 for _ in iter(int, 1))",
        "rank 1 is in <genexpr> (train.py:LINE), called from train.py:LINE",
    ),
    "garbage collection": Hang("while True: gc.collect()"),
    "a finalizer": Hang(
        "Finalized()",
        "rank 1 is in __del__ (train.py:OTHER), called from train.py:LINE",
    ),
    "an import": Hang(
        "import slow_module",
        "rank 1 is at slow_module.py:2, called from train.py:LINE",
    ),
    "a lock": Hang("a = threading.Lock(); a.acquire(); a.acquire()"),
    "a lock that a child process holds": Hang(
        "lock.acquire()", setup="lock = fork.Lock(); hold(lock)"
    ),
    "a file lock": Hang(
        "f = os.memfd_create('f'); lock_file(f, 2); lock_file(open(f'/proc/self/fd/{f}'), 2)"
    ),
    "an event": Hang("end.wait()"),
    "a condition": Hang("c = threading.Condition(); c.acquire(); c.wait()"),
    "a queue": Hang("queue.Queue().get()"),
    "a thread": Hang("t = threading.Thread(target=end.wait, daemon=True); t.start(); t.join()"),
    "a pool of threads that waits for itself": Hang(
        "(p := ThreadPoolExecutor(1)).submit(lambda: p.submit(int).result()).result()"
    ),
    "an event loop": Hang("asyncio.run(asyncio.Event().wait())"),
    "a signal": Hang("signal.pause()"),
    "a child process": Hang("ends = os.pipe(); subprocess.run(['cat'], stdin=ends[0])"),
    "a data loader of torch": Hang(
        "next(loader)",
        setup="from torch.utils.data import DataLoader; loader = iter(DataLoader(Stuck(), "
        "num_workers=1, multiprocessing_context=fork, worker_init_fn=end_with_the_parent))",
        needs="torch",
    ),
    "a worker of a data loader": Hang("fork.SimpleQueue().get()"),
    "a pipe": Hang("os.read(os.pipe()[0], 1)"),
    "a full pipe": Hang("os.write(os.pipe()[1], bytes(1 << 20))"),
    "a named pipe without a writer": Hang("open(fifo).read()"),
    "a connection that no client makes": Hang("socket.create_server(('127.0.0.1', 0)).accept()"),
    "input": Hang("sys.stdin.read()"),
    "a debugger": Hang("breakpoint()"),
    "a call of another group of the same ranks": Hang(
        "dist.all_reduce(np.ones(1), group=twin, timeout=60)",
        f"rank 1 is {WHERE}, ...; its call all_reduce #1 of group '2' has run for T s",
    ),
    "a call of another group": Hang(
        "dist.barrier(group=pair, timeout=60)",
        f"rank 1 is {WHERE}, ...; its call barrier #1 of group '1' has run for T s",
    ),
    "another branch": Hang("dist.recv(np.ones(1), 2)"),
    "one call less": Hang(
        "end.wait()",
        f"ranks 0 and 2 are {WHERE}, ...; their last call was all_reduce #6, T s ago",
        late=(0, 2),
    ),
    "another tag": Hang(
        "dist.recv(np.ones(1), 0, tag=5, timeout=60)",
        f"rank 1 is {WHERE}, ...; its call recv #1 (rank 0, tag 5) has run for T s",
        calls=call_with("recv(np.ones(1), 1, tag=6"),
    ),
    "receives that wait for each other": Hang(
        "dist.recv(np.ones(1), 0, timeout=60)",
        f"rank 1 is {WHERE}, ...; its call recv #1 (rank 0, tag 0) has run for T s",
        calls=call_with("recv(np.ones(1), 1"),
    ),
    "a receive from a rank in a loop": Hang(
        "while True: pass", calls=call_with("recv(np.ones(1), 1")
    ),
    "a loop in C": Hang(
        "regex.match('(a+)+$', 'a' * 60 + 'b')",
        "rank 1 (process PID) is running and does not answer: C code holds its interpreter lock, "
        "or its cores are busy",
    ),
    "C code that sleeps with the interpreter lock": Hang(
        "libc.sleep(60)",
        "rank 1 (process PID) sleeps (WCHAN) and does not answer",
    ),
    "a sleep in the kernel": Hang(
        "os.posix_spawn('/bin/true', ['true'], {}, file_actions=opens_fifo)",
        "rank 1 (process PID) sleeps in the kernel (WCHAN) and does not answer",
        setup="opens_fifo = [(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)]",
    ),
    "stopped": Hang(
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "rank 1 (process PID) is stopped; all_reduce #6 ended on rank R T s ago",
    ),
    "exit code 0": Hang("sys.exit(0)", "rank 1 was lost: it left", kind="PeerLostError"),
    "SIGKILL": Hang(
        "os.kill(os.getpid(), signal.SIGKILL)",
        "rank 1 was lost",
        kind="PeerLostError",
    ),
    "another call": Hang(
        "dist.all_reduce(np.ones(1), timeout=60)",
        "rank 1 called all_reduce",
        kind="CollectiveMismatchError",
    ),
    "groups with other members": Hang(
        "dist.new_group([0, 1], timeout=60)",
        "rank 1 called new_group",
        calls=call_with("new_group([0, 2]"),
        kind="CollectiveMismatchError",
    ),
}

# Such a rank does not answer; what it does is in /proc.
LINUX = {"a file lock", *(name for name, hang in HANGS.items() if "process PID" in hang.shown)}
NAMES = [
    pytest.param(name, marks=[pytest.mark.linux("looks into /proc")] * (name in LINUX))
    for name in HANGS
]
PLACEHOLDERS = {
    "train.py": "<string>",
    "...": ".*",
    "CALLER": r"\d+",
    "OTHER": r"\d+",
    " (WCHAN)": r"(?: \(\w+\))?",
    "R T s ago": r"\d \d+\.\d s ago",
    "T s": r"\d+\.\d(?: to \d+\.\d)? s",
}


def pattern_of(shown, **known):
    """Return the pattern of a text with placeholders."""
    pattern = re.escape(shown)
    for name, value in (PLACEHOLDERS | known).items():
        pattern = pattern.replace(re.escape(name), str(value))
    return pattern


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", NAMES)
def test_time_out_names_the_rank_and_its_line(tmp_path, name):
    hang = HANGS[name]
    if find_spec(hang.needs) is None:
        pytest.skip(f"needs {hang.needs}")
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(60)\n")
    os.mkfifo(tmp_path / "fifo")
    words = {"LATE": hang.late, "SETUP": hang.setup, "HANG": hang.doing, "CALL": hang.calls}
    script = SCRIPT
    for word, text in words.items():
        script = re.sub(rf"\b{word}\b", lambda _, text=text: str(text), script)
    line = (scripts._PROLOGUE + script).splitlines().index(f"    {hang.doing}") + 1
    punctual = [rank for rank in range(3) if rank not in hang.late]
    with scripts.ranks_of(script, 3, FOLDER=str(tmp_path)) as (processes, _):
        try:
            ended = [scripts.outcome(processes[rank]) for rank in punctual]
        finally:
            # Ends the child that posix_spawn has made.
            with contextlib.suppress(OSError):
                os.close(os.open(tmp_path / "fifo", os.O_WRONLY | os.O_NONBLOCK))
        pid = processes[1].pid
    for caught, _, err in ended:
        assert caught is not None, err
        assert caught["kind"] == hang.kind, caught
        assert set(hang.late) <= set(caught["peers"]), caught
        assert re.search(pattern_of(hang.shown, LINE=line, PID=pid), caught["text"]), caught["text"]


SLOW_MEMORY = """
import ctypes, mmap
libc = ctypes.PyDLL(None)  # its calls keep the interpreter lock
dist.init_process_group(timeout=60)
dist.all_reduce(np.ones(3))
if rank == 1:
    with open(os.environ["GROUP"], "w") as file:
        file.write(str(os.getpid()))
    with open(os.environ["HOLES"], "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
    memory.madvise(mmap.MADV_RANDOM)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    libc.memchr.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    while True:
        libc.memchr(address, 1, len(memory))
tell(attempt(dist.barrier, timeout=3.0))
store().wait(["end"], 60)
"""


# On busy cores the rank may not run while its page faults are counted.
@pytest.mark.alone
@pytest.mark.whole("3 s of waiting")
def test_time_out_names_a_rank_whose_memory_does_not_fit(tmp_path):
    # Pages of holes are not on the disk, but the kernel counts them as if they were.
    with open(tmp_path / "holes", "wb") as file:
        file.truncate(64 << 30)
    if (
        "tmpfs"
        in subprocess.run(["stat", "-f", "-c%T", tmp_path], capture_output=True, text=True).stdout
    ):
        pytest.skip("files of this folder are in memory")
    with small_cgroup(64 << 20) as folder:
        paths = {"GROUP": str(folder / "cgroup.procs"), "HOLES": str(tmp_path / "holes")}
        with scripts.ranks_of(SLOW_MEMORY, 2, **paths) as (processes, store):
            line = processes[0].stdout.readline()
            store.set("end", "")
            assert line, processes[0].stderr.read()
            pid = processes[1].pid
    caught = json.loads(line)
    assert caught["peers"] == [1]
    named = pattern_of(
        "rank 1 (process PID) reads its memory from disk (N page faults a second)", PID=pid
    )
    assert re.search(named.replace("N", r"\d+"), caught["text"]), caught["text"]


def test_page_lists_the_hangs_and_their_lines():
    page = (ROOT / "docs/howto/hangs.md").read_text(encoding="utf-8")
    assert IN_HANG in page
    for name, hang in HANGS.items():
        if hang.shown != IN_HANG:
            assert f"| {name} | `{hang.shown}` | " in page
