"""`pool`: ranks that stay, their state, failures, output and memory."""

import gc
import io
import os
import re
import signal
import sys
import threading
import time
import warnings

import numpy as np
import pytest

import unisono
import unisono as dist
from unisono.beyond.pool import display, memory, watch
from unisono.beyond.pool import rank as rank_module
from unisono.beyond.pool.rank import run_cell
from unisono.errors import (
    ArgumentTypeError,
    ClosedError,
    InvalidArgumentError,
    NotInitializedError,
    PeerFailedError,
    UsageError,
    WorkerFailedError,
)
from unisono.launcher import payload

SIZE = 3


@pytest.fixture(scope="module")
def ranks():
    with unisono.pool(SIZE, replace=True) as made:
        yield made


@pytest.fixture
def forked():
    """A pool whose ranks a test may replace; in `ranks` that would be a leak."""
    with unisono.pool(SIZE, start_method="fork", replace=True) as made:
        yield made


def sum_of_ranks(k):
    x = np.full(4, dist.get_rank() + k)
    dist.all_reduce(x)
    return x


def test_run_calls_the_function_on_each_rank_of_one_group(ranks):
    expected = np.full(4, sum(rank + 5 for rank in range(SIZE)))
    for _ in range(3):
        results = ranks.run(sum_of_ranks, k=5)
        assert len(results) == len(ranks) == SIZE
        assert all(np.array_equal(each, expected) for each in results)
    assert ranks.run(os.getpid) == ranks.pids()


def test_one_rank_runs_alone_and_may_be_counted_from_the_end(ranks):
    assert ranks[1].run(dist.get_rank) == 1
    assert ranks[-1].run(dist.get_rank) == SIZE - 1
    assert [each.rank for each in ranks] == list(range(SIZE))


def remember(k):
    global kept
    kept = dist.get_rank() * k


def recall():
    return kept


def test_what_a_rank_holds_stays(ranks):
    ranks.run(remember, 10)
    assert ranks.run(recall) == [0, 10, 20]
    assert ranks[2].run(recall) == 20


class OwnError(Exception):
    pass


def fail_on(rank):
    if dist.get_rank() == rank:
        raise OwnError(f"not on rank {rank}")
    dist.barrier()


def test_the_rank_that_raised_is_named_and_the_ranks_go_on(ranks):
    ranks.run(remember, 3)
    with pytest.raises(OwnError, match="not on rank 1") as caught:
        ranks.run(fail_on, 1)
    assert caught.value.__notes__ == [f"raised on rank 1 of {SIZE}"]
    assert isinstance(caught.value.__cause__, WorkerFailedError)
    assert str(caught.value.__cause__).startswith("rank 1 of the pool raised an exception")
    assert "OwnError: not on rank 1" in str(caught.value.__cause__)
    assert ranks.run(recall) == [0, 3, 6]
    assert ranks.run(sum_of_ranks, 0)[0][0] == sum(range(SIZE))


def group_key():
    return id(dist.group.WORLD)


def undefined():
    return nothing_of_this_name  # noqa: F821


def test_an_error_on_all_ranks_leaves_their_groups(ranks):
    before = ranks.run(group_key)
    with pytest.raises(NameError, match="nothing_of_this_name"):
        ranks.run(undefined)
    assert ranks.run(group_key) == before


def killed_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_dies_is_named_and_replaced():
    with unisono.pool(SIZE, replace=True) as ranks:
        check_replacement(ranks)


def check_replacement(ranks):
    ranks.run(remember, 7)
    pids = ranks.pids()
    with pytest.raises(WorkerFailedError) as caught:
        ranks.run(killed_on, 2)
    assert str(caught.value).startswith("a rank of the pool ended: rank 2 (pid")
    assert "was killed by SIGKILL" in str(caught.value)
    assert caught.value.context.rank == 2
    assert ranks.pids()[:2] == pids[:2]
    assert ranks.pids()[2] != pids[2]
    assert (ranks[0].run(recall), ranks[1].run(recall)) == (0, 7)
    with pytest.raises(NameError) as lost:
        ranks.cell("import unisono as dist\nif dist.get_rank() == 2: of_before")
    new = f"a new process, with an empty memory, has replaced rank 2 (pid {pids[2]}"
    assert lost.value.__notes__[-1].startswith(new)
    assert ranks.run(sum_of_ranks, 1)[2][0] == sum(rank + 1 for rank in range(SIZE))


def fill_row(x):
    x[dist.get_rank()] += dist.get_rank() + 1
    return x[:, 1]


def test_a_shared_array_and_its_slices_are_one_memory(ranks):
    x = ranks.shared_array((SIZE, 6), "int32")
    assert x.dtype == np.int32
    assert not x.any()
    columns = ranks.run(fill_row, x[:, ::2])
    expected = np.zeros((SIZE, 6), "int32")
    expected[:, ::2] = np.arange(1, SIZE + 1)[:, None]
    assert np.array_equal(x, expected)
    # A result is the same memory, too.
    columns[0][1] = 77
    assert x[1, 2] == 77
    # A read-only view stays read-only.
    y = x.view()
    y.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        ranks[0].run(fill_row, y)


def mapped():
    return len(memory._regions)


