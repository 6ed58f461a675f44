"""`init_process_group()` under Slurm itself: three nodes, as a user of a cluster has them."""

import json
import re
import subprocess
import sys
from collections import Counter

import pytest

from tests.core.rendezvous.test_detection import clean_environment, completed, side_by_side
from tests.core.rendezvous.test_real_launchers import FOLDERS
from tests.support.ports import reserved_port
from tests.support.slurm import Cluster, why_not

# The engine's tests have an oracle for each call; here one shows that exactly these ranks met.
BODY = """
import json, os, socket
import numpy as np
import unisono as dist
from unisono.core.c10d.queries import get_node_local_rank
sums = []
for _ in range(2):
    dist.init_process_group()
    x = np.full(3, 2.0 ** dist.get_rank())
    dist.all_reduce(x)
    sums.append(x.tolist())
    assert f"engine={os.environ.get('UNISONO_ENGINE', 'native')}" in repr(dist.group.WORLD)
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
line = [rank, size, socket.gethostname(), get_node_local_rank(), sums]
os.write(1, (json.dumps(line) + "\\n").encode())
"""

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
whole = pytest.mark.whole("a variant of srun")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm"), clean_environment()) as cluster:
        yield cluster


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(BODY)
    return str(path)


def srun(slurm, *words, **env):
    """Run srun to its end; return what it has printed."""
    done = completed(slurm.command("srun", "--kill-on-bad-exit", *words), **env)
    if "can not load PMIx library" in done.stderr:
        pytest.skip("libpmix.so is not installed; `make servers`")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def told(text):
    return sorted(json.loads(line) for line in text.splitlines() if line.startswith("["))


def expected(*hosts):
    """Return the lines of ranks on these hosts."""
    size, before = len(hosts), Counter()
    lines = []
    for rank, host in enumerate(hosts):
        lines.append([rank, size, f"host{host}", before[host], [[2.0**size - 1] * 3] * 2])
        before[host] += 1
    return lines


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("flags", "hosts"),
    [
        ("-n1", [1]),
        ("-N1 -n3", [1, 1, 1]),
        ("-N3 -n3", [1, 2, 3]),
        ("-N3 -n5 -m plane=3", [1, 1, 1, 2, 3]),
        ("-N3 -n4 -m cyclic", [1, 2, 3, 1]),
        ("-N2 -n2 -w host3,host2", [2, 3]),
        ("-N3 -n4 --mpi=pmi2 -m cyclic", [1, 2, 3, 1]),
        ("-N3 -n3 --mpi=pmix", [1, 2, 3]),
    ],
)
def test_ranks_are_where_slurm_puts_them(slurm, script, flags, hosts):
    assert told(srun(slurm, *flags.split(), sys.executable, script)) == expected(*hosts)


