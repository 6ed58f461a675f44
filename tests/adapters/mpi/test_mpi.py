"""The MPI engine: the bodies of other tests, the ways to start, the errors and the faults.

UNISONO_TEST_MPI may list virtual environments with mpi4py, another MPI library, pytest and unisono.
The bodies run there, too, under the mpiexec of the library.
"""

import ctypes
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import unisono as dist
from tests.core.rendezvous.test_detection import MPIEXEC, clean_environment
from tests.faults import test_hosts
from tests.faults.scripts import outcome
from tests.support import netns
from tests.support.calls import wait_until
from tests.support.oracle import REDUCE_OPS, check, reduce_op, reduction, values
from tests.support.tools import ROOT
from unisono.adapters.mpi import calls as mpi_calls
from unisono.adapters.mpi import engine as mpi_engine
from unisono.adapters.mpi import library as mpi_library
from unisono.adapters.mpi.engine import MPIEngine, _MPIWatch, _unfinished
from unisono.adapters.mpi.world import join
from unisono.core.base.deadline import Deadline
from unisono.core.base.net import tls
from unisono.core.stores import HashStore
from unisono.errors import RendezvousError, UnisonoError, UnsupportedError, UsageError
from unisono.lowlevel import CPUOptions
from unisono.testing import run

pytest.importorskip("mpi4py", reason="mpi4py is not installed")
pytestmark = pytest.mark.skipif(bool(mpi_library.why_absent()), reason="there is no MPI library")

LIMIT_S = 200
SAMPLE = ("test_lists_of_arrays", "test_mismatch", "test_scan")
REST = (
    "test_aliasing", "test_algorithms", "test_api", "test_coalescing_manager", "test_counters",
    "test_groups_are_freed", "test_debug", "test_deterministic", "test_device_mesh", "test_devices",
    "test_dispatch", "test_engines", "test_files", "test_huge", "test_matrix", "test_neighbors",
    "test_objects", "test_moved_as_bytes", "test_p2p", "test_shorter_messages",
    "test_process_group",
    "test_progress", "test_refusal", "test_calls_in_streams", "test_subgroups", "test_threads",
    "test_records",
    "test_uneven", "test_waiting", "test_work",
)  # fmt: skip
# Ranks, and how many bodies there are at least: some are for 2 or 3 ranks only.
BODIES = [(2, 60), (3, 60), (4, 40)]
OTHERS = [name for name in os.environ.get("UNISONO_TEST_MPI", "").split(",") if name]


def launched(command, **env):
    """Run a launch to its end; return its exit code, and the text of both streams."""
    done = subprocess.run(
        [str(word) for word in command],
        env=clean_environment(**env),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout


def unisono_run(size, *words):
    return [sys.executable, "-m", "unisono", "run", "-n", size, *words]


def under_mpiexec(size, folder, *words):
    """Return the command line of an environment's mpiexec."""
    python, mpiexec = Path(folder) / "bin/python", Path(folder) / "bin/mpiexec"
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False)
    open_mpi = "Open MPI" in version.stdout or "prte" in version.stdout.lower()
    extra = ["--allow-run-as-root", "--oversubscribe"] if open_mpi else []
    return [mpiexec, *extra, "-n", size, python, *words]


def run_bodies(command, modules, least, *, in_memory=True):
    """Run bodies; `in_memory`: the ranks agree in shared memory, else by MPI."""
    code, text = launched(
        [*command, "-m", "tests.adapters.mpi.runner", *modules],
        UNISONO_SHARED_MEMORY=str(int(in_memory)),
    )
    assert code == 0, text
    assert int(re.search(r"(\d+) bodies", text)[1]) >= least


def test_bodies_of_other_tests():
    run_bodies(unisono_run(3), SAMPLE, 8, in_memory=False)


@pytest.mark.whole("starts a world of MPI for all tests of groups, 60 s of CPU")
@pytest.mark.parametrize(("size", "least"), BODIES)
def test_all_bodies_of_other_tests(size, least):
    run_bodies(unisono_run(size), SAMPLE + REST, least, in_memory=size != 3)


@pytest.mark.whole("needs other MPI libraries")
@pytest.mark.parametrize(("size", "least"), BODIES)
@pytest.mark.parametrize("folder", OTHERS)
def test_other_libraries(folder, size, least):
    run_bodies(under_mpiexec(size, folder), SAMPLE + REST, least, in_memory=size != 3)


# ---- dtypes and reduce ops --------------------------------------------------------------------