def test_the_memory_of_a_shared_array_goes_with_it(ranks):
    fds = len(os.listdir("/proc/self/fd"))
    before = ranks.run(mapped)
    x = ranks.shared_array(10)
    assert ranks.run(mapped) == [each + 1 for each in before]
    part = x[3:]
    del x
    gc.collect()
    assert ranks.run(mapped) == [each + 1 for each in before]
    del part
    gc.collect()
    assert ranks.run(mapped) == before
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_shared_array_of_objects_is_refused_and_that_of_another_pool_is_copied(ranks):
    with pytest.raises(
        InvalidArgumentError, match="a shared array cannot have the dtype object: it holds objects"
    ):
        ranks.shared_array(3, object)
    with pytest.raises(
        TypeError, match=r"a shape is an int or a sequence of ints, got an array of shape \(5,\)"
    ) as wrong:
        ranks.shared_array(np.arange(5))
    assert "x = ranks.shared_array(a.shape, a.dtype); x[:] = a" in str(wrong.value)
    assert ranks.shared_array(np.int64(2)).shape == (2,)
    with unisono.pool(1, start_method="fork") as other:
        x = other.shared_array(3)
        x += 2
        assert ranks[0].run(np.sum, x) == 6
        with unisono.Executor(1, start_method="fork") as executor:
            assert executor.submit(np.sum, x).result() == 6
        other.run(fill_first, x)
        assert x[0] == 9
    with pytest.raises(InvalidArgumentError, match="a shared array belongs to the pool that made"):
        memory._array("a key", 0, (3,), (8,), np.dtype(float), True)


def fill_first(x):
    x[0] = 9


def kept_when(path):
    while not os.path.exists(path):
        time.sleep(0.01)
    return kept


def keep(x):
    global kept
    kept = x


def test_a_result_may_be_an_array_that_goes_during_the_call(ranks, tmp_path):
    arrays = [ranks.shared_array(3)]
    arrays[0][1] = 5
    ranks.run(keep, arrays[0])

    def drop():
        arrays.clear()
        gc.collect()
        (tmp_path / "gone").touch()

    thread = threading.Thread(target=drop)
    thread.start()
    assert ranks[0].run(kept_when, str(tmp_path / "gone"))[1] == 5
    thread.join()


def pair(a, b=0):
    if a < 0:
        raise OwnError(f"task {a}")
    return a, b, os.getpid()


@pytest.mark.parametrize("chunksize", [1, 4])
def test_map_keeps_the_order_and_uses_free_ranks(ranks, chunksize):
    found = ranks.map(pair, iter(range(20)), range(100, 200), chunksize=chunksize)
    assert [each[:2] for each in found] == [(i, 100 + i) for i in range(20)]
    assert {each[2] for each in found} <= set(ranks.pids())


def test_map_reports_the_task_that_failed(ranks):
    with pytest.raises(OwnError, match="task -1") as caught:
        ranks.map(pair, [0, 1, 2, -1, *range(4, 50)])
    assert "in task 3" in caught.value.__notes__[0]
    assert ranks.map(pair, []) == []
    with pytest.raises(InvalidArgumentError, match="the function or its arguments cannot be sent"):
        ranks.map(id, [0, 1, threading.Lock(), 3])
    assert ranks.map(pair, [1])[0][0] == 1


def say(text):
    print(text, dist.get_rank())
    os.write(2, b"error\n")


def test_output_is_shown_by_rank_before_the_call_returns(ranks, capsys):
    ranks.run(say, "hello")
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(
        line
        for rank in range(SIZE)
        for line in (f"[rank {rank}] hello {rank}", f"[rank {rank}] error")
    )


def test_a_cell_runs_in_the_main_module_of_each_rank(ranks, capsys):
    ranks.cell("import unisono as dist\nx = dist.get_rank() * 2\n")
    ranks.cell("x + 1")
    assert sorted(capsys.readouterr().out.splitlines()) == [
        f"[rank {rank}] {rank * 2 + 1}" for rank in range(SIZE)
    ]
    with pytest.raises(ZeroDivisionError) as caught:
        ranks.cell("def f():\n    return 1 / 0\nf()")
    assert "return 1 / 0" in str(caught.value.__cause__)


def wait_for_ever(path):
    open(f"{path}/{dist.get_rank()}", "w").close()
    if dist.get_rank():
        dist.barrier()
    else:
        time.sleep(1000)


def interrupt_when(count, path):
    while len(os.listdir(path)) < count:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_ends_the_calls_and_not_the_ranks(ranks, tmp_path):
    pids = ranks.pids()
    ranks.run(remember, 2)
    thread = threading.Thread(target=interrupt_when, args=(SIZE, tmp_path))
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        ranks.run(wait_for_ever, str(tmp_path))
    thread.join()
    assert ranks.pids() == pids
    assert ranks.run(recall) == [0, 2, 4]
    assert ranks.run(sum_of_ranks, 0)[1][0] == sum(range(SIZE))


def unloadable():
    return type("Local", (), {"__reduce__": lambda self: (int, ("x",))})()


def test_what_cannot_be_sent_or_loaded_is_an_error_of_its_own(ranks):
    with pytest.raises(InvalidArgumentError, match="the function or its arguments cannot be sent"):
        ranks.run(print, threading.Lock())
    with pytest.raises(InvalidArgumentError, match=r"the result of rank . cannot be sent"):
        ranks.run(threading.Lock)
    with pytest.raises(InvalidArgumentError, match="the result of rank 1 cannot be loaded: ValueE"):
        ranks[1].run(unloadable)
    assert ranks.run(dist.get_world_size) == [SIZE] * SIZE


def test_without_replacement_a_lost_rank_ends_the_pool():
    fds = len(os.listdir("/proc/self/fd"))
    with unisono.pool(2, start_method="fork") as pair_of_ranks:
        with pytest.raises(WorkerFailedError, match=r"a rank of the pool ended: rank 1"):
            pair_of_ranks.run(killed_on, 1)
        with pytest.raises(ClosedError, match=r"the pool makes no calls any more: rank 1 \(pid"):
            pair_of_ranks.run(dist.get_rank)
    with pytest.raises(ClosedError, match="the pool is closed"):
        pair_of_ranks.run(dist.get_rank)
    pair_of_ranks.close()
    assert len(os.listdir("/proc/self/fd")) == fds


