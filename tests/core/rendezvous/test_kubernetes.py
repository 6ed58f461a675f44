"""An Indexed Job with a headless service, as far as that can be had without Kubernetes.

A pod is what the kernel makes of one: namespaces of its own (network, mounts, host name, processes,
IPC), its own /dev/shm, the environment and the /etc/hosts that a kubelet gives it, and an
interpreter that is process 1. The names of the other pods, which the cluster's DNS has, are in
/etc/hosts too, and for pods that are not up yet they are not.
"""

import contextlib
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

import unisono as dist
from tests.support import netns
from unisono.core.engines import is_native_built

pytestmark = pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not()))

LIMIT_S = 100
# Containers have process numbers of their own, and no less speed for that.
ENGINE = "native" if is_native_built() else "reference"
SRC = str(Path(dist.__file__).parents[1])
DOMAIN = "workers.default.svc.cluster.local"
CLUSTER = {
    "KUBERNETES_PORT": "tcp://10.96.0.1:443",
    "KUBERNETES_PORT_443_TCP": "tcp://10.96.0.1:443",
    "KUBERNETES_PORT_443_TCP_ADDR": "10.96.0.1",
    "KUBERNETES_PORT_443_TCP_PORT": "443",
    "KUBERNETES_PORT_443_TCP_PROTO": "tcp",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "KUBERNETES_SERVICE_PORT_HTTPS": "443",
}
KUBELET = """\
# Kubernetes-managed hosts file.
127.0.0.1\tlocalhost
::1\tlocalhost ip6-localhost ip6-loopback
fe00::0\tip6-localnet
ff02::1\tip6-allnodes
ff02::2\tip6-allrouters
"""

# Which node it is on shows in the kernel's boot id.
CONTAINER = """
set -e
mount -t tmpfs none /dev/shm
echo $0 > /dev/shm/boot
mount --bind /dev/shm/boot /proc/sys/kernel/random/boot_id
rm /dev/shm/boot
cd "$1"
shift
exec "$@"
"""

SCRIPT = """
import os, socket
import numpy as np
import unisono as dist
sums = []
for _ in range(2):
    dist.init_process_group(timeout=40)
    x = np.full(2, dist.get_rank() + 1.0)
    dist.all_reduce(x)
    sums.append(float(x[0]))
    rank, size = dist.get_rank(), dist.get_world_size()
    engine = repr(dist.group.WORLD).partition("engine=")[2].split()[0]
    dist.destroy_process_group()
print(rank, size, socket.gethostname(), engine, sums, flush=True)
"""


def indexed_job(index, pods):
    # WORLD_SIZE is from the manifest.
    return {"JOB_COMPLETION_INDEX": str(index), "WORLD_SIZE": str(pods)}


def leader_worker_set(index, pods):
    return {
        "LWS_WORKER_INDEX": str(index),
        "LWS_GROUP_SIZE": str(pods),
        "LWS_LEADER_ADDRESS": f"train-0.{DOMAIN}",
    }


def volcano_job(index, pods):
    hosts = ",".join(f"train-{each}.{DOMAIN}" for each in range(pods))
    return {"VC_TASK_INDEX": str(index), "VC_WORKER_NUM": str(pods), "VC_WORKER_HOSTS": hosts}


class Cluster:
    """A job `train` of some pods, on one node of the cluster or on a node each."""

    def __init__(self, folder, hosts, *, one_node, kind):
        self.kind = kind
        self.pods = hosts
        self.folder = folder
        self._processes = []
        self._boots = (
            [str(uuid.uuid4())] * len(hosts) if one_node else [str(uuid.uuid4()) for _ in hosts]
        )
        for index, pod in enumerate(hosts):
            pod.run("hostname", f"train-{index}")

    def publish(self, *indices):
        """Let every pod find these and itself by name."""
        for index, pod in enumerate(self.pods):
            names = [f"{self.pods[i].v4}\ttrain-{i}.{DOMAIN}\ttrain-{i}" for i in {*indices, index}]
            # The network has put a file of the host's own there.
            pod.run("sh", "-c", "cat > /etc/hosts", text=KUBELET + "\n".join(names) + "\n")

    def start(self, index, *command, **variables):
        """Start the container of a pod."""
        env = CLUSTER | {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOSTNAME": f"train-{index}",
            "HOME": "/root",
            **self.kind(index, len(self.pods)),
            # From the manifest: its `env`, the token from a Secret.
            "UNISONO_TOKEN": netns.TOKEN,
            "PYTHONPATH": SRC,
        }
        words = [f"{name}={text}" for name, text in (env | variables).items()]
        process = subprocess.Popen(
            self.pods[index].inside(
                *("unshare", "--pid", "--ipc", "--mount", "--fork", "--kill-child", "--mount-proc"),
                *("sh", "-c", CONTAINER, self._boots[index], self.folder),
                *("env", "-i", *words, *command),
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def close(self):
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture
def cluster(tmp_path):
    """Return a function that makes the nodes and pods of a job."""
    (tmp_path / "train.py").write_text(SCRIPT)
    with contextlib.ExitStack() as stack:

        def make(pods, *, one_node=False, kind=indexed_job):
            hosts = stack.enter_context(netns.Network(pods)).hosts
            made = Cluster(tmp_path, hosts, one_node=one_node, kind=kind)
            stack.callback(made.close)
            return made

        yield make


def outputs(processes):
    results = [(*p.communicate(timeout=LIMIT_S), p.returncode) for p in processes]
    assert [code for _, _, code in results] == [0] * len(results), results
    return [out for out, _, _ in results]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("one_node", [False, True], ids=["a node each", "one node"])
def test_indexed_job_meets_at_its_first_pod(cluster, one_node):
    job = cluster(3, one_node=one_node)
    job.publish(0, 1, 2)
    running = [job.start(index, sys.executable, "train.py") for index in range(3)]
    assert outputs(running) == [f"{i} 3 train-{i} {ENGINE} [6.0, 6.0]\n" for i in range(3)]


@pytest.mark.parametrize("kind", [leader_worker_set, volcano_job])
def test_pods_meet_at_the_pod_that_a_variable_names(cluster, kind):
    job = cluster(2, kind=kind)
    job.publish(0, 1)
    running = [job.start(index, sys.executable, "train.py") for index in range(2)]
    assert outputs(running) == [f"{i} 2 train-{i} {ENGINE} [3.0, 3.0]\n" for i in range(2)]


def test_first_pod_that_comes_last(cluster):
    # Until it is up, the service does not know its name.
    job = cluster(2)
    job.publish(1)
    second = job.start(1, "sh", "-c", "echo started; exec $0 train.py", sys.executable)
    assert second.stdout.readline() == "started\n"
    job.publish(0, 1)
    first = job.start(0, sys.executable, "train.py")
    assert outputs([first, second]) == [f"{i} 2 train-{i} {ENGINE} [3.0, 3.0]\n" for i in range(2)]


def test_launcher_in_each_pod(cluster):
    job = cluster(2)
    job.publish(0, 1)
    flags = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    flags += [f"--rdzv-endpoint=train-0.{DOMAIN}:29400"]
    command = [sys.executable, "-m", "unisono", "run", *flags, "train.py"]
    lines = "".join(outputs([job.start(index, *command) for index in range(2)])).splitlines()
    found = sorted(line.split()[:2] + line.split()[3:] for line in lines)
    assert found == [[str(rank), "4", ENGINE, "[10.0,", "10.0]"] for rank in range(4)]