def reduce_everything(rank):
    """all_reduce, reduce_scatter and scan of every dtype and op, small and large, against NumPy."""
    p = dist.get_world_size()
    for dtype, ops in REDUCE_OPS.items():
        for op in ops:
            for count in (5, 70_001):
                expected, slack = reduction(dtype, op, p, count)
                x = values(dtype, rank, count).copy()
                dist.all_reduce(x, reduce_op(op))
                check(("all_reduce", dtype, op, count), x, expected, slack)
            whole = np.concatenate([values(dtype, rank, 5)] * p)
            out = np.zeros(5, whole.dtype)
            dist.reduce_scatter_tensor(out, whole, reduce_op(op))
            expected, slack = reduction(dtype, op, p, 5)
            check(("reduce_scatter", dtype, op), out, expected, slack)


def extremes(rank):
    """MIN and MAX of signed zeros and NaNs have equal bits on all ranks, and lose no NaN."""
    odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, 1.0, -1.0], np.float32)
    mine = np.random.default_rng(rank).choice(odd, 500)
    everyone = [np.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    results = []
    for op, exact in ((dist.ReduceOp.MIN, np.minimum), (dist.ReduceOp.MAX, np.maximum)):
        x = mine.copy()
        dist.all_reduce(x, op)
        np.testing.assert_array_equal(x, exact.reduce(everyone))
        results.append(x.tobytes())
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, results)
    assert gathered == [results] * len(gathered)


def everything(rank):
    reduce_everything(rank)
    extremes(rank)


@pytest.mark.whole("every dtype and op, 10 s of CPU")
def test_every_dtype_and_op():
    run(everything, 3, ranks="processes", engine="mpi")


# ---- groups of a world ------------------------------------------------------------------------


def parts_of_a_world(rank):
    """Sub-groups, another engine beside MPI, and more groups than a library has communicators."""
    p = dist.get_world_size()
    maps = Path("/proc/self/maps").read_text().splitlines()
    # MPICH's shared memory has no name any more, so that no killed rank can leave it behind.
    assert all(line.endswith(" (deleted)") for line in maps if "mpich_shm" in line)
    native = dist.new_group(backend="gloo")
    assert "engine=mpi" not in repr(native)
    odd = dist.new_group([2, 0], sort_ranks=False)
    for group, members in ((native, range(p)), (odd, [2, 0])):
        if rank in members:
            x = np.full(3, rank + 1.0)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [sum(r + 1.0 for r in members)] * 3
    alone = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(x := np.ones(2), group=alone)
    assert x.tolist() == [1, 1]
    # A deterministic call runs a program over the links, and is agreed on like all others.
    dist.all_reduce(x, deterministic=True)
    dist.all_reduce(x, algorithm="ring")
    assert x.tolist() == [p * p] * 2
    with pytest.raises(dist.errors.CollectiveMismatchError):
        dist.all_reduce(x, deterministic=rank == 0)
    for _ in range(40):
        group = dist.new_group()
        dist.barrier(group=group)
        dist.destroy_process_group(group)
    # Otherwise an error of MPI, as too many communicators, would end the process.
    MPI = mpi_library.library().MPI
    assert MPI.COMM_WORLD.Get_errhandler() == MPI.ERRORS_RETURN
    for _ in range(12):
        # An abort after a call does not end the call on ranks that are still in it.
        group = dist.new_group()
        dist.all_reduce(x := np.ones(1 << 20), group=group)
        assert (x == p).all()
        if rank == 2:
            group.abort()
        dist.barrier()
        dist.destroy_process_group(group)
    return repr(dist.group.WORLD)


def test_groups_of_a_world():
    for text in run(parts_of_a_world, 3, ranks="processes", engine="mpi"):
        assert "engine=mpi" in text
        assert "p2p=tcp" in text


# ---- ways of a call ---------------------------------------------------------------------------


def hear_that_a_rank_has_closed_its_group(rank):
    group = dist.new_group()
    dist.all_reduce(np.ones(3), group=group)
    comm = group.backends["cpu"]._engine.comm
    if rank == 1:
        dist.destroy_process_group(group)
    dist.barrier()
    if rank != 1:
        # As a rank whose call took long.
        question = comm.transport.inquire(comm.context, 1, [1])
        assert question.wait_until(Deadline(60))
        comm.transport.close_question(question)
        assert comm.transport.failure(comm.context).by == 1
        dist.destroy_process_group(group)
    dist.barrier()
    # Otherwise the rank ends without MPI_Finalize, and the others wait in it.
    assert not mpi_library.process.broken
    assert not mpi_library.process.is_unusable()