def message(value, fails):
    x = np.full(4, float(value))
    if dist.get_rank() == 0:
        dist.send(x, dst=1)
    elif dist.get_rank() == 1:
        if fails:
            raise OwnError("before the receive")
        dist.recv(x, src=0)
    return float(x[0])


def late_broadcast(value, fails):
    x = np.full(4, float(value) if dist.get_rank() == 0 else 0.0)
    work = dist.broadcast(x, src=0, async_op=True)
    if fails and dist.get_rank() == 1:
        raise OwnError("before the receive")
    if not fails:
        work.wait()
    return float(x[0])


@pytest.mark.parametrize("call", [message, late_broadcast])
def test_after_a_failure_on_one_rank_groups_are_in_step(ranks, call):
    with pytest.raises(OwnError, match="before the receive"):
        ranks.run(call, 111, True)
    assert ranks.run(call, 222, False)[:2] == [222, 222]


def failing_tasks():
    yield "stale"
    raise OwnError("in the iterable")


def same(x):
    return x


def test_no_answer_to_another_call_is_a_result(ranks):
    with pytest.raises(OwnError, match="in the iterable"):
        ranks.map(same, failing_tasks())
    assert ranks.run(same, "fresh") == ["fresh"] * SIZE
    # A call that nobody waits for any more.
    ranks._processes.post(0, payload.Payload((same, ("old",), {})))
    assert ranks.run(same, "fresh") == ["fresh"] * SIZE


def wait_in_renewal(path):
    before = rank_module.init_process_group

    def waits(**keywords):
        rank_module.init_process_group = before
        open(f"{path}/{keywords['rank']}", "w").close()
        while not os.path.exists(f"{path}/go"):
            time.sleep(0.01)
        before(**keywords)

    rank_module.init_process_group = waits
    fail_on(1)


def test_an_interrupt_of_the_renewal_leaves_the_pool_whole(ranks, tmp_path):
    ranks.run(remember, 4)

    def interrupt():
        interrupt_when(SIZE, tmp_path)
        (tmp_path / "go").touch()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        ranks.run(wait_in_renewal, str(tmp_path))
    thread.join()
    for k in range(2):
        assert ranks.run(sum_of_ranks, k)[1][0] == sum(rank + k for rank in range(SIZE))
    assert ranks.run(recall) == [0, 4, 8]


def die_in_renewal():
    if dist.get_rank() == 1:
        rank_module.init_process_group = lambda **keywords: os._exit(9)
        raise OwnError("first")
    dist.barrier()


def test_a_rank_that_dies_in_the_renewal_is_replaced(forked):
    forked.run(remember, 5)
    with pytest.raises(OwnError, match="first") as caught:
        forked.run(die_in_renewal)
    assert "a rank of the pool ended: rank 1 " in caught.value.__notes__[-1]
    assert "exited with code 9" in caught.value.__notes__[-1]
    assert forked.run(sum_of_ranks, 0)[1][0] == sum(range(SIZE))
    assert forked[2].run(recall) == 10


def test_a_rank_that_dies_in_the_renewal_ends_a_pool_without_replacement():
    with unisono.pool(2, start_method="fork") as pair_of_ranks:
        with pytest.raises(OwnError, match="first") as caught:
            pair_of_ranks.run(die_in_renewal)
        assert "exited with code 9" in caught.value.__notes__[-1]
        with pytest.raises(ClosedError, match=r"no calls any more: rank 1 .* exited with code 9"):
            pair_of_ranks.run(same, 1)


def die_when_told_to_report():
    if dist.get_rank() == 1:
        rank_module._Rank.report = lambda *args: os._exit(7)
        raise OwnError("then dies")
    dist.barrier()


def test_a_rank_that_raises_and_then_dies_is_told_with_its_error(forked):
    with pytest.raises(OwnError, match="then dies") as caught:
        forked.run(die_when_told_to_report)
    assert "exited with code 7" in caught.value.__notes__[-1]
    assert forked.run(sum_of_ranks, 0)[1][0] == sum(range(SIZE))


def die_before_the_result():
    payload.Payload.send = lambda *args: os._exit(1)


def test_a_rank_that_dies_between_its_answer_and_its_result(forked):
    with pytest.raises(WorkerFailedError, match=r"a rank of the pool ended: rank 2 .* with code 1"):
        forked[2].run(die_before_the_result)
    assert forked.run(same, 1) == [1] * SIZE


def test_an_iterable_of_map_may_make_arrays_and_no_calls(ranks):
    arrays = ranks.map(same, (ranks.shared_array(3) for _ in range(4)))
    arrays[2][1] = 7
    assert ranks[0].run(np.sum, arrays[2]) == 7
    with pytest.raises(unisono.errors.UsageError, match="the pool is making a call, so it can"):
        ranks.map(same, (ranks.run(same, k) for k in range(2)))
    with pytest.raises(InvalidArgumentError, match="chunksize must be at least 1, got 0"):
        ranks.map(same, [1], chunksize=0)


def fork_that(exits):
    if os.fork() == 0 and exits:
        sys.exit(3)
    return "result"


def wait_for_forks():
    return sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2))


def test_a_fork_of_a_rank_does_not_answer(ranks):
    assert ranks[0].run(fork_that, True) == "result"
    assert ranks[0].run(fork_that, False) == "result"
    assert ranks[0].run(wait_for_forks) == [0, 3]
    assert ranks.run(same, 1) == [1] * SIZE


def test_a_fork_of_the_parent_ends_no_rank(ranks):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        try:
            ranks._close()
            ranks.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert ranks.run(same, 1) == [1] * SIZE


