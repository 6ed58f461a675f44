"""`init_process_group()` without arguments, under launchers that are not torch's kind."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import unisono as dist
from unisono.core.c10d.queries import get_node_local_rank
from unisono.errors import RendezvousError

LIMIT_S = 100
# Beside this interpreter: it comes with the mpich package, which is a test requirement.
MPIEXEC = Path(sys.executable).parent / "mpiexec"
SRC = str(Path(dist.__file__).parents[1])

pytestmark = pytest.mark.linux("launchers of Linux clusters")
needs_mpiexec = pytest.mark.skipif(not MPIEXEC.exists(), reason="mpich is not installed")

BODY = """
import os, sys
import numpy as np
import unisono as dist
from unisono.core.c10d.queries import get_node_local_rank
sums = []
for _ in range(int(os.environ.get("MEETINGS", "2"))):
    dist.init_process_group()
    x = np.full(2, dist.get_rank() + 1.0)
    dist.all_reduce(x)
    sums.append(float(x[0]))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
line = f"{rank}/{world_size} local {get_node_local_rank()}: {sums}\\n"
os.write(1, line.encode())
"""


def clean_environment(**extra):
    """The environment of a user who is in no launch, with a temporary folder of the test's."""
    starts = ("PMI", "SLURM_", "OMPI_", "PRTE_", "MV2_", "MPI_", "HYD", "TORCHELASTIC_", "UNISONO_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if not k.startswith(starts) and k not in names}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [SRC, env.get("PYTHONPATH")]))
    return env | extra


def completed(command, **env):
    return subprocess.run(
        command,
        env=clean_environment(**env),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def output(command, **env):
    done = completed(command, **env)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def expected(world_size, meetings=2):
    sums = [world_size * (world_size + 1) / 2] * meetings
    return [f"{r}/{world_size} local {r}: {sums}" for r in range(world_size)]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(BODY)
    return str(path)


@needs_mpiexec
@pytest.mark.sweep(1)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_mpiexec(script, tmp_path, world_size):
    command = [MPIEXEC, "-n", str(world_size), sys.executable, script]
    assert output(command, TMPDIR=str(tmp_path)) == expected(world_size)
    # The files of the meetings are gone.
    assert [path for folder in tmp_path.glob("unisono-*") for path in folder.iterdir()] == []


@needs_mpiexec
def test_mpiexec_with_a_shell_around_each_rank(script, tmp_path):
    wrapped = f"{sys.executable} {script}; exit $?"
    command = [MPIEXEC, "-n", "2", "sh", "-c", wrapped]
    assert output(command, TMPDIR=str(tmp_path)) == expected(2)


@needs_mpiexec
def test_two_mpiexec_at_once_are_two_worlds(script, tmp_path):
    command = [str(MPIEXEC), "-n", "2", sys.executable, script]
    outs = side_by_side([command] * 2, [{"TMPDIR": str(tmp_path)}] * 2)
    assert [sorted(out.splitlines()) for out in outs] == [expected(2)] * 2


@needs_mpiexec
@pytest.mark.parametrize("kind", ["FileStore", "TCPStore"])
def test_counters_of_the_page_for_users_of_mpi4py(tmp_path, monkeypatch, port, kind):
    page = (Path(__file__).parents[3] / "docs/howto/from-mpi4py.md").read_text(encoding="utf-8")
    program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[1]
    check = f"assert type(store._underlying_non_prefix_store) is dist.{kind}\ndist.destroy"
    (tmp_path / "script.py").write_text(program.replace("dist.destroy", check))
    monkeypatch.chdir(tmp_path)
    env = {"TMPDIR": str(tmp_path)}
    if kind == "TCPStore":
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    assert output([MPIEXEC, "-n", "3", sys.executable, "script.py"], **env) == ["4950"]
    lines = [line.split() for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert sorted(int(rank) for rank, _ in lines) == [0, 1, 2]
    assert sum(int(count) for _, count in lines) == 100


@needs_mpiexec
def test_left_over_variables_of_a_world_of_one_are_refused(tmp_path):
    code = "import unisono; unisono.init_process_group()"
    done = completed(
        [MPIEXEC, "-n", "2", sys.executable, "-c", code],
        TMPDIR=str(tmp_path),
        RANK="0",
        WORLD_SIZE="1",
    )
    assert done.returncode != 0
    assert "RANK=0 and WORLD_SIZE=1 are set, but mpiexec (MPICH" in done.stderr


def side_by_side(commands, environments):
    """Run commands at the same time; return what each printed."""
    with contextlib.ExitStack() as stack:
        processes = []
        for command, env in zip(commands, environments, strict=True):
            process = stack.enter_context(
                subprocess.Popen(
                    command,
                    env=clean_environment(**env),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            processes.append(process)
        outs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes)
    return outs


def ranks_started_by_hand(script, envs):
    """Start a process per environment, as srun or Kubernetes would; return what each printed."""
    outs = side_by_side([[sys.executable, script]] * len(envs), envs)
    return [out.rstrip("\n") for out in outs]


SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "node1",
}
OPEN_MPI = {
    "PMIX_NAMESPACE": "prterun-1@1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    ("job", "names"),
    [
        (SLURM, ["SLURM_PROCID", "SLURM_LOCALID"]),
        (OPEN_MPI, ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"]),
    ],
    ids=["srun", "Open MPI"],
)
def test_launcher_on_one_node(script, tmp_path, job, names):
    envs = [{"TMPDIR": str(tmp_path)} | job | dict.fromkeys(names, str(r)) for r in range(2)]
    assert ranks_started_by_hand(script, envs) == expected(2)


def test_indexed_job_with_an_address(script, port):
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # One meeting only: rank 1 may come to the second while the store of the first still listens.
    common["MEETINGS"] = "1"
    envs = [common | {"JOB_COMPLETION_INDEX": str(r), "LOCAL_RANK": str(r)} for r in range(2)]
    assert ranks_started_by_hand(script, envs) == expected(2, meetings=1)


def test_batch_script_without_srun_raises(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_PROCID", "0")
    with pytest.raises(RendezvousError, match="SLURM_NTASKS=8") as caught:
        dist.init_process_group()
    assert "srun" in caught.value.hint
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("env", "fallback", "local_rank"),
    [
        ({"LOCAL_RANK": "3"}, 9, 3),
        ({"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}, None, 1),
        ({}, 7, 7),
    ],
)
def test_local_rank(monkeypatch, env, fallback, local_rank):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, text in env.items():
        monkeypatch.setenv(name, text)
    assert get_node_local_rank(fallback) == local_rank


def test_local_rank_that_is_not_known(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(RendezvousError, match="the local rank is not known"):
        get_node_local_rank()