def test_a_rank_that_has_closed_its_group_is_not_lost():
    run(hear_that_a_rank_has_closed_its_group, 3, ranks="processes", engine="mpi")


def every_collective(group, rank, p):
    """Each collective with equal and with unequal blocks, twice: the second call repeats."""
    sizes = [3 * r + 1 for r in range(p)]
    whole = np.concatenate([np.full(n, float(r)) for r, n in enumerate(sizes)])
    mine = np.full(sizes[rank], float(rank))
    total = p * (p - 1) / 2
    for _ in range(2):
        x = np.full(7, float(rank))
        dist.all_reduce(x, group=group)
        assert (x == total).all()
        dist.reduce(x := np.full(7, float(rank)), 1, group=group)
        assert (x == (total if rank == 1 else rank)).all()
        dist.broadcast(x, 1, group=group)
        assert (x == total).all()
        dist.scan(x := np.full(7, 1.0), group=group)
        assert (x == rank + 1).all()
        dist.exscan(x := np.full(7, 1.0), group=group)
        assert (x == max(rank, 1)).all()
        dist.all_gather_into_tensor(out := np.empty((p, 2)), np.full(2, float(rank)), group=group)
        assert (out == np.arange(p)[:, None]).all()
        dist.all_gather(blocks := [np.empty(n) for n in sizes], mine, group=group)
        assert (np.concatenate(blocks) == whole).all()
        blocks = [np.empty(n) for n in sizes] if rank == 2 else None
        dist.gather(mine, blocks, 2, group=group)
        assert blocks is None or (np.concatenate(blocks) == whole).all()
        parts = np.split(whole, np.cumsum(sizes)[:-1])
        dist.scatter(out := np.empty(sizes[rank]), parts if rank == 2 else None, 2, group=group)
        assert (out == rank).all()
        dist.reduce_scatter(out, parts, group=group)
        assert (out == p * rank).all()
        dist.reduce_scatter_tensor(out := np.empty(2), np.arange(2.0 * p), group=group)
        assert (out == p * np.arange(2 * rank, 2 * rank + 2)).all()
        dist.all_to_all_single(out := np.empty(p), np.full(p, float(rank)), group=group)
        assert (out == np.arange(p)).all()
        outs = [np.empty(r + rank) for r in range(p)]
        ins = [np.full(r + rank, 10.0 * rank + r) for r in range(p)]
        dist.all_to_all(outs, ins, group=group)
        assert all((each == 10 * r + rank).all() for r, each in enumerate(outs))
        opaque = np.full(3, rank, "S5")
        dist.all_gather_into_tensor(out := np.empty((p, 3), "S5"), opaque, group=group)
        assert (out == np.arange(p).astype("S5")[:, None]).all()
        dist.barrier(group=group)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def ways_of_a_call(rank):
    """Calls that block a thread; all_reduce of messages; counts above 2^31 - 1; repeated calls."""
    p, found = dist.get_world_size(), mpi_library.library()
    every_collective(None, rank, p)
    before, most = mpi_calls._BLOCKING_BYTES, mpi_calls._MOST
    blocking, large, by_messages = (dist.new_group() for _ in range(3))
    mpi_calls.library = lambda: found._replace(is_openmpi=True)
    every_collective(by_messages, rank, p)
    # Prepared calls of many sizes share the memory for received arrays.
    before_bytes = resident_bytes()
    for count in range(15_000, 15_300):
        dist.all_reduce(np.ones(count), group=by_messages)
    assert resident_bytes() < before_bytes + 100 * 8 * 15_000
    mpi_calls._BLOCKING_BYTES = 1
    every_collective(blocking, rank, p)
    mpi_calls.library = lambda: found
    native = blocking.backends["cpu"]._engine._native_group
    dist.destroy_process_group(blocking)
    # Otherwise the process would end without MPI_Finalize if this group had broken.
    assert not native.is_in_mpi()
    mpi_calls._BLOCKING_BYTES, mpi_calls._MOST = before, 0
    if found.is_openmpi:  # Open MPI 5 lacks the functions for large counts.
        with pytest.raises(
            UnsupportedError, match=r"has no function MPI_\w+_c, which this call needs"
        ):
            mpi_calls.address("MPI_Allreduce_c")
    else:
        every_collective(large, rank, p)
    mpi_calls._MOST = most
    # A library that has only the other functions: programs move what is too large for them.
    few = dist.new_group()
    few.backends["cpu"]._engine.most_moved = 0
    every_collective(few, rank, p)
    prepared = few.backends["cpu"]._prepared_calls._prepared.values()
    moved = [each for each in prepared if each.exchange is None and each.what is not None]
    assert {each.what.kind for each in moved if not each.what.reduces} <= {"barrier"}
    # A call that no program has replaced raises.
    outs = [np.zeros(20 + each) for each in range(p)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mpi_calls, "most_moved", lambda: 100)
        text = rf"moves at most 100 bytes in a call, not {8 * sum(range(20, 20 + p))}"
        with pytest.raises(UnsupportedError, match=text):
            dist.all_gather(outs, outs[rank], group=dist.new_group())
    # C++ runs a call that is repeated, and its number shows it.
    calls, x = dist.group.WORLD.backends["cpu"].calls, np.ones(4)
    for _ in range(2):
        dist.all_reduce(x)
    number = calls.last()[0]
    for count in range(1, 4):
        dist.all_reduce(x)
        assert calls.last()[0] == number + count