def test_a_cell_has_no_future_import_of_the_library(ranks):
    ranks[0].run(run_cell, "def f(x: int): pass\nassert f.__annotations__ == {'x': int}", 1)
    ranks[0].run(run_cell, "(lambda: 1)()", 2)


NOTEBOOK = """
def count():
    def add():
        global counted
        counted += 1
    add()
    return counted
"""


def test_a_global_of_an_inner_function_stays(ranks):
    pytest.importorskip("cloudpickle")
    space = {"__name__": "__main__"}
    exec(NOTEBOOK, space)
    ranks.cell("counted = 0")
    assert [ranks[0].run(space["count"]) for _ in range(3)] == [1, 2, 3]


def print_until_stopped():
    global stop
    stop = threading.Event()

    def print_lines():
        while not stop.is_set():
            os.write(1, b"x" * 79 + b"\n")

    os.write(1, b"x" * 79 + b"\n")
    threading.Thread(target=print_lines).start()


def stop_printing():
    stop.set()


def test_a_thread_that_prints_keeps_no_call(ranks, capsys):
    ranks[0].run(print_until_stopped)
    ranks[0].run(stop_printing)
    assert "x" * 79 in capsys.readouterr().out


def test_a_pool_beside_many_descriptors_and_a_stdout_without_a_file(monkeypatch):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, soft), hard))
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    try:
        with unisono.pool(1, start_method="fork") as ranks:
            ranks.run(say, "hello")
        assert sorted(sys.stdout.getvalue().splitlines()) == [
            "[rank 0] error",
            "[rank 0] hello 0",
        ]
    finally:
        for fd in fds:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_rank_restarted_on_a_thread_outlives_the_thread(forked):
    def restart():
        with pytest.raises(WorkerFailedError):
            forked[1].run(os._exit, 4)

    thread = threading.Thread(target=restart)
    thread.start()
    thread.join()
    pids = forked.pids()
    assert forked.run(os.getpid) == pids


def test_an_interrupt_that_kills_tells_of_it(forked):
    stopped = forked.pids()[1]
    os.kill(stopped, signal.SIGSTOP)
    handler = signal.getsignal(signal.SIGINT)

    def interrupt_twice():
        while signal.getsignal(signal.SIGINT) is handler:
            time.sleep(0.01)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)

    thread = threading.Thread(target=interrupt_twice)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        forked.run(same, 1)
    thread.join()
    assert f"a rank of the pool ended: rank 1 (pid {stopped}" in caught.value.__notes__[0]
    assert forked.run(same, 1) == [1] * SIZE


def test_a_cell_without_a_pool_is_refused(monkeypatch):
    module = sys.modules[unisono.pool.__module__]
    monkeypatch.setattr(module, "_open_pools", {})
    with pytest.raises(UsageError, match="there is no open pool"):
        module.run_magic("", "1")


def test_the_line_of_the_magic_names_ranks_and_a_pool(ranks, capsys, monkeypatch):
    run_magic = sys.modules[unisono.pool.__module__].run_magic
    cell = "import unisono as dist\ndist.get_rank()"
    shown = {"0": [0], "2, 0": [0, 2], "-1": [2], "": [0, 1, 2]}
    run_magic("", "")  # shows what is left of other calls' output
    capsys.readouterr()
    for line, numbers in shown.items():
        run_magic(line, cell)
        assert capsys.readouterr().out == "".join(f"[rank {n}] {n}\n" for n in numbers)
    for line in ("--rank=1", "-h", "nobody", "0 x"):
        taken = "%%ranks takes the name of a pool and numbers of ranks"
        with pytest.raises(UsageError, match=f"{taken}, got '{line}'"):
            run_magic(line, cell)
    with pytest.raises(IndexError, match="there is no rank 3"):
        run_magic("3", cell)
    with unisono.pool(1, start_method="fork") as single:
        run_magic("", "'single'")
        monkeypatch.setattr(sys.modules["__main__"], "workers", ranks, raising=False)
        run_magic("workers 1", cell)
    run_magic("0", "'all'")  # the newest is closed
    assert capsys.readouterr().out == "[rank 0] 'single'\n[rank 1] 1\n[rank 0] 'all'\n"
    assert repr(single) == "<unisono.pool of 1 ranks: closed>"


def test_last_values_come_by_rank_and_a_semicolon_hides_them(ranks, capsys, tmp_path):
    """Rank 0 waits for the others, so that its value comes last."""
    cell = f"""
import os, time
import unisono as dist
while not dist.get_rank() and len(os.listdir({str(tmp_path)!r})) < {SIZE - 1}:
    time.sleep(0.01)
if dist.get_rank():
    open(f"{tmp_path}/{{dist.get_rank()}}", "w").close()
"""
    table = "type('Table', (), {'__repr__': lambda self: 'a\\nb'})()"
    ranks.cell(cell + table)
    lines = [f"[rank {rank}] {line}\n" for rank in range(SIZE) for line in "ab"]
    assert capsys.readouterr().out == "".join(lines)
    ranks.cell("1;  # hidden")
    ranks.cell("'; shown'")
    assert capsys.readouterr().out == "".join(f"[rank {n}] '; shown'\n" for n in range(SIZE))


CELLS = """
def size():
    return len(rows)

def take():
    global rows
    rows = rows[rank::2]

def double():
    global rows
    rows *= 2

def keep(value):
    global rows
    rows = value

def first():
    return rows[0]

def share():
    take()
    return size()

def hold():
    global held
    held = first
"""


class Notebook(dict):
    """The main module of a notebook, as a namespace: `run` runs a cell of it."""

    def __init__(self, *cells):
        super().__init__(__name__="__main__")
        for cell in cells:
            self.run(cell)

    def run(self, cell):
        exec(cell, self)


