"""`Executor`: tasks on processes; dead workers, retries, cancelling, back-pressure."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import warnings
from concurrent import futures

import numpy as np
import pytest

import unisono
from unisono.beyond.pool import display
from unisono.errors import InvalidArgumentError, NotInitializedError, UsageError, WorkerFailedError
from unisono.futures import MPIPoolExecutor
from unisono.launcher import payload


@pytest.fixture(scope="module")
def executor():
    with unisono.Executor(2) as made:
        yield made.bootup()


@pytest.fixture
def forked():
    """An executor whose workers a test may kill; in `executor` that would be a leak."""
    with unisono.Executor(2, start_method="fork") as made:
        yield made.bootup()


def square(x, add=0):
    if x < 0:
        raise LookupError(f"no {x}")
    return x * x + add


def kill_once(path, value):
    """Kill this worker, unless an earlier attempt has."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return value, os.getpid()
    os.kill(os.getpid(), signal.SIGKILL)


def test_tasks_return_their_results(executor):
    assert executor.num_workers == 2
    assert executor.submit(square, 7, add=1).result() == 50
    assert list(executor.map(square, range(50))) == [x * x for x in range(50)]
    assert list(executor.starmap(square, [(1, 2), (3, 4)], chunksize=2)) == [3, 13]
    assert sorted(executor.map(square, range(9), unordered=True)) == [x * x for x in range(9)]
    done = futures.wait([executor.submit(os.getpid) for _ in range(20)]).done
    assert len({future.result() for future in done}) <= 2


def test_an_exception_has_its_worker_and_traceback(executor):
    error = executor.submit(square, -3).exception()
    assert isinstance(error, LookupError)
    assert str(error) == "no -3"
    assert error.__notes__[0] in {f"raised on worker {rank} of 2" for rank in range(2)}
    assert isinstance(error.__cause__, WorkerFailedError)
    assert str(error.__cause__).startswith("worker ")
    assert " raised an exception" in str(error.__cause__)
    assert executor.submit(square, 2).result() == 4


def test_a_worker_that_dies_takes_only_its_task_with_it(tmp_path):
    with unisono.Executor(2) as executor:
        others = [executor.submit(square, x) for x in range(30)]
        lost = executor.submit(kill_once, str(tmp_path / "a"), 5)
        more = [executor.submit(square, x) for x in range(30)]
        with pytest.raises(WorkerFailedError) as caught:
            lost.result()
        assert str(caught.value).startswith("a worker of the executor ended in the task: rank ")
        assert "was killed by SIGKILL" in str(caught.value)
        assert [each.result() for each in others + more] == [x * x for x in range(30)] * 2


def test_a_task_is_run_again_on_another_worker(tmp_path):
    with MPIPoolExecutor(1, retries=1) as executor:
        before = executor.submit(os.getpid).result()
        value, pid = executor.submit(kill_once, str(tmp_path / "a"), 5).result()
        assert (value, pid != before) == (5, True)
        with pytest.raises(WorkerFailedError, match=r"ended in the task \(attempt 2\): rank 0"):
            executor.submit(die).result()


def test_an_idle_worker_that_died_is_not_blamed_on_a_task(forked):
    before = forked.submit(os.getpid).result()
    for child in multiprocessing.active_children():
        if child.pid == before:
            os.kill(before, signal.SIGKILL)
            child.join()
    found = [forked.submit(os.getpid) for _ in range(8)]
    assert before not in {each.result() for each in found}


def kill_all(pids):
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
        os.kill(pid, signal.SIGKILL)


def test_workers_that_die_at_once_are_all_replaced():
    others = {child.pid for child in multiprocessing.active_children()}
    with unisono.Executor(2, start_method="fork") as executor:
        executor.bootup()
        old = {child.pid for child in multiprocessing.active_children()} - others
        with pytest.raises(WorkerFailedError, match="a worker of the executor ended in the task"):
            executor.submit(kill_all, old).result()
        found = [executor.submit(os.getpid) for _ in range(8)]
        assert not old & {each.result() for each in found}


def die_before_the_result():
    payload.Payload.send = lambda *args: os._exit(1)


def test_a_worker_that_dies_between_its_answer_and_its_result(forked):
    with pytest.raises(WorkerFailedError, match=r"ended in the task: rank . .* with code 1"):
        forked.submit(die_before_the_result).result()
    assert forked.submit(square, 3).result() == 9


def start_once(path):
    os.close(os.open(path, os.O_CREAT | os.O_EXCL))


def test_a_task_that_cannot_be_run_again_fails(tmp_path):
    path = str(tmp_path / "started")
    executor = unisono.Executor(1, initializer=start_once, initargs=(path,), retries=1)
    with pytest.raises(WorkerFailedError, match="the initializer failed on worker 0"):
        executor.submit(die).result(60)
    executor.shutdown()


def test_a_fork_of_the_process_does_not_close_the_executor(executor):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        try:
            executor._queue.close()
        finally:
            os._exit(executor._queue.is_closing)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def set_offset(value):
    global offset
    offset = value


def offset_of(x):
    return x + offset


