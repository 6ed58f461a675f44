"""COMM_WORLD is the world of the thread that uses it; the import of unisono.MPI makes no group."""

from __future__ import annotations

import contextvars
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unisono as dist
from unisono import MPI
from unisono.errors import AlreadyInitializedError, ArgumentTypeError
from unisono.testing import run


def script(folder: Path, text: str, *before: str) -> subprocess.CompletedProcess[str]:
    """Run a program of its own."""
    program = folder / "program.py"
    program.write_text(text)
    words = [sys.executable, *before, str(program)]
    return subprocess.run(words, capture_output=True, text=True, timeout=100)


@pytest.mark.ranks(3, kind="both")
def test_the_world_is_that_of_the_rank(rank: int) -> None:
    """The module was imported before the ranks existed."""
    comm = MPI.COMM_WORLD
    assert (comm.rank, comm.size, MPI.COMM_SELF.size) == (rank, 3, 1)
    out = np.empty(2)
    comm.Allreduce(np.full(2, rank + 1.0), out)
    assert out.tolist() == [6.0, 6.0]
    assert comm.gather(rank, 1) == ([0, 1, 2] if rank == 1 else None)
    # The answers of synchronous sends have a group of their own, made without a collective call.
    request = comm.Issend(out * rank, (rank + 1) % 3)
    comm.Recv(out, (rank - 1) % 3)
    request.Wait()
    assert out.tolist() == [6.0 * ((rank - 1) % 3)] * 2
    assert comm.group.rank == comm.Get_group().Translate_ranks([rank])[0] == rank
    comm.Set_name(f"of {rank}")
    comm.Barrier()
    assert (comm.name, MPI.COMM_SELF.name) == (f"of {rank}", "MPI_COMM_SELF")


def test_ranks_use_it_at_different_times() -> None:
    """No use of COMM_WORLD waits for another rank, or changes the groups that others make."""

    def body(rank: int) -> int:
        if rank:
            assert MPI.COMM_WORLD.rank == rank
        made = dist.new_group(use_local_synchronization=True)
        array = np.ones(1)
        dist.all_reduce(array, group=made)
        return int(array[0]) + MPI.COMM_SELF.rank + int(MPI.COMM_WORLD.allreduce(rank))

    assert run(body, 2) == [3, 3]


def test_the_import_makes_no_group(tmp_path: Path) -> None:
    """What needs no world can be done before; then either may make the group."""
    text = (
        "import unisono as dist\nfrom unisono import MPI\n"
        "def f(comm=MPI.COMM_WORLD): return comm.size\n"
        "assert MPI.COMM_WORLD != MPI.COMM_SELF and bool(MPI.COMM_WORLD)\n"
        "assert MPI.Is_initialized() and not dist.is_initialized()\n"
        "dist.init_process_group()\n"
        "print(f(), dist.get_world_size())\n"
    )
    done = script(tmp_path, text, "-m", "unisono", "run", "--nproc-per-node", "2")
    assert (done.returncode, done.stdout) == (0, "2 2\n" * 2), done.stderr


def test_handles_are_constants() -> None:
    """Copies, pickles and sets of them need no world."""

    def body() -> None:
        comm = MPI.COMM_WORLD
        assert type(comm) is MPI.Intracomm
        assert MPI.Intracomm(comm) == comm != MPI.COMM_NULL
        assert pickle.loads(pickle.dumps(comm)) is comm
        assert len({comm, MPI.Comm(comm), MPI.COMM_SELF}) == 2
        assert not dist.is_initialized()

    body()


@pytest.mark.ranks(2)
def test_init_after_use_says_what_made_the_group(rank: int) -> None:
    """Also that it is not to be destroyed."""
    dist.destroy_process_group()
    assert MPI.COMM_WORLD.size == 1
    with pytest.raises(AlreadyInitializedError) as caught:
        dist.init_process_group()
    assert "the first use of unisono.MPI has made it: leave this call out" in str(caught.value)
    MPI.Finalize()
    assert MPI.Is_finalized()
    with pytest.raises(MPI.Exception, match="Finalize was called"):
        MPI.COMM_WORLD.Get_rank()


def test_threads_may_use_it_first_together() -> None:
    """They get one world."""

    def body(rank: int) -> list[int]:
        dist.destroy_process_group()
        comm: Any = MPI.COMM_WORLD
        sizes, at = [], threading.Barrier(4)

        def use() -> None:
            at.wait()
            sizes.append(id(comm.live))

        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(use,)) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sizes

    (sizes,) = run(body, 1)
    assert len(sizes) == 4
    assert len({*sizes}) == 1


@pytest.mark.ranks(2)
def test_a_small_sum_on_the_world_takes_few_calls(rank: int) -> None:
    """The way through Python would be most of its time."""
    array, called = np.full(1, rank + 1.0), []
    for _ in range(3):
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array)
    sys.setprofile(lambda frame, event, _: called.append((event, frame.f_code.co_name)))
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array)
    sys.setprofile(None)
    made = [name for event, name in called if event == "call"]
    assert made == ["Allreduce", "find", "current"]
    assert array[0] == 24.0


@pytest.mark.ranks(3, kind="both")
def test_a_communicator_is_a_group(rank: int) -> None:
    """Functions of unisono, and of libraries that call find_group, take one."""
    comm: Any = MPI.COMM_WORLD.Split(int(rank == 2), -rank)
    for _ in range(3):  # later calls run in C++
        array = np.full(2, 10.0**rank)
        dist.all_reduce(array, group=comm)
        assert array.tolist() == [100.0 if rank == 2 else 11.0] * 2
    group = dist.find_group(comm)
    assert group is not None
    assert (group.rank(), group.size()) == (comm.rank, comm.size)
    assert dist.get_rank(comm) == comm.rank
    comm = MPI.COMM_WORLD
    assert dist.find_group(comm) is dist.group.WORLD
    comm = MPI.COMM_NULL
    with pytest.raises(
        ArgumentTypeError, match="group must have ranks of its own, got a null communicator"
    ):
        dist.find_group(comm)


SPAWNS = """\
import unisono as dist
from unisono import MPI
{use}
def main(rank):
    dist.init_process_group()
    print(MPI.COMM_WORLD.rank == rank, MPI.COMM_WORLD.size, flush=True)

if __name__ == "__main__":
    dist.spawn(main, nprocs=2)
"""


def test_a_spawned_rank_has_its_place(tmp_path: Path) -> None:
    """The child imports the main module before it knows its rank."""
    done = script(tmp_path, SPAWNS.format(use=""))
    assert (done.returncode, done.stdout) == (0, "True 2\n" * 2), done.stderr
    done = script(tmp_path, SPAWNS.replace("    dist.init_process_group()\n", "").format(use=""))
    assert (done.returncode, done.stdout) == (0, "True 2\n" * 2), done.stderr


def test_a_spawned_rank_makes_no_world_of_one(tmp_path: Path) -> None:
    """A use at the level of the module, in a child that has no rank yet, is refused."""
    done = script(tmp_path, SPAWNS.format(use="size = MPI.COMM_WORLD.size"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert "unisono.MPI is used before this process has a rank" in done.stderr
    assert 'below `if __name__ == "__main__":`' in done.stderr