@pytest.fixture
def forked_pair():
    pytest.importorskip("cloudpickle")
    with unisono.pool(2, start_method="fork") as made:
        made.cell("import unisono as dist\nrank = dist.get_rank()")
        yield made


def test_a_name_that_a_rank_has_assigned_is_never_replaced(forked_pair):
    notebook = Notebook(CELLS, "rows = list(range(10))")
    forked_pair.cell("rows = [rank] * (rank + 3)")
    with pytest.raises(
        UsageError, match="uses rows of the notebook, and this rank has another rows of its own"
    ):
        forked_pair.run(notebook["size"])
    # The two ways out.
    del notebook["rows"]
    assert forked_pair.run(notebook["size"]) == [3, 4]
    notebook.run("rows = list(range(10))")
    forked_pair.cell("del rows")
    assert forked_pair.run(notebook["size"]) == [10, 10]
    notebook.run("rows = [1]")
    assert forked_pair.run(notebook["size"]) == [1, 1]


def test_what_a_call_sends_is_taken_away_after_it(forked_pair, monkeypatch):
    """The notebook may change a list in place, or assign a number anew, and nothing tells it."""
    notebook = Notebook(CELLS, "rows = [1, 2]")
    assert forked_pair.run(notebook["first"]) == [1, 1]
    for cell in ("rows", "rows = rows[1:]"):
        with pytest.raises(NameError, match="rows"):
            forked_pair.cell(cell)
    # An object that stays has a name that the notebook has for no other call.
    monkeypatch.setattr(sys.modules["__main__"], "rows", [], raising=False)
    forked_pair.run(notebook["hold"])
    with pytest.raises(NameError) as caught:
        forked_pair.run(eval("lambda: held()", notebook))
    assert "the notebook has rows: run(f, rows)" in caught.value.__notes__[-1]
    notebook["rows"][0] = 9
    assert forked_pair.run(notebook["first"]) == [9, 9]
    with pytest.raises(IndexError):
        forked_pair.run(notebook.run("def fail(): return rows[7]") or notebook["fail"])
    with pytest.raises(NameError, match="rows"):
        forked_pair.cell("rows")


def test_a_shared_array_that_a_rank_has_replaced_is_refused(forked_pair):
    notebook = Notebook("def fill(): img[:] = 7\ndef total(): return img.sum()")
    img = notebook["img"] = forked_pair.shared_array(4)
    assert forked_pair.run(notebook["total"]) == [0, 0]
    forked_pair.run_each(keep_image, [img, img])
    forked_pair.cell("img = img + 1")
    with pytest.raises(UsageError, match="this rank has another img of its own"):
        forked_pair.run(notebook["fill"])
    del notebook["img"]
    forked_pair.run(notebook["fill"])
    assert forked_pair.run(notebook["total"]) == [28, 28]
    assert not img.any()


def keep_image(value):
    sys.modules["__main__"].img = value


def test_what_a_function_assigns_stays_and_is_the_ranks(forked_pair):
    notebook = Notebook("import numpy as np", CELLS)
    forked_pair.run(notebook["keep"], np.arange(9))
    forked_pair.run(notebook["take"])
    notebook.run("rows = np.arange(9)")
    with pytest.raises(UsageError, match="uses rows of the notebook"):
        forked_pair.run(notebook["size"])
    del notebook["rows"]
    assert forked_pair.run(notebook["size"]) == [5, 4]
    assert forked_pair.run(notebook["first"]) == [0, 1]
    assert forked_pair.run(notebook["share"]) == [3, 2]


def test_a_result_does_not_change_a_class_of_the_notebook(forked_pair):
    notebook = Notebook(
        "class Model:\n    version = 1\n    def f(self): return 1",
        "def keep():\n    global kept\n    kept = Model()\n    return kept",
        "def give(): return kept",
        "def fail():\n    error = ValueError('wrong')\n    error.model = kept\n    raise error",
    )
    assert forked_pair.run(notebook["keep"])[0].f() == 1
    notebook.run("Model.f, Model.version = lambda self: 2, 2")
    given = forked_pair.run(notebook["give"])
    with pytest.raises(ValueError, match="wrong"):
        forked_pair.run(notebook["fail"])
    assert [type(each) is notebook["Model"] for each in given] == [True, True]
    assert (notebook["Model"].version, notebook["Model"]().f(), given[0].f()) == (2, 2, 2)
    # A class of the ranks has their newest definition.
    forked_pair.cell("class Own:\n    def f(self): return 1\ndef own(): return Own()")
    assert forked_pair.run(eval("lambda: own()", notebook))[0].f() == 1
    forked_pair.cell("Own.f = lambda self: 3")
    assert forked_pair.run(eval("lambda: own()", notebook))[0].f() == 3


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: dist.pool(n_jobs=2), "nprocs"),
        (lambda: dist.pool(processes=2), "nprocs"),
        (lambda: dist.Executor(n_jobs=2), "max_workers"),
        (lambda: dist.launch(print, ranks=2), "nprocs"),
        (lambda: dist.spawn(print, nproc=2), "nprocs"),
    ],
)
def test_the_words_of_other_libraries_have_a_hint(call, meant):
    with pytest.raises(ArgumentTypeError, match=f"did you mean '{meant}'"):
        call()


def test_an_assignment_in_place_counts(forked_pair):
    notebook = Notebook(CELLS)
    forked_pair.run(notebook["keep"], np.ones(2))
    forked_pair.run(notebook["double"])
    assert forked_pair.run(notebook["first"]) == [2, 2]
    forked_pair.cell("rows += rank")
    assert forked_pair.run(notebook["first"]) == [2, 3]