def test_ways_of_a_call():
    run(ways_of_a_call, 3, ranks="processes", engine="mpi")


# ---- ways to start, and what is missing -------------------------------------------------------

SCRIPT = """
import sys
import time
import numpy as np
if "early" in sys.argv:
    from mpi4py import MPI
import unisono as dist
dist.init_process_group("mpi", timeout=60)
from mpi4py import MPI
# Rank 1 is late. It then holds its interpreter lock in MPI, where it waits for rank 0.
time.sleep(0.2 * dist.get_rank())
x = np.ones(2)
dist.all_reduce(x)
y = MPI.COMM_WORLD.allreduce(1)
sys.stdout.write(f"{dist.get_rank()} of {dist.get_world_size()}: {x[0]:g} {y}\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_that_imports_mpi4py_first(script):
    code, text = launched(unisono_run(2, "--mpi", script, "early"))
    assert code == 0, text
    assert sorted(text.splitlines()) == ["0 of 2: 2 2", "1 of 2: 2 2"]


@pytest.mark.whole("one more launch")
def test_a_script_that_imports_mpi4py_first_without_the_flag(script):
    code, text = launched(unisono_run(2, script, "early"))
    assert code == 1
    assert "each process is an MPI world of its own" in text


@pytest.mark.whole("two more launches")
@pytest.mark.skipif(not MPIEXEC.exists(), reason="mpich is not installed")
def test_mpiexec_of_the_library(script):
    for words in ([], ["early"]):
        code, text = launched([MPIEXEC, "-n", 2, sys.executable, script, *words])
        assert code == 0, text
        assert sorted(text.splitlines()) == ["0 of 2: 2 2", "1 of 2: 2 2"]


LATE = """
import os, sys, time
import numpy as np
import unisono as dist
from unisono.adapters.mpi import library as mpi_library
mpi_library._FINALIZE_S, rank, way = 0.5, int(os.environ["PMI_RANK"]), sys.argv[1]
dist.init_process_group("mpi", timeout=300.0 if way == "leaves" else 2.0)
dist.all_reduce(np.ones(3))
dist.destroy_process_group()
mpi_library.process.lost = way == "leaves" and rank == 2
# Longer than the time-out: a launcher would end this rank if another one ended.
time.sleep(2.5 if way == "late" and rank == 2 else 0)
if way == "alone":
    mpi_library.process.ends.close()
    time.sleep(60 if rank == 2 else 0)