def test_each_worker_calls_the_initializer(tmp_path):
    with unisono.Executor(1, initializer=set_offset, initargs=(10,), retries=1) as executor:
        assert executor.submit(offset_of, 1).result() == 11
        executor.submit(kill_once, str(tmp_path / "a"), 5).result()
        assert executor.submit(offset_of, 2).result() == 12
    executor = unisono.Executor(1, initializer=square, initargs=(-1,))
    with pytest.raises(WorkerFailedError, match="the initializer failed on worker 0"):
        executor.submit(offset_of, 1).result()
    executor.bootup()
    with pytest.raises(WorkerFailedError, match="the initializer failed on worker 0"):
        executor.submit(offset_of, 1)
    executor.shutdown()
    executor = unisono.Executor(1, initializer=die)
    with pytest.raises(
        WorkerFailedError, match="a worker of the executor ended in the initializer"
    ):
        executor.submit(offset_of, 1).result()
    executor.shutdown()


def test_map_reads_no_further_than_its_buffer(executor):
    read = []

    def tasks():
        for x in range(100):
            read.append(x)
            yield x

    results = executor.map(square, tasks(), buffersize=3)
    assert len(read) == 3
    assert next(results) == 0
    assert len(read) == 4
    assert list(results) == [x * x for x in range(1, 100)]


def wait_for(path):
    with open(path) as fifo:
        return fifo.read()


def test_cancelling_and_timeouts(tmp_path):
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    executor = unisono.Executor(1).bootup()
    first = executor.submit(wait_for, path)
    waiting = executor.submit(square, 1)
    results = executor.map(square, [1, 2], timeout=0.01)
    with pytest.raises(TimeoutError, match=r"a task did not end within 0.01 s"):
        next(results)
    while not first.running():
        threading.Event().wait(0.01)
    assert waiting.cancel()
    last = executor.submit(square, 5)
    executor.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(UsageError, match="the executor is closed"):
        executor.submit(square, 1)
    with open(path, "w") as fifo:
        fifo.write("done")
    assert first.result() == "done"
    assert last.cancelled()
    executor.shutdown()
    assert not executor._thread.is_alive()


def test_what_cannot_be_sent_fails_alone(executor):
    with pytest.raises(InvalidArgumentError, match="the function or its arguments cannot be sent"):
        executor.submit(square, threading.Lock()).result()
    with pytest.raises(InvalidArgumentError, match=r"the result of rank . cannot be sent"):
        executor.submit(threading.Lock).result()
    assert executor.submit(square, 3).result() == 9


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"retries": -1}, "retries must be at least 0, got -1"),
        ({"max_workers": 0}, "nprocs must be at least 1, got 0"),
        ({"initializer": 5}, "fn must be a function, got int"),
    ],
)
def test_wrong_arguments(keywords, text):
    with pytest.raises((ValueError, TypeError), match=text):
        unisono.Executor(**{"max_workers": 1} | keywords)


def test_wrong_sizes_of_map(executor):
    with pytest.raises(InvalidArgumentError, match="chunksize must be at least 1, got 0"):
        executor.map(square, [1], chunksize=0)
    with pytest.raises(InvalidArgumentError, match="buffersize must be at least 1, got -1"):
        executor.map(square, [1], buffersize=-1)


def test_a_dropped_executor_ends():
    executor = unisono.Executor(1).bootup()
    thread = executor._thread
    future = executor.submit(square, 4)
    del executor
    gc.collect()
    assert future.result() == 16
    thread.join(60)
    assert not thread.is_alive()


PROGRAM = """
import unisono
if __name__ == "__main__":
    executor = unisono.Executor(1)
    executor.submit(print, "printed at the end")
"""


def test_a_script_that_ends_finishes_its_tasks(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "[rank 0] printed at the end\n"), done.stderr


def entry(mapping, name):
    return mapping[name]


def test_a_task_gets_its_arguments_as_they_were_at_submit(executor):
    options, large = {"lr": 0}, np.zeros(1 << 16)
    found = []
    for k in range(8):
        options["lr"] = large[-1] = k
        found.append((executor.submit(entry, options, "lr"), executor.submit(entry, large, -1)))
    assert [(a.result(), b.result()) for a, b in found] == [(k, k) for k in range(8)]


def test_waiting_tasks_share_the_copy_of_an_array(executor):
    large = np.arange(1 << 16)
    calls = [executor._snapshot(np.sum, (large,), {}) for _ in range(3)]
    assert calls[0]._buffers[0] is calls[1]._buffers[0] is calls[2]._buffers[0]
    large[3] += 1
    assert executor._snapshot(np.sum, (large,), {})._buffers[0] is not calls[0]._buffers[0]
    large.flags.writeable = False
    frozen = executor._snapshot(np.sum, (large,), {})
    assert not frozen._buffers[0].flags.writeable
    assert executor.submit(writeable, large).result() is False


def writeable(x):
    return x.flags.writeable


def no_group():
    unisono.get_rank()


def test_a_task_has_no_group_and_says_so(executor):
    with pytest.raises(NotInitializedError, match=r"tasks .* have no group: use unisono\.pool"):
        executor.submit(no_group).result()


def test_map_counts_and_the_executor_shows_its_state(capsys, monkeypatch):
    monkeypatch.setattr(display, "find_spec", lambda name: None)
    with unisono.Executor(1, start_method="fork") as executor:
        assert repr(executor) == "<unisono.Executor of 1 workers: ready>"
        assert list(executor.map(square, range(3), progress=True)) == [0, 1, 4]
    assert capsys.readouterr().out.split("\r")[-1] == "tasks: 3 of 3\n"
    assert repr(executor) == "<unisono.Executor of 1 workers: closed>"