def test_a_name_that_a_function_only_assigns_is_not_sent(forked_pair):
    notebook = Notebook("rows = None", CELLS)
    for value in ("ab", "cd"):
        forked_pair.run(notebook["keep"], value)
    del notebook["rows"]
    assert forked_pair.run(notebook["first"]) == ["c", "c"]


def test_modules_that_a_call_sends_stay_and_a_result_has_what_it_reads(forked_pair):
    notebook = Notebook(
        "import math",
        "def root(x): return math.sqrt(x)",
        "def keep():\n    global kept\n    kept = root\n    return lambda: root(16)",
    )
    assert forked_pair.run(notebook["keep"])[0]() == 4
    assert forked_pair.run(eval("lambda: kept(9)", notebook)) == [3, 3]
    notebook.run("import cmath as math")
    with pytest.raises(UsageError, match="this rank has another math of its own"):
        forked_pair.run(notebook["root"], 4)


def test_equal_constants_and_modules_are_no_conflict(forked_pair):
    notebook = Notebook("import numpy as np\nlimit = 1000\ndef f(): return np.float64(limit)")
    forked_pair.cell("import numpy as np\nlimit = 1000")
    assert forked_pair.run(notebook["f"]) == [1000, 1000]
    notebook = Notebook("value = None\ndef f(): return value")
    forked_pair.cell("value = rank")
    for _ in range(2):
        with pytest.raises(UsageError, match="uses value of the notebook"):
            forked_pair.run(notebook["f"])


def only_rank_0(call):
    if dist.get_rank() == 0:
        call(np.ones(2))


@pytest.mark.parametrize("name", ["all_reduce", "barrier", "broadcast"])
def test_a_wait_for_a_rank_that_has_returned_ends(ranks, name):
    ranks.run(remember, 6)
    call = {
        "all_reduce": dist.all_reduce,
        "barrier": wait_at_barrier,
        "broadcast": receive_from_1,
    }[name]
    with pytest.raises(PeerFailedError) as caught:
        ranks.run(only_rank_0, call)
    left = rf"rank [12] returned from only_rank_0\(\) without {name} #\d"
    assert re.search(left, str(caught.value))
    assert caught.value.__notes__ == [f"raised on rank 0 of {SIZE}"]
    assert ranks.run(recall) == [0, 6, 12]
    assert ranks.run(sum_of_ranks, 0)[0][0] == sum(range(SIZE))


def start_threads(kind):
    global woken
    woken = threading.Event()
    targets = {
        "library": woken.wait,
        "shows": wait_for_event,
        "calls later": call_later,
        "has a group": lambda group=dist.group.WORLD: woken.wait(),
        "has an object": Caller().wait,
    }
    threading.Thread(target=targets[kind], daemon=True).start()


def wait_for_event():
    woken.wait()


def call_later():
    wait_for_event()
    if dist.get_rank() > SIZE:
        only_rank_0(wait_at_barrier)


class Caller:
    def wait(self):
        wait_for_event()

    def call(self):
        dist.barrier()


def wake():
    woken.set()


def receive(src, asynchronous):
    """Receive on rank 0; an asynchronous receive gets its message in a later call."""
    global works
    if dist.get_rank() == 0:
        x = np.zeros(2)
        if asynchronous:
            works = x, dist.irecv(x, src)
            time.sleep(3.2)
        else:
            dist.recv(x, src)


def receive_and_wait(src, wait):
    if dist.get_rank() == 0:
        x, y = np.zeros((2, 2))
        later = dist.irecv(y, 2, tag=9)
        work = dist.irecv(x, src)
        if wait == "all":
            dist.wait_all([None, work])
        elif wait == "future":
            work.get_future().wait()
        else:
            work.wait(*wait)
        later.wait()


@pytest.mark.parametrize("wait", [(), (600,), "all", "future"], ids=str)
@pytest.mark.parametrize("src", [1, None])
def test_a_wait_for_an_asynchronous_receive_ends_too(ranks, src, wait):
    with pytest.raises(PeerFailedError, match=r"rank [12] returned from .* without send for this"):
        ranks.run(receive_and_wait, src, wait)
    assert ranks.run(sum_of_ranks, 0)[0][0] == sum(range(SIZE))


@pytest.mark.parametrize(("src", "left"), [(1, "1"), (None, "[12]")])
def test_a_receive_from_a_rank_that_has_returned_ends(ranks, src, left):
    with pytest.raises(
        PeerFailedError, match=rf"rank {left} returned from receive\(\) without send"
    ):
        ranks.run(receive, src, False)
    with pytest.raises(PeerFailedError, match=r"rank [12] was not called and makes no send"):
        ranks[0].run(receive, src, False)
    assert ranks.run(sum_of_ranks, 0)[0][0] == sum(range(SIZE))


def end_receive():
    if dist.get_rank() == 1:
        dist.send(np.full(2, 5.0), 0)
    elif dist.get_rank() == 0:
        works[1].wait()
        return works[0][1]
    return None


def test_a_receive_that_is_finished_later_is_no_fault(ranks):
    ranks.run(receive, 1, True)
    assert ranks.run(end_receive)[0] == 5


def slow_send():
    if dist.get_rank() == 1:
        time.sleep(3.2)
        dist.send(np.ones(2), 0)
    elif dist.get_rank() == 0:
        dist.recv(np.zeros(2))


def test_a_receive_from_any_rank_waits_for_the_last_that_may_send(ranks):
    ranks.run(slow_send)