os.write(1, f"{rank} ends\\n".encode())
"""


@pytest.mark.skipif(not MPIEXEC.exists(), reason="mpich is not installed")
@pytest.mark.parametrize(
    ("way", "texts"),
    [
        ("leaves", ["it waited 0.5 s for rank 2, which ended without MPI_Finalize; end the"]),
        (
            "late",
            [
                "has waited 0.5 s in MPI_Finalize for rank 2, which did not end yet; find it with",
                "has waited 1 s in MPI_Finalize for rank 2, which did not end yet; find it with",
            ],
        ),
        # The time-out of the group: nobody can tell whether rank 2 is late or has ended.
        ("alone", ["it waited 2 s for the other ranks; the store does not answer; end the"]),
    ],
)
def test_a_wait_for_the_end_of_others_names_them_and_ends(tmp_path, way, texts):
    path = tmp_path / "script.py"
    path.write_text(LATE)
    # Otherwise mpiexec kills the others of a rank that ends without MPI_Finalize.
    keep = ["-disable-auto-cleanup"] if way == "leaves" else []
    code, text = launched([MPIEXEC, *keep, "-n", 3, sys.executable, path, way])
    assert (code == 0) == (way == "late"), text
    assert text.count(" ends\n") == (2 if way == "alone" else 3), text
    assert all(each in text for each in texts), text


@pytest.mark.whole("one more launch")
def test_ranks_without_a_host_share_no_memory(script):
    """The names of their hosts are empty, also of ranks on different machines."""
    maps = "assert 'memfd:unisono' not in open('/proc/self/maps').read()"
    script.write_text(SCRIPT.replace("dist.destroy", f"{maps}\ndist.destroy"))
    code, text = launched(
        unisono_run(2, script), UNISONO_ENGINE="reference", UNISONO_SHARED_MEMORY="0"
    )
    assert code == 0, text


@pytest.mark.whole("one more launch")
def test_a_rank_without_mpi_ends_the_start_on_all_ranks(script, tmp_path):
    """Rank 1 finds no library; both name rank 1 and the reason."""
    (tmp_path / "libmpi.so").write_text("no library")
    change = f"os.environ['MPI4PY_LIBMPI'] = '{tmp_path}/libmpi.so'"
    script.write_text(f"import os\nif os.environ['RANK'] == '1':\n    {change}\n{SCRIPT}")
    code, text = launched(unisono_run(2, script))
    assert code == 1
    assert "MPI cannot be used: on rank 1: " in text
    assert "mpi4py found no MPI library (" in text


def test_reasons_without_mpi(monkeypatch):
    """Each reason is one line with what to do; is_mpi_available and engine_info say the same."""
    fresh = mpi_library.library.__wrapped__
    monkeypatch.setattr(mpi_library, "library", fresh)
    with monkeypatch.context() as changed:
        changed.setitem(sys.modules, "mpi4py", None)
        with pytest.raises(UnsupportedError, match="mpi4py is not installed") as caught:
            fresh()
        assert "pip install mpi4py" in caught.value.hint
        assert not dist.is_mpi_available()
    with monkeypatch.context() as changed:
        changed.setenv("OMPI_COMM_WORLD_RANK", "0")
        with pytest.raises(UnsupportedError, match="started this process, but mpi4py loads"):
            fresh()
    with monkeypatch.context() as changed:
        changed.setattr(mpi_library, "why_no_engine", "it is not built")
        with pytest.raises(
            UnsupportedError, match="MPI cannot be used: the C\\+\\+ engine is missing"
        ):
            fresh()
    assert dist.is_mpi_available()


STUCK = """
from unisono.core.base.deadline import Deadline
from unisono.adapters.mpi.library import process
from unisono.core.rendezvous.pmi import MPIJob, PMIServer
from unisono.core.stores import HashStore
process.start(PMIServer(HashStore(), MPIJob("k", 0, 2, ""), 0.2), Deadline(60))
"""


def test_a_rank_that_never_comes_to_mpi_init():
    code, text = launched([sys.executable, "-c", STUCK])
    assert code == 1, text
    assert "did not return: " in text
    assert "1 of 2 callers arrived" in text


def test_a_rank_that_does_not_ask_for_mpi():
    with pytest.raises(RendezvousError, match="s for ranks that did not ask for MPI: 1"):
        join(HashStore(), 0, 2, Deadline(0.1))


def ask_for_mpi_too_late(rank):
    with pytest.raises(
        UnsupportedError, match="cannot use MPI: the group it is made from does not"
    ):
        dist.new_group(pg_options=CPUOptions(engine="mpi"))
    dist.destroy_process_group()


def test_mpi_in_a_sub_group_of_a_group_without_it():
    run(ask_for_mpi_too_late, 2)


def test_options_that_contradict_the_backend():
    lines = {
        "backend 'mpi' serves device 'cpu' only, not 'cuda'": ("cuda:mpi", None),
        "backend 'mpi' has the engine 'mpi', but pg_options=": (
            "mpi", CPUOptions(engine="native"),
        ),
    }  # fmt: skip
    for line, (backend, options) in lines.items():
        with pytest.raises(UsageError, match=re.escape(line)):
            dist.ProcessGroup(HashStore(), 0, 1, backend, options=options)


def in_threads(rank):
    raise AssertionError("the ranks cannot be threads")


def test_threads_cannot_be_ranks_of_mpi():
    with pytest.raises(UnsupportedError, match="ranks 0 and 1 are threads of one process"):
        run(in_threads, 2, engine="mpi", timeout=20)


# ---- faults -----------------------------------------------------------------------------------

VICTIM = 1
BIG, SMALL = 2 << 20, 2


def attempt(call):
    try:
        call()
    except UnisonoError as error:
        return type(error).__name__, error.what, error.context.peers
    return "", "", ()


def meet(rank, place):
    """Return when all ranks are here: one that dies earlier may take with it what others need."""
    store = dist.group.WORLD.store
    store.set(f"{place}/{rank}", "")
    store.wait([f"{place}/{each}" for each in range(3)], 60)


def fail_in(rank, what, count):
    """Meet, let the fault happen in or before a call, and return how the call ended."""
    x, end = np.ones(count), dist.group.WORLD.store
    dist.all_reduce(x)
    meet(rank, "met")
    hurt = {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "abort": lambda: dist.group.WORLD.abort(),
        "late": lambda: time.sleep(0),
        "mismatch": lambda: time.sleep(0),
    }[what]
    if rank == VICTIM:
        end.set("pid", str(os.getpid()))
        if count == BIG and what not in ("late", "mismatch"):
            threading.Timer(0.2, hurt).start()
        else:
            hurt()
    if what == "late" and rank == VICTIM:
        # In user code, as far as the others can tell, until they have ended.
        end.wait(["end/0", "end/2"], 60)
    if what == "mismatch" and rank == VICTIM:
        x = np.ones(count + 1)

    def calls():
        for _ in range(5000):
            dist.all_reduce(x, timeout=60 if what == "kill" else 3)

    began_s = time.monotonic()
    ended = attempt(calls)
    took_s = time.monotonic() - began_s
    end.set(f"end/{rank}", "")
    if what == "mismatch":
        y = np.ones(3)
        dist.all_reduce(y)
        assert y.tolist() == [3] * 3
    if what in ("kill", "stop"):
        group = dist.shrink_group([VICTIM])
        y = np.full(BIG, 1.0)
        group.all_reduce(y)
        assert "engine=mpi" in repr(group)
        assert (y == 2).all()
        group.barrier()
    if what == "stop" and rank == 0:
        os.kill(int(end.get("pid")), signal.SIGKILL)
    return *ended, took_s


class SignalError(Exception):
    pass


def interrupt_a_wait(rank, names):
    """Rank 0 leaves a call through a signal handler while C++ waits for rank 1.

    MPI still has the call. A later call must not take its place.
    """
    for name in names:
        group = dist.new_group(timeout=30)
        engine, call, end = group.backends["cpu"]._engine, getattr(group, name), group.store
        for _ in range(3):
            call(np.ones(4))

        def handle(*_, engine=engine):
            # The timer may fire before MPI has the call.
            if engine._native_group.is_under_way():
                signal.setitimer(signal.ITIMER_REAL, 0)
                raise SignalError

        if rank == 0:
            signal.signal(signal.SIGALRM, handle)
            signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
            # The error of the group names it if Python has made the call.
            with pytest.raises((SignalError, UnisonoError)):
                call(np.ones(4))
            assert any(engine in kept for kept in _unfinished)
            kind, text, _ = attempt(partial(call, np.full(4, 100.0)))
            end.set(name, "")
        else:
            end.wait([name], 60)
            kind, text, _ = attempt(partial(call, np.ones(4)))
        assert kind == "CollectiveAbortedError" or "SignalError" in text, (name, kind, text)
        dist.destroy_process_group(group)


def test_a_signal_handler_ends_a_wait():
    """In a call of C++, and in a call that passes through Python."""
    run(interrupt_a_wait, 2, ranks="processes", engine="mpi", args=(("all_reduce", "exscan"),))


EXPECTED = {
    "kill": ("PeerLostError", "rank 1 was lost"),
    "stop": ("CollectiveTimeoutError", "rank 1"),
    "abort": ("CollectiveAbortedError", r"abort\(\) was called on rank 1"),
    "late": ("CollectiveTimeoutError", "rank 1 never entered it"),
    "mismatch": ("CollectiveMismatchError", "rank 1 called all_reduce"),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("count", [SMALL, BIG], ids=["agreement", "data"])
@pytest.mark.parametrize("what", EXPECTED)
def test_a_fault_names_its_rank(what, count):
    dead = (VICTIM,) if what in ("kill", "stop") else ()
    began_s = time.monotonic()
    found = run(
        fail_in, 3, ranks="processes", engine="mpi", args=(what, count), timeout=60, dead=dead
    )
    for rank in (0, 2):
        kind, text, peers, took_s = found[rank]
        assert kind == EXPECTED[what][0], text
        assert re.search(EXPECTED[what][1], text)
        assert VICTIM in peers
        assert took_s < 40
    assert time.monotonic() - began_s < 100


def state_of(pid):
    """Return the letter of a process's state; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def stop_when(engine, *, moving):
    """Stop this process when its next call waits in the agreement, or in MPI with its arrays."""
    look = _MPIWatch.look

    def stop(*args, **named):
        if engine._native_group.is_moving() == moving:
            _MPIWatch.look = look
            os.kill(os.getpid(), signal.SIGSTOP)
        look(*args, **named)

    _MPIWatch.look = stop


