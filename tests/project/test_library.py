"""docs/howto/library.md: the code of the page never computes alone by mistake; wrong names."""

import contextlib
import subprocess
import sys

import numpy as np
import pytest

import unisono as dist
from tests.support.programs import python
from tests.support.tools import ROOT, tool
from unisono.core.c10d import lifecycle
from unisono.errors import InvalidArgumentError, NotInitializedError, RendezvousError
from unisono.testing import run

PROGRAM = """
import os, sys
import numpy as np

if "hidden" in sys.argv:
    sys.modules["unisono"] = None
from means import mean

if "mpi" in sys.argv:
    from unisono import MPI
if "COMM_WORLD" in sys.argv:
    MPI.COMM_WORLD.rank
if "init" in sys.argv:
    import unisono
    unisono.init_process_group()
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
group = None
if "world" in sys.argv:
    import unisono
    group = unisono.group.WORLD
if "other" in sys.argv:
    group = unisono.new_group([0])
print(mean(np.arange(12.0)[rank::size], group), flush=True)
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Write the programs of the page into a folder."""
    folder = tmp_path_factory.mktemp("library")
    for block in tool("readme").fenced((ROOT / "docs/howto/library.md").read_text("utf-8")):
        if block.title.endswith(".py"):
            (folder / block.title).write_text(block.content, "utf-8")
    (folder / "use.py").write_text(PROGRAM, "utf-8")
    return folder


@pytest.mark.parametrize("words", [[], ["hidden"], ["world"], ["init", "world"]], ids=str)
def test_one_process_computes_alone(page, words):
    assert python("use.py", *words, cwd=page, check=True).stdout == "5.5\n"


@pytest.mark.parametrize("words", [["init"], ["init", "world"], ["mpi", "COMM_WORLD"]], ids=str)
def test_ranks_compute_together(page, words):
    done = python("-m", "unisono", "run", "-n", "2", "use.py", *words, cwd=page, check=True)
    assert done.stdout == "5.5\n5.5\n"


@pytest.mark.parametrize("words", [[], ["world"]], ids=str)
def test_without_a_group_no_rank_computes_alone(page, words):
    done = python("-m", "unisono", "run", "-n", "2", "use.py", *words, cwd=page)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "NotInitializedError: the default process group has not been init" in done.stderr


def test_with_unisono_mpi_the_error_names_the_remedy(page):
    done = python("-m", "unisono", "run", "-n", "2", "use.py", "mpi", cwd=page)
    assert done.returncode == 1
    assert "hint: unisono.MPI makes it at the first use of COMM_WORLD, such as" in done.stderr


def test_a_rank_outside_the_group_does_not_compute(page):
    words = ["-m", "unisono", "run", "-n", "2", "use.py", "init", "other"]
    done = python(*words, cwd=page)
    assert done.returncode == 1
    assert done.stdout in ("5.0\n", "")
    assert "InvalidArgumentError: this rank does not belong to the given group" in done.stderr