@pytest.mark.parametrize(
    ("kind", "is_alone"),
    [
        *[("library", True), ("shows", True)],
        *[("calls later", False), ("has a group", False), ("has an object", False)],
    ],
)
def test_a_daemon_thread_whose_code_names_no_group_makes_no_call(ranks, kind, is_alone):
    """tqdm leaves such a thread behind."""
    ranks.run(start_threads, kind)
    try:
        assert ranks.run(watches_alone) == [is_alone] * SIZE
        if is_alone:
            with pytest.raises(PeerFailedError, match=r"rank [12] returned from only_rank_0\(\)"):
                ranks.run(only_rank_0, wait_at_barrier)
    finally:
        ranks.run(wake)


def watches_alone():
    return watch._activity(0).is_alone


def wait_at_barrier(x):
    dist.barrier()


def receive_from_1(x):
    dist.broadcast(x, src=1)


def test_a_wait_for_a_rank_that_was_not_called_ends(ranks):
    with pytest.raises(PeerFailedError, match=r"rank [02] was not called and makes no all_red"):
        ranks[1].run(sum_of_ranks, 0)
    assert ranks.run(sum_of_ranks, 0)[0][0] == sum(range(SIZE))


def barrier_with(x):
    dist.barrier()
    return x


def unloadable_on_0():
    if dist.get_rank() == 0:
        return unloadable()
    return dist.barrier()


def raise_on_0_and_leave_2_alone():
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        raise KeyError("mine")
    if dist.get_rank() == 2:
        dist.barrier(group)


@pytest.mark.parametrize(
    ("run", "error"),
    [
        (lambda ranks: ranks.run_each(barrier_with, [1, 2, threading.Lock()]), "cannot be sent"),
        (lambda ranks: ranks.run(unloadable_on_0), "the result of rank 0 cannot be loaded"),
        (lambda ranks: ranks.run(raise_on_0_and_leave_2_alone), "mine"),
    ],
    ids=["not sent", "not loaded", "raised elsewhere"],
)
def test_a_failure_of_one_rank_leaves_no_other_waiting(ranks, run, error):
    with pytest.raises((InvalidArgumentError, KeyError), match=error):
        run(ranks)
    assert ranks.run(sum_of_ranks, 0)[0][0] == sum(range(SIZE))


def test_an_interrupt_before_the_call_reaches_the_rank(ranks, monkeypatch):
    def interrupted_post(rank, payload):
        if rank == SIZE - 1:  # The signal comes while this rank still waits for the call.
            os.kill(os.getpid(), signal.SIGINT)
        post(rank, payload)

    pids, post = ranks.pids(), ranks._processes.post
    monkeypatch.setattr(ranks._processes, "post", interrupted_post)
    with pytest.raises(KeyboardInterrupt):
        ranks[SIZE - 1].run(time.sleep, 60)
    monkeypatch.undo()
    assert ranks.run(os.getpid) == pids  # The rank was not killed.


def test_a_group_that_a_call_destroyed_is_made_anew(ranks):
    ranks.run(dist.destroy_process_group)
    assert ranks.run(sum_of_ranks, 0)[0][0] == sum(range(SIZE))


def in_sub_group(path):
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.barrier(group)
    elif dist.get_rank() == 2:  # in no call, and in none of its groups
        open(f"{path}/started", "w").close()
        while not os.path.exists(f"{path}/end"):
            time.sleep(0.01)


def test_a_wait_in_a_sub_group_ends_while_another_rank_is_at_work(ranks, tmp_path):
    def end_rank_2():
        while not reported:
            time.sleep(0.01)
        (tmp_path / "end").touch()

    reported = []
    ask = ranks._processes.ask

    def noted(rank, name, *values):
        reported.extend([rank] * (name == "report"))
        ask(rank, name, *values)

    ranks._processes.ask = noted
    thread = threading.Thread(target=end_rank_2)
    thread.start()
    try:
        with pytest.raises(PeerFailedError, match=r"rank 1 returned from in_sub_group\(\) without"):
            ranks.run(in_sub_group, str(tmp_path))
    finally:
        del ranks._processes.ask
    thread.join()
    assert set(reported) == {1}


def late_by_turns(seconds):
    """Each rank waits in a call for the others, and works alone when they have returned."""
    for rank in range(SIZE):
        if dist.get_rank() == rank:
            time.sleep(seconds)
        dist.barrier()
    work = dist.broadcast(np.ones(3), src=0, async_op=True) if dist.get_rank() == 0 else None
    time.sleep(seconds if dist.get_rank() == 0 else 0)
    return work is not None


def end_broadcast():
    if dist.get_rank():
        dist.broadcast(np.zeros(3), src=0)


def test_slow_ranks_and_calls_that_are_finished_later_are_no_faults(ranks):
    assert ranks.run(late_by_turns, 3.2) == [True, False, False]
    ranks.run(end_broadcast)


def test_an_interrupt_says_what_the_ranks_did(ranks, tmp_path):
    def interrupt():
        while len(ranks._processes.watch.activities) < SIZE:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    ranks._processes.watch.begin()
    thread.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        ranks.run(wait_for_ever, str(tmp_path))
    thread.join()
    [note] = caught.value.__notes__
    assert re.search("rank 0 was at line .* of wait_for_ever: time.sleep", note)
    assert re.search("rank 1 was in barrier, at line .* of wait_for_ever: dist.barrier", note)


def whoami(x):
    return dist.get_rank(), x


def test_run_each_gives_each_rank_its_part(ranks):
    assert ranks.run_each(whoami, iter("abc")) == [(0, "a"), (1, "b"), (2, "c")]
    with pytest.raises(InvalidArgumentError, match="3 ranks need as many parts, got 2"):
        ranks.run_each(whoami, "ab")


