"""`init_process_group()` under mpiexec of several libraries, on one host and on two.

MPICH is a requirement of the tests, and Debian has Open MPI 4 (`make servers`). UNISONO_TEST_MPI
may list environments with others.
"""

import os
import re
import shlex
import shutil
import sys

import pytest

from tests.core.rendezvous.test_detection import (
    BODY,
    MPIEXEC,
    completed,
    expected,
    output,
    side_by_side,
)
from tests.support import netns

MPIRUN = shutil.which("mpirun.openmpi")
FOLDERS = [name for name in os.environ.get("UNISONO_TEST_MPI", "").split(",") if name]
# mpiexec, the Python of its library, and the engines.
LAUNCHERS = [
    *([(str(MPIEXEC), sys.executable, ["native", "mpi"])] if MPIEXEC.exists() else []),
    *([(MPIRUN, sys.executable, ["native"])] if MPIRUN else []),
    *((f"{name}/bin/mpiexec", f"{name}/bin/python", ["native", "mpi"]) for name in FOLDERS),
]
# In place of ssh: what mpiexec starts on the other host begins in that host's network.
ENTER = """#!/bin/sh
while case $1 in -*) ;; *) false ;; esac; do shift; done
case $1 in
{cases}
esac
"""

needs_hosts = pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not()))


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(BODY)
    return str(path)


@pytest.mark.skipif(MPIRUN is None, reason="Open MPI is not installed; `make servers`")
def test_two_jobs_of_open_mpi_at_once_are_two_worlds(script, tmp_path):
    command = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable, script]
    outs = side_by_side([command] * 2, [{"TMPDIR": str(tmp_path)}] * 2)
    assert [sorted(out.splitlines()) for out in outs] == [expected(3)] * 2


@pytest.fixture
def hosts(tmp_path):
    """Three hosts; the program `enter` takes the place of ssh."""
    with netns.Network(3) as network:
        cases = [
            f'{host.name}) shift; exec {shlex.join(host.inside("sh", "-c"))} "$*" ;;'
            for host in network.hosts
        ]
        enter = tmp_path / "enter"
        enter.write_text(ENTER.format(cases="\n".join(cases)))
        enter.chmod(0o755)
        yield network.hosts


def on_two_hosts(mpiexec, folder):
    """Return the command that starts two ranks on each host, and the variables for it."""
    enter = str(folder / "enter")
    if re.search("HYDRA|Intel", completed([mpiexec, "--version"]).stdout):
        words = f"-launcher ssh -launcher-exec {enter} -hosts host1,host2 -n 4 -ppn 2"
        return [mpiexec, *words.split()], {}
    words = "--allow-run-as-root -H host1:2,host2:2 --map-by ppr:2:node"
    env = {"OMPI_MCA_plm_rsh_agent": enter, "PRTE_MCA_plm_ssh_agent": enter}
    return [mpiexec, *words.split()], env


@needs_hosts
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("mpiexec", "python", "engine"),
    [(mpiexec, python, engine) for mpiexec, python, engines in LAUNCHERS for engine in engines],
)
def test_mpiexec_on_two_hosts_needs_no_address(hosts, script, tmp_path, mpiexec, python, engine):
    words, env = on_two_hosts(mpiexec, tmp_path)
    command = hosts[0].inside(*words, python, script)
    lines = output(command, UNISONO_ENGINE=engine, TMPDIR=str(tmp_path), **env)
    assert lines == [f"{r}/4 local {r % 2}: {[10.0, 10.0]}" for r in range(4)]


@needs_hosts
@pytest.mark.whole("starts two jobs on three hosts")
@pytest.mark.skipif(MPIRUN is None, reason="Open MPI is not installed; `make servers`")
def test_mpiexec_on_a_login_node_is_an_error_at_once(hosts, script, tmp_path):
    words, env = on_two_hosts(MPIRUN, tmp_path)
    env |= {"UNISONO_TIMEOUT": "600", "TMPDIR": str(tmp_path)}
    done = completed(hosts[2].inside(*words, sys.executable, script), **env)
    assert done.returncode != 0
    assert "rank 0 is on host1, but the other ranks look for it on" in done.stderr
    command = hosts[2].inside(*words, "-x", "MASTER_ADDR=host1", sys.executable, script)
    assert len(output(command, **env)) == 4