def test_the_code_of_the_page_has_types(page):
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "means.py", "test_means.py"]
    done = subprocess.run(command, cwd=page, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_find_group_by_the_variables_of_launchers(monkeypatch):
    def found(**variables):
        monkeypatch.setattr(lifecycle.config, "environ", lambda: variables)
        return dist.find_group()

    assert found() is None
    assert found(RANK="0", WORLD_SIZE="1") is None
    assert found(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1") is None
    for variables in (
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2"},
        {"PMI_RANK": "0", "PMI_SIZE": "3"},
    ):
        with pytest.raises(NotInitializedError):
            found(**variables)
    with pytest.raises(RendezvousError, match="SLURM_NTASKS=4 means several processes"):
        found(SLURM_NTASKS="4")


def groups(rank):
    assert dist.find_group() is dist.group.WORLD
    part = dist.new_group([0])
    if rank == 0:
        assert dist.find_group(part) is part
    else:
        assert part == dist.GroupMember.NON_GROUP_MEMBER == -100
        with pytest.raises(AttributeError, match="no all_reduce: this rank is not a member of"):
            part.all_reduce(np.ones(1))
        assert not hasattr(part, "rank")
        with pytest.raises(InvalidArgumentError, match="does not belong"):
            dist.find_group(part)
    return dist.get_world_size(part)


def test_a_rank_that_is_no_member_gets_no_group():
    assert run(groups, 2) == [1, -1]


# ---- mpi4py's own MPI beside unisono --------------------------------------------------------

BOTH = """
import sys, types
mpi = types.ModuleType({name!r})
mpi.Is_initialized, mpi.Is_finalized = (lambda: True), (lambda: False)
mpi.COMM_WORLD = types.SimpleNamespace(Get_size=lambda: {size})
sys.modules["mpi4py.MPI"] = mpi
import unisono
unisono.init_process_group()
"""
WARNING = "UserWarning: mpi4py sees 1 process, and unisono 2: in MPI each rank is alone"


@pytest.mark.parametrize(
    ("ranks", "size", "name", "warns"),
    [
        (2, 1, "mpi4py.MPI", True),
        (2, 2, "mpi4py.MPI", False),
        (1, 1, "mpi4py.MPI", False),
        (2, 1, "unisono.MPI", False),
    ],
)
def test_two_worlds_in_one_program_warn(tmp_path, ranks, size, name, warns):
    (tmp_path / "both.py").write_text(BOTH.format(name=name, size=size), "utf-8")
    done = python("-m", "unisono", "run", "-n", str(ranks), "both.py", cwd=tmp_path, check=True)
    assert (WARNING in done.stderr) == warns


# ---- wrong names ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("home", "name", "hint"),
    [
        (dist, "allreduce", "; did you mean 'all_reduce'?"),
        (dist, "bcast", "; did you mean 'broadcast'?"),
        (dist, "size", "; did you mean 'get_world_size'?"),
        (dist, "something_else", ""),
        (dist, "_allreduc", ""),
        (dist.ReduceOp, "MEAN", "; did you mean 'AVG'?"),
        (dist.ReduceOp, "PROD", "; did you mean 'PRODUCT'?"),
    ],
)
def test_a_wrong_name_has_a_hint(home, name, hint):
    with pytest.raises(AttributeError) as caught:
        getattr(home, name)
    assert str(caught.value).endswith(f"has no attribute {name!r}{hint}")


def test_functions_that_are_no_methods_are_named():
    with contextlib.closing(dist.ProcessGroup(dist.HashStore(), 0, 1)) as group:
        for name in ("all_gather_object", "isend", "irecv", "sendrecv", "monitored_barrier"):
            assert not hasattr(group, name)
            assert name not in dir(group)
            with pytest.raises(
                AttributeError, match=rf"use unisono\.{name}\(\.\.\., group=\.\.\.\)"
            ):
                getattr(group, name)


def test_dir_of_a_group_has_what_programs_call():
    with contextlib.closing(dist.ProcessGroup(dist.HashStore(), 0, 1)) as group:
        names = {name for name in dir(group) if not name.startswith("_")}
        assert {"all_reduce", "allreduce", "rank", "split_group"} & names == {
            *("all_reduce", "allreduce", "rank")
        }
        assert {"take_guard", "report_failure", "port"} & names == set()
        assert [name for name in names if not hasattr(group, name)] == []


def test_modules_are_there_after_the_import_of_the_package():
    program = """
import unisono
for name in ("errors", "lowlevel", "parallel", "testing"):
    assert getattr(unisono, name).__name__ == f"unisono.{name}"
for name in ("MPI", "torch"):
    try:
        getattr(unisono, name)
    except AttributeError as error:
        print(error)
assert not unisono.is_initialized()
"""
    assert python("-c", program, check=True).stdout == (
        "module 'unisono' has no attribute 'MPI' before `import unisono.MPI`\n"
        "module 'unisono' has no attribute 'torch' before `import unisono.torch`\n"
    )
