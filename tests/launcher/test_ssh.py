"""`unisono run --hosts`: sshd on hosts that are network namespaces."""

import json
import os
import signal
import sys

import pytest

from tests.support import ssh
from tests.support.launches import gone
from unisono import __version__
from unisono.errors import InvalidArgumentError
from unisono.launcher.ssh import remote
from unisono.workbench.cli.run.hosts import parse_hosts

needs_sshd = pytest.mark.skipif(ssh.why_not() is not None, reason=str(ssh.why_not()))

# Prints whether the token is in a command line of any process.
SUM = """
import glob, os, socket, sys
import numpy as np
import unisono as dist
dist.init_process_group()
dist.all_reduce(x := np.ones(1))
token = os.environ["UNISONO_TOKEN"].encode()
open_words = False
for path in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        open_words |= token in open(path, "rb").read()
    except OSError:
        pass
print("up", dist.get_rank(), int(x[0]), socket.gethostname(), open_words, os.environ["NCCL_DEBUG"],
      *sys.argv[1:])
if dist.get_rank() == 2 and "fail" in sys.argv:
    raise ValueError("x" * 200_000 + " as planned")
dist.destroy_process_group()
"""

# Waits until it is stopped.
STAY = """
import os, time
import numpy as np
import unisono as dist
dist.init_process_group()
dist.all_reduce(np.ones(1))
print(f"up {os.getpid()}", flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ssh.Cluster(tmp_path_factory.mktemp("ssh") / "files") as cluster:
        yield cluster


@pytest.fixture
def start(launches, cluster):
    """Return a function that starts a script on the hosts, from the first."""

    def start(*flags, hosts="host1:2,host2:1", options="", **more):
        words = [f"--hosts={hosts}", f"--ssh={cluster.ssh} {options}", *flags]
        return launches.start(*words, host=cluster.hosts[0], NCCL_DEBUG="INFO", **more)

    return start


def ups(launch, count):
    """Wait for the workers of STAY; return their process numbers."""
    return [int(line.split()[-1]) for line in launch.lines(count, "[rank ")]


@needs_sshd
@pytest.mark.parametrize("tls", ["off", "on"])
def test_hosts_are_one_world_and_the_token_is_in_no_command_line(start, tls):
    variables = {"UNISONO_HOST": "203.0.113.1", "UNISONO_TLS": tls}
    code, out, err = start(script=SUM, args=["a b", "'"], **variables).finish()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        "[rank 0] up 0 3 host1 False INFO a b '",
        "[rank 1] up 1 3 host1 False INFO a b '",
        "[rank 2] up 2 3 host2 False INFO a b '",
    ]


@needs_sshd
def test_a_failing_rank_ends_all_hosts_and_is_reported_once(start, cluster, tmp_path):
    code, _, err = start("--error-json=report.json", script=SUM, args=["fail"]).finish()
    assert code == 1
    assert err.count("first failure: rank 2 (pid ") == 1
    assert err.endswith("x as planned\n")
    [failure] = json.loads((tmp_path / "report.json").read_text())["failures"]
    assert (failure["rank"], failure["host"]) == (2, "host2")
    assert [cluster.left(host) for host in cluster.hosts] == [[], []]


@needs_sshd
def test_ctrl_c_ends_all_hosts(start, cluster):
    launch = start(script=STAY)
    pids = ups(launch, 3)
    launch.send_signal(signal.SIGINT)
    code, _, err = launch.finish()
    assert code == 130
    assert err.splitlines()[-1] == "unisono run: stopped by SIGINT"
    assert gone(pids, 60)
    assert [cluster.left(host) for host in cluster.hosts] == [[], []]


@needs_sshd
def test_ctrl_c_ends_hosts_whose_output_is_not_read(start):
    flood = "import os\nprint(f'up {os.getpid()}', flush=True)\nwhile True: print('x' * 1000)"
    launch = start("--grace=1", script=flood)
    pids = [int(line.split()[-1]) for line in launch.lines(3, "[rank ") if "up" in line]
    launch.send_signal(signal.SIGINT)
    assert launch.wait() == 130
    assert gone(pids, 60)


@needs_sshd
def test_hosts_end_with_the_process_that_started_them(start):
    launch = start(script=STAY)
    pids = ups(launch, 3)
    launch.send_signal(signal.SIGKILL)
    assert gone(pids, 60)


@needs_sshd
def test_a_lost_connection_is_named_and_ends_all_hosts(start, cluster):
    launch = start(script=STAY)
    pids = ups(launch, 3)
    [session] = [pid for pid, words in cluster.processes(cluster.hosts[1]) if b"@notty" in words]
    os.kill(session, signal.SIGKILL)
    code, _, err = launch.finish()
    assert code == 1
    assert "unisono run: lost host2: the ssh connection to it ended" in err.splitlines()
    assert gone(pids, 60)


@needs_sshd
@pytest.mark.whole
def test_a_host_that_is_cut_off_is_named_and_ends_its_workers(start, cluster):
    launch = start(script=STAY, options="-oServerAliveInterval=1 -oServerAliveCountMax=2")
    pids = ups(launch, 3)
    cluster.network.cut(cluster.hosts[1])
    try:
        code, _, err = launch.finish()
        assert code == 1
        assert "unisono run: lost host2: the ssh connection to it ended" in err.splitlines()
        assert gone(pids, 60)
    finally:
        cluster.network.restore(cluster.hosts[1])


def changed_python(folder, change):
    """Return the path of a Python that first runs a statement."""
    path = folder / "python"
    words = f"{change}; import unisono.launcher.ssh.remote as remote; remote.main()"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{words}"\n')
    path.chmod(0o755)
    return f"--remote-python={path}"


@needs_sshd
def test_a_finding_of_the_doctor_is_shown_once_and_nothing_starts(start, tmp_path):
    change = "import socket, unisono.workbench.cli.doctor.host as h; "
    change += "h.__version__ = '0.0.' + socket.gethostname()[-1]"
    code, out, err = start(changed_python(tmp_path, change), script=SUM).finish()
    assert (code, out) == (1, "")
    assert err.count("doctor: error:   unisono: 0.0.1 on host1, 0.0.2 on host2") == 1
    assert "unisono run: the doctor found errors, so no worker was started" in err


@needs_sshd
def test_other_versions_are_an_error_before_the_start(start, tmp_path):
    change = "import unisono; unisono.__version__ = '0.0.9'"
    code, out, err = start(changed_python(tmp_path, change), script=SUM).finish()
    assert (code, out) == (1, "")
    for host in ("host1", "host2"):
        assert f"{host}: unisono is 0.0.9 there, {__version__} here" in err


@needs_sshd
def test_what_a_host_lacks_is_an_error_before_the_start(start):
    code, out, err = start("--remote-python=/no/python", script=SUM).finish()
    assert (code, out) == (1, "")
    assert err.startswith(
        "unisono: error: no worker was started, because of host1: /no/python fails ("
    )
    code, out, err = start(hosts="host1,nohost", script=SUM).finish()
    assert (code, out) == (1, "")
    assert "because of nohost: no ssh connection (" in err
    code, out, err = start("--master-addr=localhost", script=SUM).finish()
    assert "host2: localhost is 127.0.0.1 there, which other hosts do not reach" in err


@needs_sshd
def test_one_host_and_a_command_without_ssh(start, launches):
    code, out, _ = start(hosts="host2", script=SUM).finish()
    assert (code, out) == (0, "[rank 0] up 0 1 host2 False INFO\n")
    code, _, err = launches.run("--hosts=a", "--ssh=/no/ssh", "script.py")
    assert (code, err) == (1, "unisono: error: cannot start /no/ssh: No such file or directory\n")


@needs_sshd
def test_a_program_that_cannot_be_started_ends_all_hosts(start):
    code, out, err = start("--no-python", "/no/program").finish()
    assert (code, out) == (1, "")
    assert "unisono: error: cannot start rank" in err
    assert "unisono run: the agent on host" in err


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a", {"a": 0}),
        ("a:4, b:2", {"a": 4, "b": 2}),
        ("me@a:4,[fd77::1]:2", {"me@a": 4, "[fd77::1]": 2}),
    ],
)
def test_hosts_and_their_workers(text, found):
    assert parse_hosts(text) == found


@pytest.mark.parametrize("text", ["", "a,,b", "a,a:2", "a:0", "a:x", "-oProxyCommand=x", "fd77::1"])
def test_no_hosts(text):
    with pytest.raises(InvalidArgumentError, match="must be different hosts, HOST or HOST:WORKERS"):
        parse_hosts(text)


def test_flags_that_contradict_hosts(launches):
    (launches.folder / "a.py").touch()
    for flag in ("--nnodes=2", "--standalone", "--rdzv-endpoint=a"):
        code, _, err = launches.run("--hosts=a,b", flag, "a.py")
        assert (code, err.partition(":")[0]) == (1, "unisono")
        assert "--hosts decides how the nodes meet: leave out --nnodes, --node-rank" in err


def test_a_dry_run_names_the_hosts(launches):
    (launches.folder / "a.py").touch()
    flags = ["--dry-run", "--remote-python=/usr/bin/python3"]
    code, out, _ = launches.run("--hosts=a:4,b", *flags, "a.py")
    words = "command  ssh HOST /usr/bin/python3"
    assert (code, out.splitlines()) == (0, ["a: 4 workers", "b: 1 workers", words])


def test_what_a_host_lacks(tmp_path):
    asked = {"folder": str(tmp_path), "script": "", "first": ""}
    assert remote._faults(asked) == []
    assert remote._faults(asked | {"folder": "/no/folder"}) == ["no folder /no/folder"]
    assert remote._faults(asked | {"script": "x.py"}) == [f"no script {tmp_path}/x.py"]
    [fault] = remote._faults(asked | {"first": "no.such.host.invalid"})
    assert fault.startswith("cannot resolve no.such.host.invalid: ")
