"""`init_process_group()` under Open MPI and Slurm themselves, where they are installed.

Debian has them as openmpi-bin and slurm-wlm. Slurm's two daemons are started for these tests, with
a configuration and ports of their own, and without authentication.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest

from tests.worlds.test_detection import (
    BODY,
    LIMIT_S,
    clean_environment,
    completed,
    expected,
    output,
    side_by_side,
)

MPIRUN = shutil.which("mpirun.openmpi")
DAEMONS = [shutil.which(name, path="/usr/sbin:/sbin:/usr/bin") for name in ("slurmctld", "slurmd")]

needs_open_mpi = pytest.mark.skipif(MPIRUN is None, reason="Open MPI is not installed")
needs_slurm = pytest.mark.skipif(
    None in DAEMONS or os.geteuid() != 0, reason="Slurm is not installed, or we are not root"
)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(BODY)
    return str(path)


def two_at_once(command, **env):
    """Run a command twice at once; return the sorted lines of each."""
    return [sorted(out.splitlines()) for out in side_by_side([command] * 2, [env] * 2)]


@needs_open_mpi
def test_two_jobs_of_open_mpi_at_once_are_two_worlds(script, tmp_path):
    command = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable, script]
    assert two_at_once(command, TMPDIR=str(tmp_path)) == [expected(3)] * 2


CONFIGURATION = """
ClusterName=unisono
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP OverSubscribe=FORCE
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster of this host alone; returns the variable that leads to it."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    with contextlib.ExitStack() as probes:
        # Ports below those that the system gives out, so that no other process gets them.
        sockets = [probes.enter_context(socket.socket()) for _ in range(2)]
        ports = [_bind_somewhere(each, 20000 + os.getpid() % 5000) for each in sockets]
    host = os.uname().nodename.partition(".")[0]
    path = folder / "slurm.conf"
    path.write_text(CONFIGURATION.format(host=host, ports=ports, folder=folder))
    env = clean_environment(SLURM_CONF=str(path))
    with contextlib.ExitStack() as stack:
        for daemon in DAEMONS:
            log = stack.enter_context(open(folder / f"{os.path.basename(daemon)}.log", "wb"))
            process = subprocess.Popen([daemon, "-D"], env=env, stdout=log, stderr=log)
            stack.callback(process.wait, LIMIT_S)
            stack.callback(process.terminate)
        deadline = time.monotonic() + LIMIT_S
        state = ["sinfo", "-h", "-o", "%T"]
        while (
            b"idle" not in subprocess.run(state, env=env, capture_output=True, check=False).stdout
        ):
            logs = [path.read_text(errors="replace") for path in folder.glob("*.log")]
            assert time.monotonic() < deadline, logs
        yield {"SLURM_CONF": str(path)}


def _bind_somewhere(probe, first):
    for port in range(first, first + 1000):
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@needs_slurm
@pytest.mark.whole("a variant of srun")
def test_srun_with_pmi2(slurm, script, tmp_path):
    command = ["srun", "-n", "3", "--mpi=pmi2", sys.executable, script]
    assert output(command, TMPDIR=str(tmp_path), **slurm) == expected(3)


@needs_slurm
def test_two_jobs_of_srun_at_once_are_two_worlds(slurm, script, tmp_path):
    command = ["srun", "-n", "2", sys.executable, script]
    assert two_at_once(command, TMPDIR=str(tmp_path), **slurm) == [expected(2)] * 2


@needs_slurm
def test_an_allocation_without_srun_is_an_error(slurm, script):
    command = ["salloc", "-n", "2", sys.executable, script]
    done = completed(command, **slurm)
    assert done.returncode != 0
    assert "SLURM_NTASKS=2 means several processes" in done.stderr
    assert "hint: start the script with srun" in done.stderr


@needs_slurm
@pytest.mark.whole("a variant of srun")
def test_unisono_run_under_srun(slurm, script, tmp_path):
    command = ["srun", "-n", "1", sys.executable, "-m", "unisono", "run", "-n", "2", script]
    assert output(command, TMPDIR=str(tmp_path), **slurm) == expected(2)
