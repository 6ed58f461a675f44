"""`MPICommExecutor` and `python -m unisono.futures`: the ranks of a job as workers."""

import os
import re
import secrets
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import unisono as dist
from unisono.errors import InvalidArgumentError, PeerLostError, UsageError, WorkerFailedError
from unisono.futures import MPICommExecutor, MPIPoolExecutor
from unisono.testing import run
from unisono.testing.hosts import Network, why_no_hosts


def square(x):
    if x < 0:
        raise LookupError(f"no {x}")
    return x * x, dist.get_rank()


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def large(x):
    return x * 2


@pytest.mark.ranks(3)
def test_tasks_run_on_the_other_ranks(rank):
    for root in (0, 2):
        with MPICommExecutor(root=root) as executor:
            assert (executor is None) == (rank != root)
            if executor is None:
                continue
            assert executor.num_workers == 2
            found = list(executor.map(square, range(30), chunksize=4))
            assert [value for value, _ in found] == [x * x for x in range(30)]
            assert root not in {worker for _, worker in found}
            error = executor.submit(square, -1).exception()
            assert (type(error), str(error)) == (LookupError, "no -1")
            data = np.arange(300_000.0)
            np.testing.assert_array_equal(executor.submit(large, data).result(), data * 2)
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_root_that_is_no_rank(rank):
    with pytest.raises(InvalidArgumentError, match="root 2 is no rank of a group of 2"):
        MPICommExecutor(root=2).__enter__()
    with pytest.raises(InvalidArgumentError, match=r"root 2 is no rank|do not agree on the root"):
        MPICommExecutor(root=2 * rank).__enter__()


@pytest.mark.ranks(3)
def test_a_root_that_not_all_ranks_give(rank):
    for root, given in ((rank, [rank]), (rank // 2, [0, 1] if rank < 2 else [2])):
        text = f"the ranks do not agree on the root: only ranks {given} gave {root}"
        with pytest.raises(InvalidArgumentError, match=re.escape(text)):
            MPICommExecutor(root=root).__enter__()
    dist.barrier()


@pytest.mark.ranks(1)
def test_an_inter_communicator_has_no_root(rank):
    inter = SimpleNamespace(ob=SimpleNamespace(is_inter=True))
    text = "an inter-communicator has no rank for the executor"
    with pytest.raises(InvalidArgumentError, match=text):
        MPICommExecutor(inter).__enter__()


@pytest.mark.ranks(3)
def test_errors_name_ranks_of_the_job(rank):
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    with MPICommExecutor(group) as executor:
        if executor is not None:
            error = executor.submit(square, -1).exception()
            assert error.__notes__ == ["raised on worker 2 of 3"]
            assert error.__cause__.context.rank == 2


@pytest.mark.ranks(2)
def test_a_task_that_exits_ends_no_worker(rank):
    with MPICommExecutor() as executor:
        if executor is not None:
            error = executor.submit(sys.exit, 3).exception(60)
            assert str(error).startswith("worker 1 raised an exception")
            assert executor.submit(square, 3).result(60) == (9, 1)


def lose_a_worker(rank, task, retries):
    try:
        with MPICommExecutor(retries=retries) as executor:
            if executor is None:
                return None
            lost = executor.submit(task).exception(60)
            return str(lost).split("\n")[0], executor.submit(square, 3).result(60)
    except WorkerFailedError as error:
        return str(error)


def test_a_worker_that_dies_fails_its_task_by_name():
    (text, value), *_ = run(lose_a_worker, 3, ranks="processes", args=(die, 0), dead={1})
    assert text.startswith("a worker of the executor ended in the task: rank 1: ")
    assert "was lost" in text
    assert value == (9, 2)


def lose_an_idle_worker(rank):
    with MPICommExecutor() as executor:
        if executor is None:
            return None
        os.kill(executor.submit(os.getpid).result(60), signal.SIGKILL)
        with pytest.raises(PeerLostError):
            executor._workers._group.recv(np.empty(1), 1)
        return executor.submit(square, 3).result(60)


def test_a_worker_that_died_idle_costs_no_task():
    value, *_ = run(lose_an_idle_worker, 3, ranks="processes", dead={1})
    assert value == (9, 2)


def test_no_worker_is_left():
    text, *_ = run(lose_a_worker, 2, ranks="processes", args=(die, 0), dead={1})
    assert str(text).startswith("all workers of the executor have ended: rank 1: ")


def one_at_a_time(rank, monkeypatch=None):
    with MPICommExecutor() as executor:
        if executor is None:
            return None
        MPIPoolExecutor._workers = executor._workers
        try:
            MPIPoolExecutor()
        except UsageError as error:
            return str(error).split("\n")[0]
        finally:
            MPIPoolExecutor._workers = None


def test_two_executors_do_not_share_the_ranks(monkeypatch):
    monkeypatch.setattr("unisono.beyond.pool.executor._TAKE_S", 0.01)
    text, _ = run(one_at_a_time, 2)
    assert text == "the ranks are the workers of another executor"


PROGRAM = """
import socket
from unisono.futures import MPIPoolExecutor

def where(x):
    return x, socket.gethostname()

if __name__ == "__main__":
    for _ in range(2):
        with MPIPoolExecutor() as executor:
            found = list(executor.map(where, range(12)))
            print(executor.num_workers, sum(x for x, _ in found), *sorted({h for _, h in found}))
"""


def test_a_program_with_the_other_ranks_as_workers(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = ["-m", "unisono", "run", "--nproc-per-node", "3", "-m", "unisono.futures", str(program)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert [line[:5] for line in done.stdout.splitlines()] == ["2 66 "] * 2


UNFINISHED = """
import time
from unisono.futures import MPIPoolExecutor

if __name__ == "__main__":
    executor = MPIPoolExecutor()
    future = executor.submit(time.sleep, 0.3)
    future.add_done_callback(lambda future: print(future.result()))
    CALL
"""


@pytest.mark.parametrize("call", ["executor.shutdown(wait=False)", ""])
def test_a_program_that_ends_before_its_tasks(tmp_path, call):
    program = tmp_path / "program.py"
    program.write_text(UNFINISHED.replace("CALL", call))
    words = ["-m", "unisono", "run", "--nproc-per-node", "2", "-m", "unisono.futures", str(program)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


def test_it_says_how_to_use_it():
    words = [sys.executable, "-m", "unisono.futures"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.stderr.startswith("usage: python -m unisono.futures")


@pytest.mark.whole("two hosts")
@pytest.mark.skipif(bool(why_no_hosts()), reason=str(why_no_hosts()))
def test_tasks_run_on_several_hosts(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    env = os.environ | {"UNISONO_TOKEN": secrets.token_hex()}
    launch = [sys.executable, "-m", "unisono", "run", "--nnodes", "2", "--master-addr", "host1"]
    with Network(2) as network:
        started = [
            subprocess.Popen(
                host.inside(
                    *(*launch, "--node-rank", str(index), "--nproc-per-node", "2"),
                    *("-m", "unisono.futures", str(program)),
                ),
                env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for index, host in enumerate(network.hosts)
        ]  # fmt: skip
        done = [process.communicate(timeout=100) for process in started]
    assert [process.returncode for process in started] == [0, 0], done
    assert done[0][0] == "3 66 host1 host2\n" * 2