def kill_before_its_data_are_read(rank, kind, way):
    """Rank 1 dies between the agreement and the moment at which rank 0 reads its array.

    The call ends on all ranks together: they agree on that in shared memory or by MPI. Or rank 0
    asks the others after its end.
    """
    if way == "asks":
        mpi_calls.CallMaker._hides_death = property(lambda _: False, lambda *_: None)
    else:
        MPIEngine._confirm = lambda *_: None
    if way == "MPI":
        mpi_engine.share_memory = lambda *_: None
    group, store = dist.new_group(timeout=30), dist.group.WORLD.store
    engine = group.backends["cpu"]._engine
    x = np.full(30_000, 1.0 + rank)
    outs = [np.full(x.size, -5.0) for _ in range(3)]
    calls = {
        "gather": lambda: dist.gather(x, outs if rank == 0 else None, 0, group=group),
        "scatter": lambda: dist.scatter(x, outs if rank == VICTIM else None, VICTIM, group=group),
        "reduce": lambda: dist.reduce(x, 0, group=group),
        "all_to_all": lambda: dist.all_to_all_single(outs[0], x, group=group),
    }
    # MPI chooses its ways, and the ranks the op.
    calls[kind]()
    for array, value in [(x, 1.0 + rank), *((out, -5.0) for out in outs)]:
        array[:] = value
    dist.barrier(group=group)
    store.set(f"pid/{rank}", str(os.getpid()))
    pids = [int(store.get(f"pid/{each}")) for each in range(3)]
    # In an all_to_all rank 1 dies when it has read rank 0's array, so it waits for that.
    has_read = kind == "all_to_all"

    def stopped(rank):
        return state_of(pids[rank]) == "T"

    def die():
        wait_until(engine._native_group.is_moving)
        if has_read:
            wait_until(lambda: (outs[0][: x.size // 3] == 1).all())
        os.kill(os.getpid(), signal.SIGKILL)

    def wake():
        if has_read:
            wait_until(lambda: stopped(0))
            os.kill(pids[VICTIM], signal.SIGCONT)
        wait_until(lambda: state_of(pids[VICTIM]) in ("Z", ""))
        # So long that rank 0 asks whether a rank has given up.
        time.sleep(0.1)
        os.kill(pids[0], signal.SIGCONT)

    if rank == 0:
        stop_when(engine, moving=has_read)
    elif rank == VICTIM:
        threading.Thread(target=die, daemon=True).start()
        if has_read:
            stop_when(engine, moving=False)
        else:
            wait_until(lambda: stopped(0))
    else:
        threading.Thread(target=wake, daemon=True).start()
        wait_until(lambda: stopped(VICTIM if has_read else 0))
    error, text, _ = attempt(calls[kind])
    if rank == 0:
        assert error == "PeerLostError", (error, text, x[:2], [out[::10_000] for out in outs])


READS = [
    *itertools.product(["reduce", "gather", "scatter"], ["shared memory", "MPI", "asks"]),
    # By MPI no rank can be ahead of a stopped rank.
    ("all_to_all", "shared memory"),
]


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        READS[0],
        *(pytest.param(*each, marks=pytest.mark.whole("as the first")) for each in READS[1:]),
    ],
)
def test_a_call_without_the_data_of_a_killed_rank_raises(kind, way):
    run(
        kill_before_its_data_are_read, 3, ranks="processes", engine="mpi", dead=(VICTIM,),
        args=(kind, way),
    )  # fmt: skip


def fail_while_mpi_makes_a_group(rank):
    """MPI then waits for the lost rank for ever, and so would all groups made later."""
    group = dist.new_group(timeout=30)
    if rank == VICTIM:
        MPIEngine._run_blocking = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    kind, text, _ = attempt(lambda: group.all_reduce(np.ones(3)))
    assert kind == "PeerLostError", text
    kind, text, _ = attempt(lambda: dist.shrink_group([VICTIM]))
    assert kind == "UnsupportedError"
    assert "MPI can make no group any more" in text
    shrunk = dist.shrink_group([VICTIM], pg_options=CPUOptions(engine="auto"))
    shrunk.all_reduce(x := np.ones(3))
    assert x.tolist() == [2] * 3


@pytest.mark.whole("one more world, 5 s")
def test_a_rank_ends_while_mpi_makes_a_group():
    run(fail_while_mpi_makes_a_group, 3, ranks="processes", engine="mpi", dead=(VICTIM,))


def hang_in_mpi_test(rank):
    """MPI_Test does not return, as in the network of Intel MPI when a rank has died."""
    test = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)
    may_return, in_library = threading.Event(), test(mpi_calls.address("MPI_Test"))
    may_return.set()
    wrapped = test(lambda *words: may_return.wait() and in_library(*words))
    mpi_engine.address = lambda _: ctypes.cast(wrapped, ctypes.c_void_p).value
    mpi_engine.share_memory = lambda *_: None

    def fails(group, fault, **how):
        """Make a call in which rank 0 does not return, and the fault comes."""
        group.all_reduce(np.ones(3))
        meet(rank, group.group_name)
        if rank == 0:
            may_return.clear()
        fault()
        return attempt(lambda: group.all_reduce(np.ones(3), **how))

    kind, text, _ = fails(dist.new_group(), lambda: None, timeout=0.5)
    assert kind == "CollectiveTimeoutError", text
    may_return.set()
    group = dist.new_group(timeout=60)
    die = partial(os.kill, os.getpid(), signal.SIGKILL)
    kind, text, peers = fails(group, die if rank == VICTIM else lambda: None)
    assert (kind, peers) == ("PeerLostError", (VICTIM,)), text
    kind, text, _ = attempt(lambda: dist.shrink_group([VICTIM]))
    assert kind == "UnsupportedError"
    assert "MPI can make no group any more: a call of MPI has not returned" in text
    shrunk = dist.shrink_group([VICTIM], pg_options=CPUOptions(engine="auto"))
    shrunk.all_reduce(x := np.ones(3))
    assert x.tolist() == [2] * 3