def test_rank_0_on_another_host_than_the_first(slurm, script, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("host3\nhost1\nhost1\nhost2\n")
    words = ["srun", "--kill-on-bad-exit", "-n4", "-m", "arbitrary", sys.executable, script]
    # Slurm names the hosts of the step in alphabetical order. So the ranks meet, or fail at once.
    done = completed(slurm.command(*words), SLURM_HOSTFILE=str(hosts), UNISONO_TIMEOUT="600")
    if done.returncode == 0:
        assert told(done.stdout) == expected(3, 1, 1, 2)
    else:
        assert re.search(r"Error: .*host1.*MASTER_ADDR", done.stderr, re.DOTALL), done.stderr


@whole
@pytest.mark.parametrize(
    ("python", "kind"),
    [
        *((sys.executable, kind) for kind in ("none", "pmi2", "pmix")),
        *((f"{folder}/bin/python", "pmix") for folder in FOLDERS),
    ],
)
def test_mpi_engine(slurm, script, python, kind):
    pytest.importorskip("mpi4py")
    text = srun(slurm, "-N3", "-n3", f"--mpi={kind}", python, script, UNISONO_ENGINE="mpi")
    assert told(text) == expected(1, 2, 3)


@whole
def test_heterogeneous_job(slurm, script):
    command = [sys.executable, script]
    text = srun(slurm, "-N1", "-n1", *command, ":", "-N2", "-n3", "-m", "cyclic", *command)
    assert told(text) == expected(1, 2, 3, 2)


def test_two_jobs_at_once_are_two_worlds(slurm, script):
    command = slurm.command("srun", "-N3", "-n3", sys.executable, script)
    outs = side_by_side([command] * 2, [{}] * 2)
    assert [told(out) for out in outs] == [expected(1, 2, 3)] * 2


@whole
def test_two_steps_at_once_are_two_worlds(slurm, script):
    step = f"srun --overlap -N3 -n3 {sys.executable} {script}"
    command = ["salloc", "-N3", "-n3", "sh", "-c", f"{step} & {step} & wait"]
    done = completed(slurm.command(*command))
    assert told(done.stdout) == sorted(expected(1, 2, 3) * 2), done.stderr


def test_an_allocation_without_srun_is_an_error(slurm, script):
    done = completed(slurm.command("salloc", "-n2", sys.executable, script))
    assert done.returncode != 0
    assert "SLURM_NTASKS=2 means several processes" in done.stderr
    assert "hint: start the script with srun" in done.stderr


@whole
def test_no_token_is_an_error_on_all_hosts(slurm, script):
    words = ["-N3", "-n4", "env", "-u", "UNISONO_TOKEN", sys.executable, script]
    done = completed(slurm.command("srun", *words), UNISONO_TIMEOUT="600")
    assert done.returncode != 0
    errors = re.findall(r"^unisono\.errors\.\w+: .*", done.stderr, re.MULTILINE)
    assert len(errors) == 4, done.stderr
    assert "UNISONO_TOKEN" in done.stderr


@whole
def test_one_launcher_on_each_host(slurm, script):
    run = [sys.executable, "-m", "unisono", "run", "-n2"]
    assert told(srun(slurm, "-n1", *run, script)) == expected(1, 1)
    with reserved_port() as port:
        run += ["--nnodes=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=host1:{port}"]
        text = srun(slurm, "-N3", "-n3", *run, "--rdzv-id=job", script)
    lines = told(text)
    # The agents come in any order, so the hosts do as well.
    hosts = [line[2] for line in lines[::2]]
    assert sorted(hosts) == ["host1", "host2", "host3"]
    assert lines == expected(*(host[-1] for host in hosts for _ in range(2)))


STOPPING = """
import pathlib, sys, time
import numpy as np
import unisono as dist
dist.init_process_group()
folder, steps = pathlib.Path(sys.argv[1]), 0
while not dist.should_stop():
    steps += 1
    if steps == 2:
        (folder / f"began{dist.get_rank()}").touch()
    time.sleep(0.02)
(folder / f"saved{dist.get_rank()}").write_text(str(steps))
dist.destroy_process_group()
"""


@whole
@pytest.mark.parametrize("launcher", [[], ["-m", "unisono", "run", "-n2"]], ids=["srun", "run"])
def test_a_job_that_stops_in_time_ends_well(slurm, tmp_path, launcher):
    (tmp_path / "script.py").write_text(STOPPING)
    ranks = "-N2 -n2" if not launcher else "-n1"
    words = [*ranks.split(), "-J", "stops", sys.executable, *launcher]
    command = slurm.command("srun", *words, tmp_path / "script.py", tmp_path)
    with subprocess.Popen(
        [str(word) for word in command], env=clean_environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        slurm.until(lambda: len(list(tmp_path.glob("began*"))) == 2 or process.poll() is not None)
        # The step alone, as by `sbatch --signal`: srun itself would force the end of its step.
        job = slurm.ask("squeue", "-h", "--name=stops", "-o", "%i")
        slurm.ask("scancel", "--signal=TERM", f"{job}.0")
        error = process.communicate(timeout=100)[1]
    assert process.returncode == 0, (error, [p.name for p in tmp_path.iterdir()])
    saved = [(tmp_path / f"saved{rank}").read_text() for rank in range(2)]
    assert saved[0] == saved[1]


METRICS = """
import json, os, urllib.request
import unisono as dist
from unisono.core.recorder import metrics
dist.init_process_group()
dist.barrier()
port = metrics._server[0].server_port
with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
    text = page.read().decode()
line = [dist.get_rank(), port, text.count(f'rank="{dist.get_rank()}"') > 0]
dist.barrier()
os.write(1, (json.dumps(line) + "\\n").encode())
dist.destroy_process_group()
"""


@whole
def test_metrics_have_a_port_for_each_local_rank(slurm, tmp_path):
    pytest.importorskip("prometheus_client")
    (tmp_path / "script.py").write_text(METRICS)
    with reserved_port() as port:
        words = ["-N2", "-n4", "-m", "block", "--ntasks-per-node=2", sys.executable]
        text = srun(slurm, *words, tmp_path / "script.py", UNISONO_METRICS_PORT=str(port))
    assert told(text) == [[rank, port + rank % 2, True] for rank in range(4)]


REQUEUED = """#!/bin/bash
#SBATCH -N2 -n2 --requeue
srun {python} {folder}/script.py {folder}
"""
CHECKPOINT = """
import os, pathlib, subprocess, sys, time
import numpy as np
import unisono as dist
dist.init_process_group()
file = pathlib.Path(sys.argv[1]) / "checkpoint"
step = int(file.read_text()) if file.exists() else 0
total = np.full(1, float(step))
dist.all_reduce(total, dist.ReduceOp.AVG)
step = int(total[0]) + 1
dist.barrier()
if dist.get_rank() == 0:
    file.write_text(str(step))
    if "SLURM_RESTART_COUNT" not in os.environ:
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
while "SLURM_RESTART_COUNT" not in os.environ:
    dist.all_reduce(total)
    time.sleep(0.02)
dist.destroy_process_group()
"""


@whole
def test_a_requeued_job_goes_on(slurm, tmp_path):
    (tmp_path / "script.py").write_text(CHECKPOINT)
    batch = tmp_path / "job.sh"
    batch.write_text(REQUEUED.format(python=sys.executable, folder=tmp_path))
    output = tmp_path / "output"
    # sbatch --wait would look for the end after 10 s, and then after 42 s.
    job = slurm.ask("sbatch", "--parsable", "-o", str(output), str(batch))
    slurm.until(lambda: not slurm.ask("squeue", "-h", "-j", job))
    assert "JobState=COMPLETED" in slurm.ask("scontrol", "show", "job", job), output.read_text()
    assert (tmp_path / "checkpoint").read_text() == "2"