def test_hints_for_those_who_know_other_pools(ranks):
    with pytest.raises(TypeError, match="missing 1 required positional") as caught:
        ranks.map(whoami_of, [(1, 2)])
    assert "starmap takes tuples of arguments" in caught.value.__notes__[-1]
    with pytest.raises(TypeError, match="missing 2 required positional") as caught:
        ranks.run(whoami_of)
    assert "get_rank() is its rank, and run_each(f, parts)" in caught.value.__notes__[-1]
    with pytest.raises(AttributeError, match="no imap; use map"):
        ranks.imap(abs, [1])
    with pytest.raises(AttributeError, match=r"no apply_async; use unisono\.Executor"):
        ranks.apply_async(abs)
    with pytest.raises(AttributeError, match=r"a pool has no other$"):
        _ = ranks.other
    with pytest.raises(dist.errors.AlreadyInitializedError, match="leave this call out"):
        ranks.run(dist.init_process_group)


def whoami_of(a, b):
    return a, b


def test_starmap_takes_tuples(ranks):
    assert ranks.starmap(divmod, [(7, 2), (9, 4)]) == [(3, 1), (2, 1)]


def test_a_name_of_the_notebook_is_named_in_an_error_of_a_cell(ranks, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "of_notebook", 3, raising=False)
    with pytest.raises(NameError, match="of_notebook") as caught:
        ranks.cell("of_notebook")
    assert caught.value.__notes__[-1].startswith("the notebook has of_notebook: run(f, of_noteb")


def test_a_count_is_shown_where_no_bar_can_be(ranks, capsys, monkeypatch):
    monkeypatch.setattr(display, "find_spec", lambda name: None)
    ranks.map(same, range(5), progress=True)
    assert capsys.readouterr().out.split("\r")[-1] == "tasks: 5 of 5\n"
    with display.progress_bar(None, True) as advance:
        advance(2)
    assert capsys.readouterr().out.split("\r")[-1] == "tasks: 2\n"


def test_a_call_outside_the_ranks_names_the_place_for_it(ranks):
    with pytest.raises(NotInitializedError, match=r"call it inside ranks\.run or %%ranks"):
        dist.all_reduce(np.ones(2))


def test_ranks_that_do_not_exist(ranks):
    with pytest.raises(IndexError, match="there is no rank 5: the pool has ranks 0 to 2"):
        ranks[5]
    with pytest.raises(TypeError, match=r"a pool gives one rank at a time, got slice\(0, 2"):
        ranks[0:2]


def test_what_completion_shows(ranks):
    assert [name for name in dir(ranks) if not name.startswith("_")] == [
        *("cell", "close", "map", "pids", "run", "run_each", "shared_array", "starmap")
    ]


def test_the_hint_of_a_lost_rank_and_the_first_error(forked):
    with pytest.raises(WorkerFailedError) as caught:
        forked.map(os._exit, [3])
    assert caught.value.__context__ is None
    assert "replace=True" not in str(caught.value) + str(getattr(caught.value, "__notes__", ""))
    with unisono.Pool(1, start_method="fork") as single:
        with pytest.raises(WorkerFailedError) as caught:
            single.run(os._exit, 3)
        assert "replace=True" in caught.value.__notes__[-1]


def test_a_pool_has_a_rank_for_each_cpu(monkeypatch):
    monkeypatch.setattr(sys.modules[unisono.pool.__module__], "allowed_cpus", lambda: {0})
    with unisono.pool(start_method="fork") as single:
        assert len(single) == 1


def test_pictures_and_tables_of_a_cell(ranks, capsys):
    table = "class Table:\n    def _repr_html_(self): return '<b>1</b>'\n"
    [found, *_] = run_and_show(ranks, table + "Table()")
    assert found["text/html"] == "<b>1</b>"
    figure = "class Figure:\n    def savefig(self, file, **how): file.write(b'PNG')\n"
    [found, *_] = run_and_show(ranks, figure + "Figure()")
    assert found["image/png"] == b"PNG"
    # Open figures of pyplot, of which a module of this name has two.
    module = (
        "import sys, types\nfigures = {1: Figure(), 2: Figure()}\n"
        "plt = sys.modules['matplotlib.pyplot'] = types.ModuleType('plt')\n"
        "plt.figure, plt.get_fignums = figures.get, figures.keys\n"
        "plt.close = lambda all: figures.clear()"
    )
    assert [each["image/png"] for each in run_and_show(ranks, module)] == [b"PNG"] * 2 * SIZE
    assert run_and_show(ranks, "del sys.modules['matplotlib.pyplot']") == []
    assert "[rank 2] <__main__.Figure" in capsys.readouterr().out


def run_and_show(ranks, cell):
    found = []
    module = sys.modules[unisono.pool.__module__]

    def noted(rank, objects):
        found.extend(objects)
        display.display(rank, objects)

    before, module.display = module.display, noted
    try:
        ranks.cell(cell)
    finally:
        module.display = before
    return found


def test_an_error_of_syntax_has_no_frames_and_explains_magics(ranks):
    with pytest.raises(SyntaxError) as caught:
        ranks.cell("%matplotlib inline")
    assert "magics and commands of the shell do not run on ranks" in caught.value.__notes__
    assert "ast.py" not in str(caught.value.__cause__)
    with pytest.raises(dist.errors.CollectiveMismatchError) as caught:
        ranks.run(mismatched)
    frames = re.findall('File "(.*?)"', str(caught.value.__cause__))
    assert frames == [__file__]


def mismatched():
    dist.all_reduce(np.ones(dist.get_rank() + 1))


@pytest.mark.parametrize("nprocs", [0, "2"])
def test_wrong_numbers_of_ranks(nprocs):
    with pytest.raises((InvalidArgumentError, TypeError), match="nprocs must be"):
        unisono.pool(nprocs)