def test_a_call_that_mpi_never_ends():
    run(hang_in_mpi_test, 3, ranks="processes", engine="mpi", dead=(VICTIM,), timeout=60)


# ---- torch ------------------------------------------------------------------------------------

TORCH = """
import gc
import torch
import torch.distributed as dist
import unisono.torch
from unisono.adapters.mpi.engine import MPIEngine
from unisono.lowlevel import CPUOptions
dist.init_process_group("unisono", pg_options=CPUOptions(engine="mpi"))
rank = dist.get_rank()
module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
module(torch.full((2, 8), float(rank))).sum().backward()
assert module.module.weight.grad[0, 0].item() == 1.0  # the mean of 0 and 2
assert any(isinstance(each, MPIEngine) for each in gc.get_objects())
dist.destroy_process_group()
"""


@pytest.mark.whole("imports torch, 5 s of CPU")
def test_ddp_of_torch(tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "ddp.py"
    script.write_text(TORCH)
    code, text = launched(unisono_run(2, script))
    assert code == 0, text


# ---- hosts ------------------------------------------------------------------------------------


@pytest.mark.whole("two network namespaces, 5 s of CPU")
@pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not()))
def test_two_hosts():
    """The ranks share no memory, so MPI uses its network between the namespaces."""
    script = test_hosts.COMPUTES.replace("init_process_group(", 'init_process_group("mpi", ')
    assert script != test_hosts.COMPUTES
    with netns.Network(2) as network:
        first = network.hosts[0].v4
        test_hosts.compute(
            network.hosts, script, MASTER_ADDR=first, UNISONO_SHARED_MEMORY="0", UNISONO_TLS="off"
        )


ASKS = """
told = attempt(lambda: dist.init_process_group("mpi", timeout=60))
tell(told)
if not told.kind:
    dist.destroy_process_group()
"""
PLAIN = "what MPI sends between hosts is not encrypted by unisono"


@pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not()))
@pytest.mark.skipif(bool(tls.why_no_tls()), reason=str(tls.why_no_tls()))
@pytest.mark.parametrize("mode", ["on", "auto", "off"])
def test_two_hosts_and_encryption(mode):
    with netns.Network(2) as network:
        place = {"MASTER_ADDR": network.hosts[0].v4, "UNISONO_TLS": mode}
        with test_hosts.on(network.hosts, ASKS, **place) as processes:
            ends = [outcome(process) for process in processes]
    for rank, (told, code, err) in enumerate(ends):
        assert code == 0, err
        if mode == "on":
            assert told["kind"] == "UnsupportedError"
            assert f"{PLAIN}, which UNISONO_TLS=on forbids" in told["text"]
        else:
            assert told["kind"] == "", told
        assert err.count(PLAIN) == (mode == "auto" and rank == 0), err
